"""The benchmarked calls: named shapes, and the operations of a case by formula."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns import DilatedPattern, Pattern, from_block_mask
from dilated_attention_pytorch.patterns.dilated import OffsetRule
from dilated_attention_pytorch.patterns.flops import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, pair_flops

Mode = Literal["forward", "forward_backward", "decode"]
Computes = Literal["pattern", "dense"]
DtypeName = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One call to time: sizes, pattern, dtype and mode; no tensors."""

    shape: str
    """Name of its shape."""
    mode: Mode
    """"forward", "forward_backward", or "decode": one query, the last of the rows, against all of them."""
    rows: int
    """Rows of keys and values, and of queries except when decoding."""
    batch: int = 1
    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads."""
    head_dim: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    offset_rule: OffsetRule = "modulo"
    causal: bool
    dtype: DtypeName
    block_density: float | None = None
    """Fraction of key blocks visible to a query block. If set, the pattern is :meth:`block_mask`, without groups."""
    block_size: int = 128

    @property
    def pattern(self) -> Pattern:
        """The pattern of the call."""
        if self.block_density is not None:
            return from_block_mask(self.block_mask(), self.block_size)
        return DilatedPattern(self.segment_lengths, self.dilation_rates, offset_rule=self.offset_rule)

    def block_mask(self) -> Tensor:
        """Random block mask, bool ``[G, query blocks, key blocks]``: per key/value head, with equally many key
        blocks for every query block, its own included."""
        assert self.block_density is not None
        return _drawn_mask(self.kv_heads, -(-self.rows // self.block_size), self.block_density)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the operands."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def num_queries(self) -> int:
        """Number of query rows."""
        return 1 if self.mode == "decode" else self.rows

    @property
    def query_offset(self) -> int:
        """Position of the first query."""
        return self.rows - self.num_queries

    @property
    def series(self) -> str:
        """Common name of the cases of one table: everything except the rows."""
        grouped = "" if self.kv_heads == self.heads else f"/{self.kv_heads}"
        batch = "" if self.batch == 1 else f", batch {self.batch}"
        causal = "causal" if self.causal else "not causal"
        if self.block_density is not None:
            groups = f"{self.block_density:.0%} of blocks of {self.block_size}"
        else:
            groups = f"{len(self.segment_lengths)} groups to {max(self.segment_lengths)}"
        mode = "" if self.mode == self.shape else f", {self.mode.replace('_', ' + ')}"
        return (
            f"{self.shape}{mode}, {self.dtype}, {causal}, H={self.heads}{grouped}, D={self.head_dim}, {groups}{batch}"
        )

    @property
    def name(self) -> str:
        """Name of the case; equal names are equal cases."""
        return f"{self.series}, N={self.rows}"

    def num_pairs(self, computes: Computes) -> int:
        """Query-key pairs over all heads: of the pattern with counts, or of dense (causal) attention.

        >>> from dataclasses import replace
        >>> from dilated_attention_pytorch.benchmarks.shapes import SHAPES
        >>> replace(SHAPES["three"], rows=8192).num_pairs("pattern") == 8 * 8192 * (2048 + 1024 + 512)
        True
        """
        if computes == "dense":
            pairs = self.num_queries * self.rows
            if self.causal:
                pairs -= self.num_queries * (self.num_queries - 1) // 2
            return self.batch * self.heads * pairs
        if self.mode == "decode":
            last, rows = torch.tensor([self.rows - 1]), torch.arange(self.rows)
            pairs = int(self.pattern.counts(last, rows, self.kv_heads).sum())
        else:
            pairs = self.pattern.num_pairs(self.rows, num_kv_heads=self.kv_heads, is_causal=self.causal)
        return self.batch * (self.heads // self.kv_heads) * pairs

    def flops(self, computes: Computes) -> int:
        """Floating-point operations of the call, without the softmax."""
        products = FORWARD_PRODUCTS + (BACKWARD_PRODUCTS if self.mode == "forward_backward" else 0)
        return pair_flops(self.num_pairs(computes), self.head_dim, products)

    @property
    def held_bytes(self) -> int:
        """Bytes of operands and results, held by every implementation: ``e D N (2 H + 2 G)``.

        Gradients double it: those of the operands, and that of the output.
        """
        rows = self.num_queries * self.heads + self.rows * self.kv_heads
        held = 2 * rows * self.batch * self.head_dim * self.torch_dtype.itemsize
        return 2 * held if self.mode == "forward_backward" else held

    def operands(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value: seeded normal random; they require gradients if the mode has a backward pass."""
        generator = torch.Generator(device).manual_seed(self.rows)

        def draw(rows: int, heads: int) -> Tensor:
            size = (self.batch, rows, heads, self.head_dim)
            x = torch.empty(size, dtype=self.torch_dtype, device=device)
            # In parts: a whole float32 draw would take twice the memory of its result.
            for part in x.split(1 << 16, dim=1):
                part.copy_(torch.randn(part.shape, generator=generator, device=device))
            return x.requires_grad_(self.mode == "forward_backward")

        query = draw(self.num_queries, self.heads)
        return query, draw(self.rows, self.kv_heads), draw(self.rows, self.kv_heads)


@functools.lru_cache(maxsize=4)
def _drawn_mask(heads: int, blocks: int, density: float) -> Tensor:
    drawn = torch.rand(heads, blocks, blocks, generator=torch.Generator().manual_seed(0))
    drawn.diagonal(dim1=1, dim2=2).fill_(-1.0)
    return drawn.argsort(-1).argsort(-1) < max(1, round(density * blocks))


_THREE = Case(
    shape="three",
    mode="forward",
    rows=2048,
    heads=8,
    kv_heads=8,
    head_dim=64,
    segment_lengths=(2048, 4096, 8192),
    dilation_rates=(1, 2, 4),
    causal=False,
    dtype="float32",
)

SHAPES: dict[str, Case] = {
    # LongNet's own configuration (arXiv 2307.02486).
    "paper": replace(
        _THREE,
        shape="paper",
        heads=12,
        kv_heads=12,
        segment_lengths=(2048, 4096, 8192, 16384, 32768),
        dilation_rates=(1, 2, 4, 6, 12),
    ),
    # The whole-slide encoder that pathologists run.
    "slide": replace(
        _THREE,
        shape="slide",
        heads=16,
        kv_heads=16,
        head_dim=48,
        segment_lengths=(1024, 5792, 32768, 185363, 1048576),
        dilation_rates=(1, 2, 4, 8, 16),
        offset_rule="block",
    ),
    "three": _THREE,
    "blocks": replace(_THREE, shape="blocks", segment_lengths=(), dilation_rates=(), block_density=0.1),
    # One query after so many cached rows.
    "decode": replace(_THREE, shape="decode", causal=True, mode="decode"),
}
"""A case of every named shape."""

ROWS: dict[str, tuple[int, ...]] = {
    "paper": (8192, 32768),
    "slide": (1000, 3000, 10000, 30000),
    "three": (2048, 8192),
    "blocks": (4096, 32768),
    # 64 rows before the end of every segment: the query attends to nearly all of each, with room for later steps.
    "decode": (8128, 65472),
}
"""Numbers of rows to benchmark, by shape."""
