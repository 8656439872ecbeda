"""TITAN's slide encoder: dense attention over tiles with two-dimensional ALiBi, in memory linear in the tiles."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from dilated_attention_pytorch.errors import first_line
from dilated_attention_pytorch.ops import Scores, attend
from dilated_attention_pytorch.ops.validation import check_size
from dilated_attention_pytorch.patterns import DilatedPattern

from .checkpoint import read_weights
from .encoder import SlideEmbeddings

AttentionalPool = Literal["parallel", "cascade"]
_EPS = 1e-6
"""Epsilon of the LayerNorms of the blocks; those of the poolers have PyTorch's."""
_PREFIX = "vision_encoder."
_CONFIG, WEIGHTS_NAME = "config.json", "model.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class TitanConfig:
    """Sizes of a :class:`TitanEncoder`; the defaults are those of the released TITAN.

    Raises:
        TypeError, ValueError: a value is of the wrong type or out of range, or sizes are inconsistent.
    """

    feature_dim: int = 768
    """Width C of tile features (CONCH v1.5: 768)."""
    embed_dim: int = 768
    """Width E of the layers and of the embedding."""
    num_layers: int = 6
    """Number of layers L."""
    num_heads: int = 12
    """Heads per layer; divides ``embed_dim``."""
    ffn_dim: int = 3072
    """Inner width of the feed-forward."""
    pool: AttentionalPool = "parallel"
    """"parallel": one learned query attends to all rows. "cascade": to the outputs of ``pool_queries`` queries."""
    pool_queries: int = 128
    """Learned queries of the first pooler."""
    pool_heads: int = 8
    """Heads of the poolers; divides ``embed_dim``."""

    def __post_init__(self) -> None:
        for name in (
            "feature_dim",
            "embed_dim",
            "num_layers",
            "num_heads",
            "ffn_dim",
            "pool_queries",
            "pool_heads",
        ):
            check_size(name, getattr(self, name))
        for name in ("num_heads", "pool_heads"):
            if self.embed_dim % getattr(self, name):
                raise ValueError(
                    f"{name} must divide embed_dim, got {getattr(self, name)} heads and embed_dim {self.embed_dim}"
                )
        if self.pool not in get_args(AttentionalPool):
            raise ValueError(f'pool must be "parallel" or "cascade", got {self.pool!r}')

    @property
    def tile_encoder(self) -> str:
        """Name of the tile encoder of the features."""
        return "conch_v15"

    def grid_of(self, coordinates: Tensor, tile_size: int) -> Tensor:
        """Cells ``[N, 2]`` of tiles, counted from the least coordinates of the slide."""
        return torch.div(coordinates - coordinates.amin(dim=0), tile_size, rounding_mode="floor").long()


class TitanEncoder(nn.Module):
    """TITAN's encoder of whole slides, with its names, shapes and arithmetic.

    ``x = [class token; gelu(W f)]`` for the cells of the slide, L layers ``x += attn(norm1(x))``,
    ``x += mlp(norm2(x))``, a norm, and attention pooling by learned queries. Attention is dense; the score of cells p
    and t has the bias ``-m_h |p - t|`` with the Euclidean distance in tiles and the slope ``m_h`` of the head (ALiBi),
    and none where one of them is the class token. The kernels compute it from the coordinates, in memory linear in the
    tiles; TITAN's own code stores all N x N biases of every head, in float64 on the way.

    As in that code, tiles are counted from the least coordinates of the slide, the features of tiles that lie in one
    cell are summed, and cells whose features are all 0 are left out.

    Args:
        config: sizes.

    Source: MahmoodLab/TITAN on the Hugging Face hub, ``vision_transformer.py`` (Ding et al. 2024, arXiv 2411.19666);
    ALiBi, arXiv 2108.12409.

    >>> from dilated_attention_pytorch.slides import TitanConfig, TitanEncoder
    >>> encoder = TitanEncoder(TitanConfig(feature_dim=32, embed_dim=48, num_layers=2, ffn_dim=96)).eval()
    >>> features, coordinates = torch.randn(1, 100, 32), 512 * torch.arange(200).reshape(1, 100, 2)
    >>> embedding, layers = encoder(features, coordinates, tile_size=512)
    >>> embedding.shape, layers.shape
    (torch.Size([1, 48]), torch.Size([1, 3, 48]))
    """

    def __init__(self, config: TitanConfig) -> None:
        super().__init__()
        self.config = config
        width = config.embed_dim
        self.patch_embed = nn.Sequential(nn.Linear(config.feature_dim, width), nn.GELU())
        self.cls_token = nn.Parameter(1e-6 * torch.randn(1, 1, width))
        self.blocks = nn.ModuleDict({"modules_list": nn.ModuleList(_Block(config) for _ in range(config.num_layers))})
        self.norm = nn.LayerNorm(width, eps=_EPS)
        self.attn_pool = _Pooler(width, config.pool_heads, config.pool_queries)
        self.attn_pool_contrastive = _Pooler(width, config.pool_heads, 1)
        self.proj = nn.Parameter(torch.randn(width, width) / math.sqrt(width))
        """To the space that images and reports share; the embedding is taken before it, as TITAN's examples do."""

    def forward(
        self, features: Tensor, coordinates: Tensor, *, tile_size: int = 512, cu_seqlens: Tensor | None = None
    ) -> SlideEmbeddings:
        """Embed slides, one after another.

        Args:
            features: tile features ``[B, N, C]`` of B slides of equal length, or ``[1, N, C]`` of packed slides.
            coordinates: ``[B, N, 2]`` of the tiles, in pixels.
            tile_size: edge length of a tile in the same pixels (TITAN's ``patch_size_lv0``).
            cu_seqlens: int32 ``[S + 1]`` boundaries of packed slides along N, see :func:`pack_slides`.

        Returns:
            ``embedding [S, E]``, TITAN's ``encode_slide_from_patch_features``, and the class token after each of the
            layers 0 (the input) to L, without the norm behind them, as ``layers [S, L + 1, E]``.

        Raises:
            ValueError: shapes do not match, a slide has no tile, or all features of a slide are 0.
        """
        check_size("tile_size", tile_size)
        width = self.config.feature_dim
        if features.dim() != 3 or features.shape[2] != width or coordinates.shape != (*features.shape[:2], 2):
            raise ValueError(
                f"features must be [slides, tiles, {width}] with coordinates [slides, tiles, 2], got "
                f"{list(features.shape)} and {list(coordinates.shape)}"
            )
        if cu_seqlens is None:
            slides = list(zip(features, coordinates, strict=True))
        else:
            ends = list(pairwise(cu_seqlens.tolist()))
            slides = [(features[0, start:stop], coordinates[0, start:stop]) for start, stop in ends]
        computed = [self._embed(*slide, tile_size) for slide in slides]
        embeddings, layers = zip(*computed, strict=True)
        return SlideEmbeddings(torch.stack(embeddings), torch.stack(layers))

    def _embed(self, features: Tensor, coordinates: Tensor, tile_size: int) -> tuple[Tensor, Tensor]:
        """The embedding ``[E]`` and the class token after every layer ``[L + 1, E]`` of one slide."""
        if not len(coordinates):
            raise ValueError("a slide must have at least one tile, got none; leave it out")
        cells, features = _summed(features, self.config.grid_of(coordinates, tile_size))
        x = self.patch_embed(features.to(self.cls_token.dtype))
        x = torch.cat((self.cls_token[0].to(x.dtype), x))[None]
        places = cells.to(torch.promote_types(x.dtype, torch.float32))
        places = functional.pad(places, (0, 0, 1, 0), value=math.nan)[None]
        states = [x[0, 0]]
        for block in self.blocks["modules_list"].children():
            x = block(x, places)
            states.append(x[0, 0])
        x = self.norm(x)
        rows = self.attn_pool(x) if self.config.pool == "cascade" else x
        return self.attn_pool_contrastive(rows)[0, 0], torch.stack(states)


def _summed(features: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """The cells ``[M, 2]`` of a grid that hold tissue, row by row, and the sums ``[M, C]`` of the features in each."""
    cells, cell_of = grid.unique(dim=0, return_inverse=True)
    sums = features.new_zeros(len(cells), features.shape[1]).index_add(0, cell_of, features)
    is_tissue = (sums != 0).any(dim=1)
    if not bool(is_tissue.any()):
        raise ValueError("all features of the slide are 0; extract them again")
    return cells[is_tissue], sums[is_tissue]


def slopes(num_heads: int) -> list[float]:
    """ALiBi's slopes: ``2^(-8 h / n)``, h = 1 to n, for a power of two n; for other numbers of heads those of the next
    smaller power, then every second one of twice as many."""
    power = 1 << (num_heads.bit_length() - 1)
    first = [2.0 ** (-8.0 * head / power) for head in range(1, power + 1)]
    return first + [2.0 ** (-4.0 * head / power) for head in range(1, 2 * power + 1, 2)][: num_heads - power]


class _Block(nn.Module):
    def __init__(self, config: TitanConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.embed_dim, eps=_EPS)
        self.attn = _CellAttention(config)
        self.norm2 = nn.LayerNorm(config.embed_dim, eps=_EPS)
        first, second = nn.Linear(config.embed_dim, config.ffn_dim), nn.Linear(config.ffn_dim, config.embed_dim)
        self.mlp = nn.Sequential(OrderedDict(fc1=first, gelu=nn.GELU(), fc2=second))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), places)
        return x + self.mlp(self.norm2(x))


class _CellAttention(nn.Module):
    def __init__(self, config: TitanConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.embed_dim, 3 * config.embed_dim)
        self.proj = nn.Linear(config.embed_dim, config.embed_dim)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """``[1, M + 1, E]`` to ``[1, M + 1, E]``; rows lie at ``places [1, M + 1, 2]``, but for the class token."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        slope = torch.tensor(slopes(self.num_heads), dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        pattern = DilatedPattern([q.shape[1]], [1])
        return self.proj(attend(q, k, v, pattern, scores=Scores(slopes=slope, coordinates=places)).flatten(-2))


class _Pooler(nn.Module):
    def __init__(self, width: int, heads: int, queries: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(queries, width))
        self.attn = nn.MultiheadAttention(width, heads, kdim=width, vdim=width, batch_first=True)
        self.ln_q = nn.LayerNorm(width)
        self.ln_k = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """``[1, N, E]`` to ``[1, queries, E]``."""
        x = self.ln_k(x)
        return self.attn(self.ln_q(self.query)[None], x, x, need_weights=False)[0]


def load_titan_encoder(folder: Path | str) -> TitanEncoder:
    """Load TITAN's slide encoder from the files of the hub, in eval mode, on the CPU. No code of them is executed.

    Args:
        folder: ``config.json`` and ``model.safetensors`` of ``MahmoodLab/TITAN`` (`hf download MahmoodLab/TITAN`). The
            text encoder and the tile encoder (CONCH v1.5) in them are left out.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged or of another model.
    """
    folder = Path(folder)
    config = _config(folder / _CONFIG)
    weights = {
        name.removeprefix(_PREFIX): value
        for name, value in read_weights(folder / WEIGHTS_NAME).items()
        if name.startswith(_PREFIX)
    }
    with torch.device("meta"):
        encoder = TitanEncoder(config)
    expected = {name: value.shape for name, value in encoder.state_dict().items()}
    got = {name: value.shape for name, value in weights.items()}
    if got != expected:
        wrong = sorted(name for name in got.keys() | expected.keys() if got.get(name) != expected.get(name))
        raise ValueError(
            f"{folder} does not hold TITAN's encoder: {_PREFIX}{wrong[0]} and {len(wrong) - 1} others are missing, not "
            f"known or of other shapes than {_CONFIG} says; download MahmoodLab/TITAN again"
        )
    damaged = next((name for name, value in weights.items() if not bool(value.isfinite().all())), None)
    if damaged is not None:
        raise ValueError(f"{folder}: {_PREFIX}{damaged} holds numbers that are not finite; copy the file again")
    encoder.load_state_dict({name: value.float() for name, value in weights.items()}, assign=True)
    return encoder.eval()


def _config(file: Path) -> TitanConfig:
    if not file.is_file():
        raise FileNotFoundError(f"{file}: there is no such file; name the folder of MahmoodLab/TITAN from the hub")
    try:
        of_vision: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["vision_config"]
        known = {
            "embed_dim": "embed_dim",
            "depth": "num_layers",
            "num_heads": "num_heads",
            "mlp_patch_embed_dim": "feature_dim",
            "attentional_pool": "pool",
            "attn_pooler_queries": "pool_queries",
            "attn_pooler_heads": "pool_heads",
        }
        sizes = {ours: of_vision[theirs] for theirs, ours in known.items() if theirs in of_vision}
        width = sizes.get("embed_dim", TitanConfig().embed_dim)
        config = TitanConfig(**sizes, ffn_dim=int(width * of_vision.get("mlp_ratio", 4.0)))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is not the configuration of TITAN ({first_line(error)}); copy it again") from error
    if (kind := of_vision.get("pos_encode_type", "alibi")) != "alibi":
        raise ValueError(f'{file}: pos_encode_type must be "alibi", got {kind!r}; other positions are not supported')
    return config
