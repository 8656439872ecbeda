"""The configuration of LongNet models: sizes, rates and names, no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from dilated_attention_pytorch.ops.validation import check_order, check_size
from dilated_attention_pytorch.patterns import DilatedPattern, Pattern, pattern_from_expression
from dilated_attention_pytorch.patterns.dilated import OffsetRule

_MOST_LAYERS = 4096
_MOST_PARAMETERS = 2**48
_WIDEST_CONVOLUTION = 4
CYCLED = ("layer_segment_shifts", "layer_patterns", "layer_rope_thetas", "layer_scale_lengths")
"""Fields of a :class:`LongNetConfig` that are cycled over the layers."""
Activation = Literal["swiglu", "gelu"]


@dataclass(kw_only=True, slots=True)
class LongNetConfig:
    """Sizes and options of a :class:`LongNetLM` (LongNet, arXiv 2307.02486; MAGNETO, arXiv 2210.06423).

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a size, rate or name is out of range, or sizes do not divide.

    >>> from dilated_attention_pytorch.models import LongNetConfig
    >>> config = LongNetConfig(
    ...     embed_dim=64, num_layers=2, num_heads=4, segment_lengths=[16, 64], dilation_rates=[1, 4]
    ... )
    >>> config.ffn_dim, config.num_kv_heads, config.pattern(0).segment_lengths
    (192, 4, (16, 64))
    """

    vocab_size: int = 256
    """Vocabulary size; 256 for bytes."""
    embed_dim: int
    """Width E of the model."""
    num_layers: int
    """Number of blocks L."""
    num_heads: int
    """Query heads H of every block. H divides E, and E / H is even."""
    num_kv_heads: int | None = None
    """Key/value heads G, which divide H (grouped-query attention). Default: H, which the field then reads."""
    ffn_dim: int | None = None
    """Inner width of the feed-forward. Default: 4 E for "gelu", and 8/3 E rounded up to a multiple of 64 for
    "swiglu"."""
    activation: Activation = "swiglu"
    """Activation of the feed-forward. "swiglu" (Shazeer 2020, arXiv 2002.05202) or "gelu"."""
    segment_lengths: Sequence[int] = ()
    """Segment lengths w_i of the attention pattern."""
    dilation_rates: Sequence[int] = ()
    """Dilation rates r_i, one per segment length. None is larger than its segment."""
    offset_rule: OffsetRule = "modulo"
    """How heads choose residues, see :class:`DilatedPattern`."""
    layer_segment_shifts: Sequence[int] = (0,)
    """Segment shifts in positions, cycled over the layers. Layers then need not share segment boundaries."""
    layer_patterns: Sequence[str] = ()
    """Pattern expressions, cycled over the layers. They stand instead of segment lengths and rates; for example
    "local_window(511)", "local_window(255) + DilatedPattern([1024, 4096], [2, 4])"."""
    dropout: float = 0.0
    """Dropout probability of the embedding and of block outputs."""
    attention_dropout: float = 0.0
    """Dropout probability of merged attention probabilities."""
    rope_theta: float = 10000.0
    """Base of the rotary position angles (Su et al. 2021, arXiv 2104.09864)."""
    layer_rope_thetas: Sequence[float] = ()
    """Rotary bases, cycled over the layers, in place of rope_theta. 0 = no positions in that layer (SWAN, arXiv
    2504.08719, has none in its layers without a window; Gemma 3, arXiv 2503.19786, gives those a larger base)."""
    layer_scale_lengths: Sequence[int] = ()
    """Lengths n, cycled over the layers: the scores of the query at position p are multiplied by
    max(1, log(p + 1) / log(n)), so that attention over more keys stays as sharp (as in SWAN, arXiv 2504.08719). 0 = a
    factor of 1."""
    head_gates: bool = False
    """Multiply the normalised output of each head by a gate 2 sigmoid(W x), x the normalised input of the block and W
    of H x E. Gates start at 1 (Qiu et al. 2025, arXiv 2505.06708: headwise, sigmoid(W x))."""
    key_convolution: int = 1
    """Width m, 2 to 4, of a causal convolution over the keys of a document, before rotation: channel c of the key at t
    becomes sum_j w[c, j] k[t - j, c] over j < m (FlashMoBA, arXiv 2511.11571, has a short convolution on keys too). 1 =
    none."""
    shifted_keys: bool = False
    """Take each token's key from the previous token (0 for the first of a document). A query that matches a token then
    finds its successor, so that one layer can copy (Olsson et al. 2022, arXiv 2209.11895, "smeared keys", which mix the
    two). A key_convolution with the fixed weights 0 and 1."""
    layernorm_eps: float = 1e-5
    """Epsilon of every LayerNorm."""
    tie_embeddings: bool = True
    """Use the embedding table as the output matrix."""
    gradient_checkpointing: bool = False
    """Recompute blocks in the backward pass: less memory, more time."""
    checkpoint_every: int = 1
    """With gradient_checkpointing, recompute every n-th block, starting with the first."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "embed_dim", "num_layers", "num_heads", "checkpoint_every"):
            check_size(name, getattr(self, name))
        for name in ("num_kv_heads", "ffn_dim"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        if self.embed_dim % self.num_heads or self.embed_dim // self.num_heads % 2:
            raise ValueError(
                "num_heads must divide embed_dim into heads of even width, as rotary positions need: "
                f"got embed_dim {self.embed_dim} and {self.num_heads} heads"
            )
        if self.num_layers > _MOST_LAYERS:
            raise ValueError(f"num_layers must be at most {_MOST_LAYERS:,}, got {self.num_layers}")
        if self.num_kv_heads is None:
            self.num_kv_heads = self.num_heads
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads: got {self.num_kv_heads} of {self.num_heads} heads")
        if self.activation not in get_args(Activation):
            raise ValueError(f'activation must be "swiglu" or "gelu", got {self.activation!r}')
        if self.ffn_dim is None:
            self.ffn_dim = 4 * self.embed_dim if self.activation == "gelu" else -(-self.embed_dim // 24) * 64
        for name in ("dropout", "attention_dropout"):
            rate = _as_number(name, getattr(self, name))
            if not 0.0 <= rate < 1.0:
                raise ValueError(f"{name} must be a probability of at least 0 and below 1, got {rate}")
            setattr(self, name, rate)
        for name in ("rope_theta", "layernorm_eps"):
            number = _as_number(name, getattr(self, name))
            if not 0.0 < number < float("inf"):
                raise ValueError(f"{name} must be a finite number above 0, got {number}")
            setattr(self, name, number)
        for name in ("head_gates", "shifted_keys", "tie_embeddings", "gradient_checkpointing"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if isinstance(self.layer_segment_shifts, (str, int)) or not self.layer_segment_shifts:
            raise ValueError(
                "layer_segment_shifts must be a list of at least one shift, in positions: "
                f"got {self.layer_segment_shifts!r}"
            )
        self.layer_segment_shifts = tuple(self.layer_segment_shifts)
        if isinstance(self.layer_patterns, str):
            raise ValueError(f"layer_patterns must be a list of patterns, got the string {self.layer_patterns!r}")
        self.layer_patterns = tuple(self.layer_patterns)
        self._check_patterns()
        self._check_positions()
        self._check_keys()
        if self.num_parameters > _MOST_PARAMETERS:
            raise ValueError(
                f"vocab_size, embed_dim, num_layers and ffn_dim make {self.num_parameters:,} parameters; "
                f"at most {_MOST_PARAMETERS:,} are supported"
            )

    def _check_patterns(self) -> None:
        """Check that each layer has exactly one pattern; patterns validate their own arguments."""
        if self.layer_patterns:
            self._check_layer_patterns()
            return
        if not self.segment_lengths:
            raise ValueError("a model needs segment_lengths and dilation_rates, or layer_patterns: got neither")
        patterns = [self._segments(shift) for shift in self.layer_segment_shifts]
        check_order(patterns[0].segment_lengths, patterns[0].dilation_rates)
        self.segment_lengths = tuple(patterns[0].segment_lengths)
        self.dilation_rates = tuple(patterns[0].dilation_rates)

    def _check_positions(self) -> None:
        for name in ("layer_rope_thetas", "layer_scale_lengths"):
            if isinstance(getattr(self, name), (str, int, float, type(None))):
                raise ValueError(f"{name} must be a list with a number per layer, got {getattr(self, name)!r}")
        self.layer_rope_thetas = tuple(_as_number("layer_rope_thetas", theta) for theta in self.layer_rope_thetas)
        self.layer_scale_lengths = tuple(self.layer_scale_lengths)
        if any(not 0.0 <= theta < float("inf") for theta in self.layer_rope_thetas):
            raise ValueError(
                "layer_rope_thetas must be finite numbers above 0, or 0 for a layer without positions: got "
                f"{list(self.layer_rope_thetas)}"
            )
        if self.layer_rope_thetas and self.rope_theta != 10000.0:
            raise ValueError(
                f"layer_rope_thetas replace rope_theta: leave rope_theta out, got {self.rope_theta} together with "
                f"{list(self.layer_rope_thetas)}"
            )
        for length in self.layer_scale_lengths:
            if isinstance(length, bool) or not isinstance(length, int) or length != 0:
                check_size("layer_scale_lengths", length, least=2)

    def _check_keys(self) -> None:
        check_size("key_convolution", self.key_convolution)
        if self.key_convolution > _WIDEST_CONVOLUTION:
            raise ValueError(
                f"key_convolution must be a width of at most {_WIDEST_CONVOLUTION}, or 1 for none: got "
                f"{self.key_convolution}"
            )
        if self.shifted_keys and self.key_convolution > 1:
            raise ValueError(
                "shifted_keys is a key_convolution with fixed weights: leave one of them out, got shifted_keys True "
                f"and key_convolution {self.key_convolution}"
            )

    def _check_layer_patterns(self) -> None:
        besides = {
            "segment_lengths": tuple(self.segment_lengths),
            "dilation_rates": tuple(self.dilation_rates),
            "layer_segment_shifts": self.layer_segment_shifts,
            "offset_rule": self.offset_rule,
        }
        for name, value in besides.items():
            if value not in ((), (0,), "modulo"):
                raise ValueError(
                    f"layer_patterns replace segments: leave {name} out, got {value!r} together with "
                    f"{list(self.layer_patterns)}"
                )
        self.segment_lengths, self.dilation_rates = (), ()
        for expression in self.layer_patterns:
            try:
                pattern_from_expression(expression)
            except ValueError as error:
                raise ValueError(f"layer_patterns: {error}") from error

    def _segments(self, shift: int) -> DilatedPattern:
        return DilatedPattern(
            self.segment_lengths, self.dilation_rates, offset_rule=self.offset_rule, segment_shift=shift
        )

    def is_recomputed(self, layer: int) -> bool:
        """Whether block ``layer``, counted from 0, is recomputed under gradient checkpointing."""
        return layer % self.checkpoint_every == 0

    def pattern(self, layer: int) -> Pattern:
        """The attention pattern of block ``layer``, counted from 0."""
        if self.layer_patterns:
            return pattern_from_expression(self.layer_patterns[layer % len(self.layer_patterns)])
        return self._segments(self.layer_segment_shifts[layer % len(self.layer_segment_shifts)])

    def rope_theta_of(self, layer: int) -> float:
        """The rotary base of block ``layer``; 0 = no positions."""
        thetas = self.layer_rope_thetas or (self.rope_theta,)
        return thetas[layer % len(thetas)]

    def scale_length_of(self, layer: int) -> int:
        """The length from which on the scores of block ``layer`` grow with the position; 0 = never."""
        lengths = self.layer_scale_lengths or (0,)
        return lengths[layer % len(lengths)]

    @property
    def num_previous_keys(self) -> int:
        """How many rows before its own a key is made of."""
        return 1 if self.shifted_keys else self.key_convolution - 1

    @property
    def different_patterns(self) -> tuple[Pattern, ...]:
        """The patterns in the order in which layers cycle through them."""
        in_turn = self.layer_patterns or self.layer_segment_shifts
        return tuple(self.pattern(layer) for layer in range(min(self.num_layers, len(in_turn))))

    @property
    def pattern_in_words(self) -> str:
        """A one-line description of the layers' patterns."""
        if self.layer_patterns:
            return f"patterns by layer {', '.join(self.layer_patterns)}"
        return f"segments {list(self.segment_lengths)}, rates {list(self.dilation_rates)}"

    @property
    def num_parameters(self) -> int:
        """Number of parameters, computed from the sizes alone; tied matrices count once.

        >>> from dilated_attention_pytorch.models import LongNetConfig, LongNetLM
        >>> config = LongNetConfig(embed_dim=8, num_layers=3, num_heads=2, segment_lengths=[4], dilation_rates=[1])
        >>> config.num_parameters == sum(weight.numel() for weight in LongNetLM(config).parameters())
        True
        """
        assert self.ffn_dim is not None
        width, inner = self.embed_dim, self.ffn_dim
        norms = 2 * (3 * width + inner)  # pre-norms of both halves, and their sub-LayerNorms
        own_table = 0 if self.tie_embeddings else self.vocab_size * width
        convolution = self.key_convolution * self._key_width if self.key_convolution > 1 else 0
        return own_table + self.num_matrix_weights + self.num_layers * (norms + convolution) + 2 * width

    @property
    def num_matrix_weights(self) -> int:
        """Number of weights in the matrices that multiply every token: the blocks' and the output matrix."""
        assert self.ffn_dim is not None
        width, inner = self.embed_dim, self.ffn_dim
        of_block = 2 * width * (width + self._key_width) + (3 if self.activation == "swiglu" else 2) * width * inner
        if self.head_gates:
            of_block += width * self.num_heads
        return self.num_layers * of_block + self.vocab_size * width

    @property
    def _key_width(self) -> int:
        assert self.num_kv_heads is not None
        return self.embed_dim // self.num_heads * self.num_kv_heads

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON-serialisable values.

        >>> from dilated_attention_pytorch.models import LongNetConfig
        >>> config = LongNetConfig(embed_dim=8, num_layers=1, num_heads=2, segment_lengths=[4], dilation_rates=[1])
        >>> LongNetConfig.from_dict(config.to_dict()) == config
        True
        """
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LongNetConfig:
        """The inverse of :meth:`to_dict`; fields with a default may be missing.

        Raises:
            TypeError: a required field is missing.
            ValueError: an unknown key, or an invalid value.
        """
        known = [field.name for field in fields(cls)]
        unknown = [name for name in values if name not in known]
        if unknown:
            raise ValueError(
                f"{', '.join(map(repr, unknown))} is not a field of LongNetConfig; its fields are {', '.join(known)}"
            )
        return cls(**values)


def check_config(name: str, config: object) -> None:
    """Raise TypeError unless a model's argument is a :class:`LongNetConfig`."""
    if not isinstance(config, LongNetConfig):
        raise TypeError(
            f"{name} must be a LongNetConfig, such as LongNetConfig(embed_dim=512, num_layers=6, num_heads=8, "
            "segment_lengths=[2048, 8192], dilation_rates=[1, 4]) or LongNetConfig.from_dict(config), "
            f"got {config!r} of type {type(config).__name__}"
        )


def _as_number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    return float(value)
