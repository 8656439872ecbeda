"""FlexAttention with the pattern as its mask, and the multiplicity of a pair through its score modification."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .shapes import Case

_BLOCK = 128


class FlexPattern:
    """The pattern of a case in the terms of FlexAttention: a mask, a score modification and a map of blocks.

    The map is made from the bounds of the segments. ``create_block_mask`` would ask the mask for all N * N pairs, which
    takes longer than the attention; with rates below 128 hardly a block that it would leave out is kept here.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        # Every pattern compiles anew, and after a handful of them torch.compile would give up and run it eagerly.
        torch.compiler.reset()
        self.groups = tuple(zip(case.segment_lengths, case.dilation_rates, strict=True))
        self.case = case
        self.block_mask = self._block_mask(device)
        self._compiled = torch.compile(flex_attention, dynamic=False)

    def count(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """How often ``query`` sees ``key``, for a query head; without the causal mask."""
        kv_head = head // (self.case.heads // self.case.kv_heads)
        total = torch.zeros_like(query + key)
        for w, r in self.groups:
            offset = kv_head % r if self.case.offset_rule == "modulo" else kv_head // -(-self.case.kv_heads // r)
            same = (query // w == key // w) & (query % w % r == offset) & (key % w % r == offset)
            total = total + same.to(total.dtype)
        return total

    def mask(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether ``query`` sees ``key``: FlexAttention's ``mask_mod``."""
        seen = self.count(head, query, key) > 0
        return seen & (key <= query) if self.case.causal else seen

    def score(self, score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """A score plus the logarithm of the multiplicity: FlexAttention's ``score_mod``."""
        return score + self.count(head, query, key).clamp(min=1).to(torch.float32).log().to(score.dtype)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``[B, N, H, D]`` like the other contestants; compiled when it is first called."""
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        is_grouped = self.case.heads != self.case.kv_heads
        out = self._compiled(q, k, v, score_mod=self.score, block_mask=self.block_mask, enable_gqa=is_grouped)
        return out.transpose(1, 2)

    def _block_mask(self, device: torch.device) -> BlockMask:
        rows = self.case.rows
        start = torch.arange(0, rows, _BLOCK, device=device)
        stop = (start + _BLOCK).clamp(max=rows)
        some = torch.zeros(len(start), len(start), dtype=torch.bool, device=device)
        every = torch.zeros_like(some)
        for w, r in self.groups:
            first, last = start // w, (stop - 1) // w
            some |= (first[:, None] <= last) & (first <= last[:, None])
            if r == 1:  # all pairs of one segment: nothing is left to ask the mask
                inside = first == last
                every |= inside[:, None] & inside & (first[:, None] == first)
        if self.case.causal:
            some &= start <= stop[:, None] - 1
            every &= stop - 1 <= start[:, None]
        # A block that ends early is asked: its mask covers the rows that are not there.
        every &= (stop - start == _BLOCK)[:, None] & (stop - start == _BLOCK)
        partial_indices, full_indices = (_indices(part) for part in (some & ~every, every))
        return BlockMask.from_kv_blocks(
            *partial_indices, *full_indices, BLOCK_SIZE=_BLOCK, mask_mod=self.mask, seq_lengths=(rows, rows)
        )


def _indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For every block of queries the number of its key blocks ``[1, 1, Q]``, and which they are ``[1, 1, Q, K]``."""
    numbers = blocks.sum(1, dtype=torch.int32)
    order = torch.argsort(blocks.int(), dim=1, descending=True, stable=True).int()
    return numbers[None, None], order[None, None].contiguous()
