"""FlexAttention with a pattern as its mask, and the counts of pairs as its score modification."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .shapes import Case

BLOCK = 128
"""Positions of a block of the block mask, and of a block pattern."""


class FlexCase:
    """A case for FlexAttention: a mask, a score modification and a block mask.

    The block mask follows from the segment bounds. ``create_block_mask`` would evaluate the mask for all N * N pairs,
    which takes longer than the attention; with rates below 128 it would skip hardly any more blocks.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        # Every case is compiled anew; after several recompilations torch.compile would fall back to eager.
        torch.compiler.reset()
        self.case, self.ratio = case, case.heads // case.kv_heads
        self.groups = tuple(zip(case.segment_lengths, case.dilation_rates, strict=True))
        self.blocks = None if case.block_density is None else case.block_mask().to(device)
        self.block_mask = self._block_mask(device)
        self._compiled = torch.compile(flex_attention, dynamic=False)

    def count(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """The count of a query-key pair for a query head, without the causal mask."""
        kv_head = head // self.ratio
        if self.blocks is not None:
            return self.blocks[kv_head, query // BLOCK, key // BLOCK].to(query.dtype)
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
        score = self.score if self.blocks is None else None
        out = self._compiled(q, k, v, score_mod=score, block_mask=self.block_mask, enable_gqa=self.ratio > 1)
        return out.transpose(1, 2)

    def _block_mask(self, device: torch.device) -> BlockMask:
        """The block mask from bool ``[heads or 1, Q, K]``: blocks of which some pairs, and all pairs, are visible."""
        rows = self.case.rows
        start = torch.arange(0, rows, BLOCK, device=device)
        stop = (start + BLOCK).clamp(max=rows)
        if self.blocks is not None:
            some = every = self.blocks.repeat_interleave(self.ratio, 0)
        else:
            some, every = self._blocks_of_groups(start, stop)
        if self.case.causal:
            some = some & (start <= stop[:, None] - 1)
            every = every & (stop - 1 <= start[:, None])
        # A truncated last block needs the mask, since it covers missing rows.
        every = every & (stop - start == BLOCK)[:, None] & (stop - start == BLOCK)
        partial_indices, full_indices = (_indices(blocks) for blocks in (some & ~every, every))
        return BlockMask.from_kv_blocks(
            *partial_indices, *full_indices, BLOCK_SIZE=BLOCK, mask_mod=self.mask, seq_lengths=(rows, rows)
        )

    def _blocks_of_groups(self, start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
        some = torch.zeros(1, len(start), len(start), dtype=torch.bool, device=start.device)
        every = torch.zeros_like(some)
        for w, r in self.groups:
            first, last = start // w, (stop - 1) // w
            some |= (first[:, None] <= last) & (first <= last[:, None])
            if r == 1:  # all pairs of a segment: full blocks, without evaluating the mask
                inside = first == last
                every |= inside[:, None] & inside & (first[:, None] == first)
        return some, every


def _indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of key blocks per query block, ``[1, heads, Q]``, and their indices."""
    numbers = blocks.sum(-1, dtype=torch.int32)
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True).int()
    return numbers[None], order[None].contiguous()
