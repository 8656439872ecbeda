"""The whole-slide encoder: tile features and coordinates in, one slide embedding per layer out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import _register_namedtuple
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch.models.displaced_rows import warn_of_displaced_rows
from dilated_attention_pytorch.nn.linear import project
from dilated_attention_pytorch.ops.validation import check_cu_seqlens, check_dropout, check_size, documents_of
from dilated_attention_pytorch.patterns import DilatedPattern
from dilated_attention_pytorch.patterns.dilated import Tail

from .grid import position_table, tile_grid
from .rows import BatchRows, PackedSlides

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Pooling = Literal["class", "mean"]

RELEASED_SEGMENTS = (1024, 5792, 32768, 185363, 1048576)
RELEASED_RATES = (1, 2, 4, 8, 16)
_LAYER_EPS = 1e-5
"""Epsilon of the LayerNorms in and after the layers (torchscale's default)."""
_OUTPUT_EPS = 1e-6
"""Epsilon of the final LayerNorm (GigaPath's)."""
_ROWS_AT_ONCE = 4096
"""Rows per feed-forward chunk without gradients; bounds the memory of the inner activations."""


def released_segment_lengths(slide_size: int = 262144, tile_size: int = 256) -> tuple[int, ...]:
    """Segment lengths of a GigaPath encoder for slides of ``slide_size`` pixels in tiles of ``tile_size`` pixels.

    Five powers of 2, rounded down, with exponents evenly spaced from 10 to ``floor(log2(n))``, where n is the number of
    tiles of such a slide.

    Raises:
        ValueError: the slide has fewer than 1,024 tiles.

    Source: prov-gigapath/prov-gigapath, ``gigapath/slide_encoder.py``, ``get_optimal_segment_length``.

    >>> from dilated_attention_pytorch.slides import released_segment_lengths
    >>> released_segment_lengths()
    (1024, 5792, 32768, 185363, 1048576)
    """
    check_size("tile_size", tile_size)
    last = ((slide_size // tile_size) ** 2).bit_length() - 1
    if last < 10:
        raise ValueError(
            f"slide_size and tile_size must give at least 1,024 tiles, got {(slide_size // tile_size) ** 2} from "
            f"{slide_size} and {tile_size}; pass SlideEncoderConfig(segment_lengths=...) for smaller slides"
        )
    return tuple(int(2.0 ** (10 + step * (last - 10) / 4)) for step in range(5))


@dataclass(frozen=True, kw_only=True, slots=True)
class SlideEncoderConfig:
    """Sizes of a :class:`SlideEncoder`; the defaults are those of the released GigaPath model.

    Raises:
        TypeError, ValueError: a value is of the wrong type or out of range, or sizes are inconsistent.
    """

    feature_dim: int = 1536
    """Width C of tile features."""
    embed_dim: int = 768
    """Width E of the layers and of the embedding."""
    num_layers: int = 12
    """Number of layers L."""
    num_heads: int = 16
    """Heads per layer; divides ``embed_dim``."""
    ffn_dim: int = 3072
    """Inner width of the feed-forward."""
    grid_size: int = 1000
    """Tiles along each side of the largest slide: grid positions are 0 to ``grid_size - 1``."""
    segment_lengths: tuple[int, ...] = RELEASED_SEGMENTS
    """Segment lengths w_i, in tiles; see :func:`released_segment_lengths`."""
    dilation_rates: tuple[int, ...] = RELEASED_RATES
    """Dilation rates r_i."""
    tail: Tail = "zero_padded"
    """See :class:`DilatedPattern`; the released weights were trained with ``"zero_padded"``."""
    pooling: Pooling = "class"
    """"class": the class token is the slide embedding. "mean": the mean over the tiles."""
    dropout: float = 0.25
    """Dropout probability of the embedding, the attention output and the feed-forward output, in training."""
    drop_path: float = 0.1
    """Stochastic depth: probability of dropping a residual branch of the last layer, per slide, in training; it grows
    linearly from 0 in the first layer."""

    def __post_init__(self) -> None:
        for name in ("feature_dim", "embed_dim", "num_layers", "num_heads", "ffn_dim", "grid_size"):
            check_size(name, getattr(self, name))
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"num_heads must divide embed_dim, got {self.num_heads} heads and embed_dim {self.embed_dim}"
            )
        if self.embed_dim % 4:
            raise ValueError(
                "embed_dim must be a multiple of 4, a sine and a cosine for each of two coordinates, got "
                f"{self.embed_dim}"
            )
        for name in ("dropout", "drop_path"):
            check_dropout(name, getattr(self, name))
        if self.pooling not in get_args(Pooling):
            raise ValueError(f'pooling must be "class" or "mean", got {self.pooling!r}')
        self.pattern  # noqa: B018 - raises if its numbers are invalid

    @property
    def tile_encoder(self) -> str:
        """Name of the tile encoder of the features."""
        return "gigapath"

    def grid_of(self, coordinates: Tensor, tile_size: int) -> Tensor:
        """Grid positions of tiles; see :func:`tile_grid`."""
        return tile_grid(coordinates, tile_size, self.grid_size)

    @property
    def pattern(self) -> DilatedPattern:
        """The pattern of every layer, with the offset rule of the authors' code."""
        return DilatedPattern(self.segment_lengths, self.dilation_rates, offset_rule="block", tail=self.tail)


class SlideEmbeddings(NamedTuple):
    """The output of a :class:`SlideEncoder` for S slides."""

    embedding: Tensor
    """``[S, E]``: last layer after its LayerNorm. GigaPath's output with ``all_layer_embed=False``."""
    layers: Tensor
    """``[S, L + 1, E]``: embedding and every layer, without that LayerNorm. ``all_layer_embed=True``."""


# So that torch.export.save can write a program that returns it.
_register_namedtuple(
    SlideEmbeddings, serialized_type_name="dilated_attention_pytorch.models.slide_encoder.SlideEmbeddings"
)


class SlideEncoder(nn.Module):
    """LongNet over the tiles of whole slides, with the names, shapes and arithmetic of GigaPath's slide encoder.

    ``x = [class token; proj(features) + position(row, column)]``, L layers ``x += attention(norm(x))``,
    ``x += ffn(norm(x))`` with MAGNETO's norm inside each branch, pooled and normalised. Attention is dilated and
    bidirectional over the class token and the tiles in the given order. State dicts are interchangeable with those of
    the authors' model; :func:`load_slide_encoder` reads their file. Position embeddings are computed for the given
    tiles; the authors' table of a million positions (3 GB) is not stored.

    Intended differences, as in :func:`adopt`: the merge of the groups is differentiated; where a rate does not divide
    its segment (a slide of more than 185,363 tiles, in the released pattern) rows keep their positions, with a
    warning; GELU of a float64 model is not rounded to float32; a tile outside the grid raises instead of wrapping
    around.

    Args:
        config: sizes.
        device, dtype: of the parameters.

    Source: prov-gigapath/prov-gigapath (Xu et al. 2024, doi 10.1038/s41586-024-07441-w); torchscale; LongNet, arXiv
    2307.02486; MAGNETO, arXiv 2210.06423.

    >>> from dilated_attention_pytorch.slides import SlideEncoder, SlideEncoderConfig
    >>> encoder = SlideEncoder(SlideEncoderConfig(feature_dim=32, embed_dim=48, num_layers=2, ffn_dim=96)).eval()
    >>> features, coordinates = torch.randn(1, 100, 32), 256 * torch.arange(200).reshape(1, 100, 2)
    >>> embedding, layers = encoder(features, coordinates)
    >>> embedding.shape, layers.shape
    (torch.Size([1, 48]), torch.Size([1, 3, 48]))
    """

    def __init__(
        self, config: SlideEncoderConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        with torch.device(torch.get_default_device() if device is None else device):
            self.patch_embed = _PatchEmbedding(config)
            self.cls_token = nn.Parameter(torch.empty(1, 1, config.embed_dim))
            self.encoder = _Layers(config)
            self.norm = nn.LayerNorm(config.embed_dim, eps=_OUTPUT_EPS)
        self.reset_parameters()
        self.to(dtype=dtype)

    def reset_parameters(self) -> None:
        """Initialise as the authors do: Xavier-uniform matrices, zero biases, class token with deviation 0.02."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        nn.init.normal_(self.cls_token, std=0.02)

    def gradient_checkpointing_enable(self) -> None:
        """Recompute each layer in the backward pass instead of storing its activations, as in transformers.

        Results and gradients stay the same; only the input of each layer is kept.
        """
        self.encoder.is_recomputed = True

    def gradient_checkpointing_disable(self) -> None:
        """Store activations again."""
        self.encoder.is_recomputed = False

    def forward(
        self,
        features: Tensor,
        coordinates: Tensor,
        *,
        tile_size: int = 256,
        cu_seqlens: Tensor | None = None,
        num_layers: int | None = None,
        mesh: DeviceMesh | None = None,
    ) -> SlideEmbeddings:
        """Embed slides.

        With ``mesh``, ranks share every slide: all make the same call with the same slides, each computes its share of
        the tiles, and all get the same embeddings, those of one process to rounding. The mean over the ranks of their
        gradients, as DistributedDataParallel and FSDP take it, is the gradient of the ranks' mean loss: that of one
        process if all compute the same loss. This holds for the encoder's weights and for those of a head.

        Args:
            features: tile features ``[B, N, C]`` of B slides of equal length, or ``[1, N, C]`` of packed slides.
            coordinates: ``[B, N, 2]`` of the tiles, in pixels; integers, or floats that :func:`tile_grid` rounds down.
            tile_size: edge length of a tile in the same pixels; 1 if the coordinates count tiles.
            cu_seqlens: int32 ``[S + 1]`` boundaries of packed slides along N, see :func:`pack_slides`.
            num_layers: compute the first layers alone, 0 to L, as an encoder without the others does; None = all.
            mesh: the ranks that share the slides, a 1-D mesh; released weights (``tail="zero_padded"``) take at most
                as many ranks as heads. ``features`` may lie on the CPU, or in a memory-mapped file: only this rank's
                tiles are read and moved to the encoder's device.

        Returns:
            the embeddings of the S slides; S = B without ``cu_seqlens``. ``layers`` has ``num_layers + 1`` states.

        Raises:
            TypeError, ValueError: shapes or dtypes do not match, a slide has no tiles, or a tile is outside the grid.
            NotImplementedError: ``mesh`` with ``cu_seqlens`` or inside :func:`attention_maps`.
            RankFailure: the ranks' calls differ, or a rank died or does not respond.
        """
        boundaries = self._check_call(features, coordinates, cu_seqlens)
        check_layer("num_layers", num_layers, self.config.num_layers)
        grid = self.config.grid_of(coordinates, tile_size)
        token: Tensor = self.cls_token
        num_tokens = 1
        rows = BatchRows(features.shape[0], features.shape[1] + 1)
        if mesh is not None:
            from .rank_rows import RankRows  # imports torch.distributed

            if boundaries is not None:
                raise NotImplementedError(
                    "packed slides are not shared by ranks, got mesh and cu_seqlens: call once per slide with mesh, or "
                    "give every rank slides of its own without it"
                )
            rows = RankRows(features.shape[0], rows.length, mesh)
            features, grid = (part[:, rows.tiles].to(token.device) for part in (features, grid))
            num_tokens = rows.num_tokens
        x = self.patch_embed(features.to(token.dtype))
        # Not kept in a buffer: after to_empty nothing would fill it again.
        positions = position_table(self.config.grid_size, self.config.embed_dim).to(token)
        # The first half of the width encodes the second coordinate.
        x = x + torch.cat((positions[grid[..., 1]], positions[grid[..., 0]]), dim=-1)
        token = token.to(x.dtype)
        if boundaries is None:
            # A rank without the token uses none of it, so that its gradient is 0 there.
            x = torch.cat((token.expand(x.shape[0], -1, -1)[:, :num_tokens], x), dim=1)
        else:
            slides = x.split([stop - start for start, stop in pairwise(boundaries)], dim=1)
            x = torch.cat([part for slide in slides for part in (token, slide)], 1)
            rows = PackedSlides(tuple(end + slide for slide, end in enumerate(boundaries)))
        states, last = self.encoder(x, rows, num_layers)
        return SlideEmbeddings(self.norm(last), self.norm(torch.stack(states, dim=1)))

    def tile_states(
        self,
        features: Tensor,
        coordinates: Tensor,
        *,
        layer: int | None = None,
        tile_size: int = 256,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """The state of every tile after a layer, ``[B, N, E]``, for the arguments of :meth:`forward`.

        Args:
            features, coordinates, tile_size, cu_seqlens: as for a call of the module.
            layer: 0, the tiles before the first layer, to the number of layers; None = after the last, without the
                LayerNorm behind it.

        >>> from dilated_attention_pytorch.slides import SlideEncoder, SlideEncoderConfig
        >>> encoder = SlideEncoder(SlideEncoderConfig(feature_dim=32, embed_dim=48, num_layers=2, ffn_dim=96)).eval()
        >>> encoder.tile_states(torch.randn(1, 100, 32), 256 * torch.arange(200).reshape(1, 100, 2)).shape
        torch.Size([1, 100, 48])
        """
        layer = self.config.num_layers if layer is None else layer
        with states_after(self, layer) as states:
            self(features, coordinates, tile_size=tile_size, cu_seqlens=cu_seqlens, num_layers=max(1, layer))
        if cu_seqlens is None:
            return states[0][:, 1:]
        is_tile = torch.ones(states[0].shape[1], dtype=torch.bool, device=features.device)
        is_tile[cu_seqlens[:-1].long() + torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device)] = False
        return states[0][:, is_tile]

    def _check_call(self, features: Tensor, coordinates: Tensor, cu_seqlens: Tensor | None) -> tuple[int, ...] | None:
        """Check the inputs; returns the boundaries of packed slides."""
        width = self.config.feature_dim
        if features.dim() != 3 or features.shape[2] != width or not features.is_floating_point():
            raise ValueError(
                f"features must be floats [slides, tiles, {width}], got {features.dtype} {list(features.shape)}"
            )
        if list(coordinates.shape) != [*features.shape[:2], 2]:
            raise ValueError(
                f"coordinates must be [slides, tiles, 2] = {[*features.shape[:2], 2]} for features "
                f"{list(features.shape)}, got {list(coordinates.shape)}"
            )
        if cu_seqlens is None:
            if not features.shape[1]:
                raise ValueError("a slide must have at least one tile, got features of none; leave it out")
            return None
        if features.shape[0] != 1:
            raise ValueError(f"packed slides lie in one row, features [1, tiles, {width}], got {list(features.shape)}")
        check_cu_seqlens(cu_seqlens, features)
        boundaries = documents_of(cu_seqlens, features.shape[1])
        assert boundaries is not None
        empty = [slide for slide, (start, stop) in enumerate(pairwise(boundaries)) if start == stop]
        if empty:
            raise ValueError(f"a slide must have at least one tile, got none in slide {empty[0]}; leave it out")
        return boundaries


@contextmanager
def states_after(encoder: SlideEncoder, layer: int) -> Iterator[list[Tensor]]:
    """A list to which each call of the encoder appends its rows ``[B, N, E]`` after ``layer``, class tokens included.

    A call must compute this layer; before the first, the first one.

    Raises:
        ValueError: the encoder has no such layer.
    """
    layers, states = encoder.encoder.layers, list[Tensor]()
    check_layer("layer", layer, len(layers))
    hook = (
        layers[layer - 1].register_forward_hook(lambda module, inputs, output: states.append(output))
        if layer
        else layers[0].register_forward_pre_hook(lambda module, inputs: states.append(inputs[0]))
    )
    with hook:
        yield states


def check_layer(name: str, layer: int | None, last: int) -> None:
    """Raise :class:`ValueError` unless a number of layers is None or 0 to ``last``."""
    if layer is not None and not 0 <= layer <= last:
        raise ValueError(f"{name} must be 0 to {last}, the layers of the encoder, got {layer}")


def pack_slides(slides: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Concatenate slides of different lengths for one call of a :class:`SlideEncoder`.

    Args:
        slides: ``(features [N_s, C], coordinates [N_s, 2])`` per slide.

    Returns:
        ``(features [1, N, C], coordinates [1, N, 2], cu_seqlens [S + 1])`` with ``N`` the sum of all ``N_s``.

    >>> from dilated_attention_pytorch.slides import pack_slides
    >>> slides = [(torch.randn(n, 4), torch.zeros(n, 2, dtype=torch.int64)) for n in (5, 3)]
    >>> features, coordinates, cu_seqlens = pack_slides(slides)
    >>> features.shape, cu_seqlens
    (torch.Size([1, 8, 4]), tensor([0, 5, 8], dtype=torch.int32))
    """
    lengths = torch.tensor([0, *(features.shape[0] for features, _ in slides)], dtype=torch.int32)
    features, coordinates = (torch.cat(parts)[None] for parts in zip(*slides, strict=True))
    return features, coordinates, lengths.cumsum(0, dtype=torch.int32)


class _PatchEmbedding(nn.Module):
    def __init__(self, config: SlideEncoderConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.feature_dim, config.embed_dim)

    def forward(self, features: Tensor) -> Tensor:
        """``[B, N, C]`` to ``[B, N, E]``."""
        return project(self.proj, features)


class _Layers(nn.Module):
    """The layers and the LayerNorm after them, with pooling of every layer."""

    def __init__(self, config: SlideEncoderConfig) -> None:
        super().__init__()
        steps = max(1, config.num_layers - 1)
        self.layers = nn.ModuleList(
            _Layer(config, config.drop_path * depth / steps) for depth in range(config.num_layers)
        )
        self.layer_norm = nn.LayerNorm(config.embed_dim, eps=_LAYER_EPS)
        self.dropout = config.dropout
        self.pooling = config.pooling
        self.is_recomputed = False
        """Whether layers are recomputed in the backward pass."""

    def forward(self, x: Tensor, rows: BatchRows, num_layers: int | None) -> tuple[list[Tensor], Tensor]:
        """The pooled states ``[S, E]`` of ``x [B, N, E]`` and of every layer, and of the last layer after the norm."""
        pool = rows.class_tokens if self.pooling == "class" else rows.means
        x = functional.dropout(x, self.dropout, self.training)
        pooled = [pool(x)]
        for layer in islice(self.layers, num_layers):
            if self.is_recomputed and torch.is_grad_enabled():
                x = checkpoint(layer, x, rows, use_reentrant=False)
            else:
                x = layer(x, rows)
            pooled.append(pool(x))
        if self.pooling == "class":
            # LayerNorm acts per row, so the class token can be normalised alone.
            states = rows.completed(pooled)
            return states, self.layer_norm(states[-1])
        *states, last = rows.completed([*pooled, pool(self.layer_norm(x))])
        return states, last


class _Layer(nn.Module):
    def __init__(self, config: SlideEncoderConfig, drop_path: float) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.self_attn_layer_norm = nn.LayerNorm(config.embed_dim, eps=_LAYER_EPS)
        self.ffn = _FeedForward(config)
        self.final_layer_norm = nn.LayerNorm(config.embed_dim, eps=_LAYER_EPS)
        self.dropout = config.dropout
        self.drop_path = drop_path

    def forward(self, x: Tensor, rows: BatchRows) -> Tensor:
        """``[B, N, E]`` to ``[B, N, E]``."""
        x = x + self._dropped(self.self_attn(self.self_attn_layer_norm(x), rows), rows)
        return x + self._dropped(self.ffn(self.final_layer_norm(x)), rows)

    def _dropped(self, branch: Tensor, rows: BatchRows) -> Tensor:
        """Dropout, then stochastic depth per slide, in training; survivors are scaled up."""
        if not self.training:
            return branch
        branch = functional.dropout(branch, self.dropout)
        return branch * rows.kept(branch, 1.0 - self.drop_path) if self.drop_path else branch


class _Attention(nn.Module):
    def __init__(self, config: SlideEncoderConfig) -> None:
        super().__init__()
        width = config.embed_dim
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))
        self.inner_attn_ln = nn.LayerNorm(width, eps=_LAYER_EPS)
        self.num_heads = config.num_heads
        self.pattern = config.pattern
        self._displaced: set[tuple[int, int]] = set()

    def forward(self, x: Tensor, rows: BatchRows) -> Tensor:
        """``[B, N, E]`` to ``[B, N, E]``."""
        warn_of_displaced_rows(self.pattern, rows.length, self._displaced, stacklevel=2)
        q, k, v = (
            project(layer, x).unflatten(-1, (self.num_heads, -1)) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        heads = rows.attend(q, k, v, self.pattern)
        return project(self.out_proj, self.inner_attn_ln(heads.flatten(-2)))


class _FeedForward(nn.Module):
    def __init__(self, config: SlideEncoderConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.embed_dim, config.ffn_dim)
        self.fc2 = nn.Linear(config.ffn_dim, config.embed_dim)
        self.ffn_layernorm = nn.LayerNorm(config.ffn_dim, eps=_LAYER_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, N, E]`` to ``[B, N, E]``."""
        if torch.is_grad_enabled() or x.shape[1] <= _ROWS_AT_ONCE:
            return self._rows(x)
        out: Tensor | None = None
        for start in range(0, x.shape[1], _ROWS_AT_ONCE):
            rows = self._rows(x[:, start : start + _ROWS_AT_ONCE])
            out = rows.new_empty(x.shape) if out is None else out
            out[:, start : start + _ROWS_AT_ONCE] = rows
        assert out is not None
        return out

    def _rows(self, x: Tensor) -> Tensor:
        return project(self.fc2, self.ffn_layernorm(functional.gelu(project(self.fc1, x))))
