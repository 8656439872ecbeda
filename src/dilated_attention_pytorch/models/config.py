"""What a LongNet language model is made of: integers, rates and names, no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from dilated_attention_pytorch.ops.validation import check_order
from dilated_attention_pytorch.patterns import DilatedPattern, OffsetRule, Pattern, pattern_from_expression

Activation = Literal["swiglu", "gelu"]


@dataclass(kw_only=True, slots=True)
class LongNetConfig:
    """Sizes and options of a :class:`LongNetLM` (LongNet, arXiv 2307.02486; MAGNETO, arXiv 2210.06423).

    Raises:
        TypeError: a field of the wrong type.
        ValueError: a size, rate or name out of range, or sizes that do not divide.

    >>> from dilated_attention_pytorch.models import LongNetConfig
    >>> config = LongNetConfig(
    ...     embed_dim=64, num_layers=2, num_heads=4, segment_lengths=[16, 64], dilation_rates=[1, 4]
    ... )
    >>> config.ffn_dim, config.num_kv_heads, config.pattern(0).segment_lengths
    (192, 4, (16, 64))
    """

    vocab_size: int = 256
    """Number of tokens; 256 for bytes."""
    embed_dim: int
    """Width E of the residual stream."""
    num_layers: int
    """Number of blocks L."""
    num_heads: int
    """Query heads H of every block; H divides E and E / H is even."""
    num_kv_heads: int | None = None
    """Key/value heads G, which divides H (grouped-query attention); None is H, and reads as H afterwards."""
    ffn_dim: int | None = None
    """Width inside the feed-forward; None is 4 E for "gelu" and 8/3 E rounded up to a multiple of 64 for "swiglu"."""
    activation: Activation = "swiglu"
    """"swiglu" (Shazeer 2020, arXiv 2002.05202) or "gelu"."""
    segment_lengths: Sequence[int] = ()
    """Segment lengths w_i of the attention pattern, in positions."""
    dilation_rates: Sequence[int] = ()
    """Dilation rates r_i, one for every segment length and none larger than it."""
    offset_rule: OffsetRule = "modulo"
    """Which residues a head selects, see :class:`DilatedPattern`."""
    layer_segment_shifts: Sequence[int] = (0,)
    """Layer i shifts its segments by the i-th of these, cyclically, so that layers need not share boundaries."""
    layer_patterns: Sequence[str] = ()
    """In the place of segments: layer i attends under the i-th of these, cyclically, each written as in Python:
    "local_window(511)", "local_window(255) + DilatedPattern([1024, 4096], [2, 4])"."""
    dropout: float = 0.0
    """Probability of dropping an element of the embedding or of a block's output, in training."""
    attention_dropout: float = 0.0
    """Probability of dropping a merged attention probability, in training."""
    rope_theta: float = 10000.0
    """Base of the rotary position angles (Su et al. 2021, arXiv 2104.09864)."""
    layernorm_eps: float = 1e-5
    """Epsilon of every LayerNorm."""
    tie_embeddings: bool = True
    """Whether the output matrix is the embedding table."""
    gradient_checkpointing: bool = False
    """Recompute blocks in the backward instead of keeping their activations, in training."""
    checkpoint_every: int = 1
    """Of the blocks that gradient_checkpointing recomputes, every n-th, the first one included; 1 is all."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "embed_dim", "num_layers", "num_heads", "checkpoint_every"):
            _check_count(name, getattr(self, name))
        for name in ("num_kv_heads", "ffn_dim"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if self.embed_dim % self.num_heads or self.embed_dim // self.num_heads % 2:
            raise ValueError(
                "num_heads must divide embed_dim into heads of even width, whose halves are rotated against each "
                f"other: got embed_dim {self.embed_dim} and {self.num_heads} heads"
            )
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
        for name in ("tie_embeddings", "gradient_checkpointing"):
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

    def _check_patterns(self) -> None:
        """A pattern checks what it is made of; here, that each layer has one, and only one."""
        if self.layer_patterns:
            self._check_layer_patterns()
            return
        if not self.segment_lengths:
            raise ValueError(
                "segment_lengths and dilation_rates say what a token attends to, or layer_patterns: got none of them"
            )
        patterns = [self._segments(shift) for shift in self.layer_segment_shifts]
        check_order(patterns[0].segment_lengths, patterns[0].dilation_rates)
        self.segment_lengths = tuple(patterns[0].segment_lengths)
        self.dilation_rates = tuple(patterns[0].dilation_rates)

    def _check_layer_patterns(self) -> None:
        besides = {
            "segment_lengths": tuple(self.segment_lengths), "dilation_rates": tuple(self.dilation_rates),
            "layer_segment_shifts": self.layer_segment_shifts, "offset_rule": self.offset_rule,
        }  # fmt: skip
        for name, value in besides.items():
            if value not in ((), (0,), "modulo"):
                raise ValueError(
                    f"layer_patterns stand in the place of segments: leave {name} out, got {value!r} beside "
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
        """Whether block ``layer``, counted from 0, is recomputed where gradients are checkpointed."""
        return layer % self.checkpoint_every == 0

    def pattern(self, layer: int) -> Pattern:
        """The attention pattern of block ``layer``, counted from 0."""
        if self.layer_patterns:
            return pattern_from_expression(self.layer_patterns[layer % len(self.layer_patterns)])
        return self._segments(self.layer_segment_shifts[layer % len(self.layer_segment_shifts)])

    @property
    def different_patterns(self) -> tuple[Pattern, ...]:
        """The patterns that blocks take in turn, the first one's first; of any number of blocks these."""
        in_turn = self.layer_patterns or self.layer_segment_shifts
        return tuple(self.pattern(layer) for layer in range(min(self.num_layers, len(in_turn))))

    @property
    def pattern_in_words(self) -> str:
        """What its layers attend to, for a line that a person reads."""
        if self.layer_patterns:
            return f"patterns by layer {', '.join(self.layer_patterns)}"
        return f"segments {list(self.segment_lengths)}, rates {list(self.dilation_rates)}"

    @property
    def num_parameters(self) -> int:
        """Weights of the model, every one once: from the sizes alone, without making any.

        >>> from dilated_attention_pytorch.models import LongNetConfig, LongNetLM
        >>> config = LongNetConfig(embed_dim=8, num_layers=3, num_heads=2, segment_lengths=[4], dilation_rates=[1])
        >>> config.num_parameters == sum(weight.numel() for weight in LongNetLM(config).parameters())
        True
        """
        assert self.ffn_dim is not None
        width, inner = self.embed_dim, self.ffn_dim
        norms = 2 * (3 * width + inner)  # before and inside the attention, before and inside the feed-forward
        own_table = 0 if self.tie_embeddings else self.vocab_size * width
        return own_table + self.num_matrix_weights + self.num_layers * norms + 2 * width

    @property
    def num_matrix_weights(self) -> int:
        """Weights of the matrices that every token is multiplied by: those of the blocks, and the output matrix."""
        assert self.num_kv_heads is not None
        assert self.ffn_dim is not None
        width, inner = self.embed_dim, self.ffn_dim
        key_width = width // self.num_heads * self.num_kv_heads
        of_block = 2 * width * (width + key_width) + (3 if self.activation == "swiglu" else 2) * width * inner
        return self.num_layers * of_block + self.vocab_size * width

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as values that JSON holds.

        >>> from dilated_attention_pytorch.models import LongNetConfig
        >>> config = LongNetConfig(embed_dim=8, num_layers=1, num_heads=2, segment_lengths=[4], dilation_rates=[1])
        >>> LongNetConfig.from_dict(config.to_dict()) == config
        True
        """
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LongNetConfig:
        """The configuration whose :meth:`to_dict` this is; fields with a default may be missing.

        Raises:
            TypeError: a required field is missing.
            ValueError: a key that is no field, or a value that a field does not take.
        """
        known = [field.name for field in fields(cls)]
        unknown = [name for name in values if name not in known]
        if unknown:
            raise ValueError(
                f"{', '.join(map(repr, unknown))} is no field of LongNetConfig; its fields are {', '.join(known)}"
            )
        return cls(**values)


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _as_number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    return float(value)
