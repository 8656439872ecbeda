"""Bytes and messages that ranks exchange, and operations of every rank, under each strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.planning.layout import Layout, Shards
from dilated_attention_pytorch.planning.pairs import num_pairs
from dilated_attention_pytorch.planning.plan import CallShape, plan
from dilated_attention_pytorch.planning.shards import ShardedCall
from dilated_attention_pytorch.planning.traffic import gather_group_parts, gathered_rows, sent_rows

from .heads import Heads

BACKWARD_FLOPS = 2.5
"""Ratio of the operations of the backward pass to those of the forward pass."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a call over several ranks."""

    call: ShardedCall
    batch_size: int
    num_rows: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    is_padded: bool
    ranks: tuple[int, ...]

    @property
    def ratio(self) -> int:
        return self.num_heads // self.call.num_kv_heads

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one head, for the whole batch."""
        return self.batch_size * self.head_dim * self.dtype.itemsize

    @property
    def sum_bytes(self) -> int:
        """Bytes of one row of one head in the accumulation dtype, for sums of gradients."""
        return self.batch_size * self.head_dim * torch.promote_types(self.dtype, torch.float32).itemsize

    @property
    def mask_bytes(self) -> int:
        return self.batch_size * self.dtype.itemsize if self.is_padded else 0


class Costs(NamedTuple):
    """Bytes and messages that ranks send to each other."""

    forward: Tensor
    """Bytes that each rank sends in the forward pass, int64 ``[ranks]``."""
    backward: Tensor
    """Bytes that each rank sends in the backward pass."""
    link: int
    """Largest number of bytes from one rank to one other in the forward pass."""
    messages: Tensor
    """Messages that each rank sends in the forward pass."""
    backward_messages: Tensor
    """Messages that each rank sends in the backward pass."""


def costs_by_rows(size: Shape, layout: Layout, *, is_gathered: bool) -> tuple[Costs, list[int], Tensor]:
    """Costs of ring or gather along the first axis, with the heads split along the second axis if there is one.

    Returns:
        the costs; the operations of each rank; and float64 ``[ranks]``, those of the dilation groups with rows of other
        ranks.
    """
    num_rings, num_parts = size.ranks[0], size.ranks[1] if len(size.ranks) == 2 else 1
    heads = Heads.split(size.num_heads, size.call.num_kv_heads, num_parts)
    shards = Shards(size.num_rows, num_rings, layout)
    forward, backward, messages, back_messages = torch.zeros(4, num_rings, num_parts, dtype=torch.int64)
    link, flops = 0, [0] * (num_rings * num_parts)
    remote = torch.zeros(num_rings, num_parts, dtype=torch.float64)
    for part in range(num_parts):
        kv, ratio = heads.kv_of_queries(part, size.ratio)
        call = size.call
        if num_parts > 1:
            call = ShardedCall(
                call.pattern.for_heads(kv, call.num_kv_heads), len(kv), call.is_causal, call.offset, call.documents
            )
        costs = (_gather_costs if is_gathered else _ring_costs)(size, call, shards)
        of_pair = 4 * size.head_dim * size.batch_size * ratio
        flops[part::num_parts] = [of_pair * pairs for pairs in num_pairs(call, shards)]
        parts = gather_group_parts(call, shards)
        remote[:, part].index_add_(0, parts.rank, parts.pairs.double() * of_pair)
        forward[:, part] += costs.forward
        backward[:, part] += costs.backward
        messages[:, part] += costs.messages
        back_messages[:, part] += costs.backward_messages
        link = max(link, costs.link)
    if num_parts > 1:
        for ring, runs in enumerate(shards):
            costs = heads_costs(size, num_parts, sum(stop - start for start, stop in runs), "contiguous")
            forward[ring] += costs.forward
            backward[ring] += costs.backward
            messages[ring] += costs.messages
            back_messages[ring] += costs.backward_messages
            link = max(link, costs.link)
    of_ranks = Costs(forward.flatten(), backward.flatten(), link, messages.flatten(), back_messages.flatten())
    return of_ranks, flops, remote.flatten()


def _ring_costs(size: Shape, call: ShardedCall, shards: Shards) -> Costs:
    """Keys and values are sent in both passes; in the backward pass their gradients return."""
    sent, row = sent_rows(call, shards), 2 * size.row_bytes + size.mask_bytes
    there, back = sent.given * row, sent.taken * 2 * size.row_bytes
    return Costs(there, there + back, sent.most * row, sent.messages, sent.messages + sent.messages_taken)


def _gather_costs(size: Shape, call: ShardedCall, shards: Shards) -> Costs:
    """Keys and values are gathered in both passes; in the backward pass their gradients are also reduce-scattered."""
    row = 2 * size.row_bytes + size.mask_bytes
    sent, sums = (gathered_rows(call, shards, of_row) for of_row in (row, 2 * size.sum_bytes))
    there, back = sent.given * row, sums.given * 2 * size.sum_bytes
    return Costs(there, there + back, sent.most * row, sent.messages, sent.messages + sums.messages)


def heads_costs(size: Shape, num_ranks: int, num_rows: int, layout: Layout) -> Costs:
    """Costs of the all-to-all of ``num_rows`` rows among ``num_ranks`` ranks, in both directions."""
    heads = Heads.split(size.num_heads, size.call.num_kv_heads, num_ranks)
    shards = Shards(num_rows, num_ranks, layout)
    held = torch.tensor([sum(stop - start for start, stop in runs) for runs in shards])
    row_bytes = [
        torch.tensor([len(some) * size.row_bytes for some in of_rank]) for of_rank in (heads.queries, heads.kv)
    ]
    row_bytes.append(torch.full((num_ranks,), size.batch_size if size.is_padded else 0))
    # Bytes of one tensor from the rank of the row to the rank of the column, on the way to the ranks of the heads.
    queries, kv, mask = (torch.outer(held, of_row).fill_diagonal_(0) for of_row in row_bytes)
    there = (queries, kv, kv, mask, queries.T)
    # The gradient of the output is sent to the ranks of the heads; those of query, key and value return.
    back = (queries, queries.T, kv.T, kv.T)
    sent, sent_back = torch.stack(there).sum(0), torch.stack(back).sum(0)
    messages, back_messages = (torch.stack(tables).count_nonzero((0, 2)) for tables in (there, back))
    return Costs(sent.sum(1), sent_back.sum(1), int(sent.max()), messages, back_messages)


def heads_flops(size: Shape, num_ranks: int) -> list[int]:
    """Operations of each rank if ranks compute some heads of the whole sequence."""
    heads = Heads.split(size.num_heads, size.call.num_kv_heads, num_ranks)
    call, rows = size.call, size.num_rows
    flops = []
    for rank in range(num_ranks):
        kv, ratio = heads.kv_of_queries(rank, size.ratio)
        whole = CallShape(
            call.pattern.for_heads(kv, call.num_kv_heads),
            size.batch_size,
            rows,
            rows,
            len(kv) * ratio,
            len(kv),
            call.offset,
            call.offset,
            call.is_causal,
            call.documents,
        )
        flops.append(4 * size.head_dim * plan(whole, 1 << 62).num_pairs)
    return flops
