"""FlexAttention with a pattern as its mask, and the counts of pairs as its score modification."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dilated_attention_pytorch.patterns import Pattern

from .shapes import Case

_BLOCK = 128


class FlexPattern:
    """A case's pattern for FlexAttention: a mask, a score modification and a block mask.

    The block mask follows from the segment bounds. ``create_block_mask`` would evaluate the mask for all N * N pairs,
    which takes longer than the attention; with rates below 128 it would skip hardly any more blocks.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        # Every pattern is compiled anew; after several recompilations torch.compile would fall back to eager.
        torch.compiler.reset()
        self.groups = tuple(zip(case.segment_lengths, case.dilation_rates, strict=True))
        self.case = case
        self.block_mask = self._block_mask(device)
        self._compiled = torch.compile(flex_attention, dynamic=False)

    def count(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """The count of a query-key pair for a query head, without the causal mask."""
        kv_head = head // (self.case.heads // self.case.kv_heads)
        total = torch.zeros_like(query + key)
        for w, r in self.groups:
            offset = kv_head % r if self.case.offset_rule == "modulo" else kv_head // -(-self.case.kv_heads // r)
            same = (query // w == key // w) & (query % w % r == offset) & (key % w % r == offset)
            total = total + same.to(total.dtype)
        return total

    def mask(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """FlexAttention's ``mask_mod``: whether ``query`` attends to ``key``."""
        seen = self.count(head, query, key) > 0
        return seen & (key <= query) if self.case.causal else seen

    def score(self, score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """FlexAttention's ``score_mod``: the score plus the logarithm of the count."""
        return score + self.count(head, query, key).clamp(min=1).to(torch.float32).log().to(score.dtype)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``[B, N, H, D]`` in and out; compiled on the first call."""
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        is_grouped = self.case.heads != self.case.kv_heads
        out = self._compiled(q, k, v, score_mod=self.score, block_mask=self.block_mask, enable_gqa=is_grouped)
        return out.transpose(1, 2)

    def _block_mask(self, device: torch.device) -> BlockMask:
        rows = self.case.rows
        start, stop = _bounds(rows, device)
        some = torch.zeros(len(start), len(start), dtype=torch.bool, device=device)
        every = torch.zeros_like(some)
        for w, r in self.groups:
            first, last = start // w, (stop - 1) // w
            some |= (first[:, None] <= last) & (first <= last[:, None])
            if r == 1:  # all pairs of a segment: full blocks, without evaluating the mask
                inside = first == last
                every |= inside[:, None] & inside & (first[:, None] == first)
        return _map_of_blocks(some[None], every[None], rows, self.mask, is_causal=self.case.causal)


class FlexBlocks:
    """A block pattern with blocks of 128 positions, or a window, for FlexAttention.

    Raises:
        ValueError: the pattern is a sum, or has another block size.
    """

    def __init__(
        self, pattern: Pattern, rows: int, heads: int, kv_heads: int, *, is_causal: bool, device: torch.device
    ) -> None:
        torch.compiler.reset()
        if pattern.groups or len(pattern.rules) != 1:
            raise ValueError(f"expected a window or one pattern of blocks, got {pattern}")
        self.ratio, self.is_causal = heads // kv_heads, is_causal
        start, stop = _bounds(rows, device)
        self.before, self.after = pattern.rules[0].band(is_causal=False)
        if self.before is None or self.after is None:
            first, last = (pattern.counts(at.cpu(), at.cpu(), kv_heads) > 0 for at in (start, stop - 1))
            if not torch.equal(first, last):
                raise ValueError(f"expected whole blocks of {_BLOCK} positions, got {pattern}")
            some = first.to(device)
            every = some.clone()
        else:
            some = start[:, None] - self.before <= stop - 1
            some &= start <= stop[:, None] - 1 + self.after
            every = stop[:, None] - 1 - self.before <= start
            every &= stop - 1 <= start[:, None] + self.after
            some, every = some.expand(kv_heads, -1, -1).clone(), every.expand(kv_heads, -1, -1).clone()
        self.blocks = some.clone()
        some, every = (part.repeat_interleave(self.ratio, 0) for part in (some, every))
        self.block_mask = _map_of_blocks(some, every, rows, self.mask, is_causal=is_causal)
        self._compiled = torch.compile(flex_attention, dynamic=False)

    def mask(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """FlexAttention's ``mask_mod``: whether ``query`` attends to ``key``."""
        if self.before is None or self.after is None:
            seen = self.blocks[head // self.ratio, query // _BLOCK, key // _BLOCK]
        else:
            seen = (key >= query - self.before) & (key <= query + self.after)
        return seen & (key <= query) if self.is_causal else seen

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``[B, N, H, D]``; compiled on the first call."""
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out = self._compiled(q, k, v, block_mask=self.block_mask, enable_gqa=self.ratio > 1)
        return out.transpose(1, 2)


def _bounds(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First position of every block, and one past its last."""
    start = torch.arange(0, rows, _BLOCK, device=device)
    return start, (start + _BLOCK).clamp(max=rows)


def _map_of_blocks(
    some: Tensor, every: Tensor, rows: int, mask: Callable[..., Tensor], *, is_causal: bool
) -> BlockMask:
    """The block mask from bool ``[heads or 1, Q, K]``: partially and fully visible blocks, before causality."""
    start, stop = _bounds(rows, some.device)
    if is_causal:
        some = some & (start <= stop[:, None] - 1)
        every = every & (stop - 1 <= start[:, None])
    # A truncated last block needs the mask, since it covers missing rows.
    every = every & (stop - start == _BLOCK)[:, None] & (stop - start == _BLOCK)
    partial_indices, full_indices = (_indices(part) for part in (some & ~every, every))
    return BlockMask.from_kv_blocks(
        *partial_indices, *full_indices, BLOCK_SIZE=_BLOCK, mask_mod=mask, seq_lengths=(rows, rows)
    )


def _indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of key blocks per query block, ``[1, heads, Q]``, and their indices."""
    numbers = blocks.sum(-1, dtype=torch.int32)
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True).int()
    return numbers[None], order[None].contiguous()
