"""Communication and computation of a call over several ranks under every strategy, and the choice of the cheapest."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dilated_attention_pytorch.ops.validation import documents_of
from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.patterns.flops import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, pair_flops
from dilated_attention_pytorch.plan.heads import Heads
from dilated_attention_pytorch.plan.layout import Layout, Shards
from dilated_attention_pytorch.plan.pairs import num_pairs
from dilated_attention_pytorch.plan.planner import CallShape, plan
from dilated_attention_pytorch.plan.shards import ShardedCall
from dilated_attention_pytorch.plan.traffic import gather_group_parts, gathered_rows, sent_rows

Strategy = Literal["auto", "ring", "gather", "heads"]

_BALANCED = 1.05
"""A layout in which some rank has more than this multiple of the mean work is chosen only if no other layout has less:
all ranks wait for that rank in every layer, whereas bytes matter less the more rows a rank has, and a ring overlaps
them with computation."""


_EQUAL = 1.01
"""Strategies of one layout whose time is at most this multiple of the fastest one's count as equally fast."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Rates of a rank, which weigh bytes against operations. Assumptions, not measurements."""

    flops_per_second: float = 4e14
    """Operations of attention per second and rank; 4e14 is 40 % of the peak of an H100 in bfloat16."""
    bytes_per_second: float = 5e10
    """Bytes per second that a rank sends while it receives as many; 5e10 is a 400 Gbit/s network card."""
    message_seconds: float = 2e-5
    """Seconds per message in addition to those of its bytes."""


@dataclass(frozen=True, slots=True)
class ParallelEstimate:
    """Communication and computation of one strategy with one layout. Bytes, messages and operations are exact."""

    strategy: Strategy
    layout: Layout
    forward_bytes: tuple[int, ...]
    """Bytes that every rank sends in the forward pass."""
    backward_bytes: tuple[int, ...]
    """Bytes that every rank sends in the backward pass."""
    link_bytes: int
    """Largest number of bytes that one rank sends to one other in the forward pass."""
    messages: int
    """Largest number of messages that a rank sends in the forward pass."""
    backward_messages: int
    """Largest number of messages that a rank sends in the backward pass."""
    flops: tuple[int, ...]
    """Operations of every rank in the forward pass, 4 D per pair; the backward pass takes 2.5 times as many."""
    dense_ring_bytes: int
    """Bytes that every rank of a dense ring sends in the forward pass: keys and values of all other ranks' rows."""
    seconds: float
    """Time of both passes on the assumed :class:`Machine`. In a ring, computation with a rank's own rows hides only its
    first message, and computation with other ranks' rows hides the messages after it."""

    @property
    def imbalance(self) -> float:
        """Largest number of operations of a rank over the mean; 1 = balanced."""
        mean = sum(self.flops) / len(self.flops)
        return max(self.flops) / mean if mean else 1.0

    @property
    def dense_ratio(self) -> float:
        """Bytes of a dense ring over the largest number of bytes that a rank sends, forward."""
        most = max(self.forward_bytes)
        return self.dense_ring_bytes / most if most else math.inf


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """All strategies that can compute a call, the chosen one first, then by time.

    The layout is the one whose cheapest strategy balances the work, if only one does; the strategy is its cheapest.
    """

    ranks: tuple[int, ...]
    """Ranks along every axis of the mesh."""
    rows: int
    """Number of rows of the whole sequence."""
    estimates: tuple[ParallelEstimate, ...]

    @property
    def strategy(self) -> Strategy:
        """The chosen strategy."""
        return self.estimates[0].strategy

    @property
    def layout(self) -> Layout:
        """The chosen layout."""
        return self.estimates[0].layout

    def __str__(self) -> str:
        """A table with a line per strategy and layout."""
        lines = [
            f"{self.rows:,} rows over {' x '.join(map(str, self.ranks))} ranks; bytes of the rank that sends most",
            f"{'strategy':9} {'layout':11} {'forward':>14} {'backward':>15} {'one link':>14} {'messages':>9} "
            f"{'FLOPs of a rank':>16} {'imbalance':>9} {'dense ring / ours':>17}",
        ]
        lines += [
            f"{e.strategy:9} {e.layout:11} {max(e.forward_bytes):>14,} {max(e.backward_bytes):>15,} "
            f"{e.link_bytes:>14,} {e.messages:>9,} {max(e.flops):>16.4g} {e.imbalance:>9.3f} {e.dense_ratio:>17.4g}"
            for e in self.estimates
        ]
        return "\n".join(lines)


def plan_parallel(
    pattern: Pattern,
    shape: Sequence[int],
    mesh: DeviceMesh | int | tuple[int, int],
    *,
    num_kv_heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    is_causal: bool = False,
    query_offset: int = 0,
    cu_seqlens: Tensor | None = None,
    is_padded: bool = False,
    machine: Machine | None = None,
) -> ParallelPlan:
    """Bytes per rank and per link, operations per rank and their balance, for every strategy and layout.

    Counted exactly from the pattern: for a group of segment length w and rate r, a rank of l rows needs
    ``(w - l) / r`` rows from others, and none if segments end at shard boundaries; for windows, blocks and global
    tokens, the rows that its queries attend to. Needs no process group.

    Args:
        pattern: the pattern.
        shape: ``(B, N, H, D)`` of the whole query: batch, rows, query heads, head dimension.
        mesh: the mesh, or the number of ranks, or ``(ranks of the ring, ranks that split heads)``.
        num_kv_heads: number G of key/value heads; None = H.
        dtype: of keys and values.
        is_causal, query_offset, cu_seqlens: see :func:`attend`.
        is_padded: whether there is a key padding mask, which travels with the rows.
        machine: rates of computation and communication, which weigh bytes against operations.

    Returns:
        the strategies that can compute the call, the chosen one first; ``print`` shows a table.

    Raises:
        TypeError, ValueError: no pattern, a shape of other than four sizes, heads that do not divide, or no ranks.
        NotImplementedError: no strategy can compute the call.

    >>> from dilated_attention_pytorch import parallel
    >>> best = parallel.plan_parallel(DilatedPattern([2048, 32768], [1, 12]), (1, 32768, 12, 64), 4).estimates[0]
    >>> best.strategy, best.forward_bytes[0]  # 12 heads, (32768 - 8192) / 12 rows of keys and values, 128 bytes each
    ('ring', 6291456)
    """
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern must be a Pattern such as DilatedPattern([2048], [1]), got {type(pattern).__name__}")
    if isinstance(query_offset, bool) or not isinstance(query_offset, int) or query_offset < 0:
        raise ValueError(f"query_offset must be a position, at least 0, got {query_offset!r}")
    if cu_seqlens is not None and query_offset:
        raise ValueError(f"cu_seqlens packs documents from position 0, got query_offset {query_offset}")
    if len(shape) != 4 or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in shape):
        raise ValueError(f"shape must be (batch, rows, query heads, head_dim), each at least 1, got {tuple(shape)}")
    batch, rows, heads, head_dim = shape
    kv_heads = heads if num_kv_heads is None else num_kv_heads
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"num_kv_heads must divide the {heads} query heads, got {kv_heads}")
    for rule in pattern.rules:
        rule.check(query_offset + rows, kv_heads)
    ranks = tuple(mesh.shape) if isinstance(mesh, DeviceMesh) else (mesh,) if isinstance(mesh, int) else tuple(mesh)
    are_counts = all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in ranks)
    if len(ranks) not in (1, 2) or not are_counts:
        raise ValueError(f"mesh must be one or two numbers of ranks, each at least 1, got {ranks}")
    call = ShardedCall(pattern, kv_heads, is_causal, query_offset, documents_of(cu_seqlens, rows))
    size = ShardedShape(call, batch, rows, heads, head_dim, dtype, is_padded, ranks)
    return _plan(size, ("contiguous", "zigzag"), machine or Machine())


def cheapest(size: ShardedShape, layout: Layout) -> Strategy:
    """The cheapest strategy for rows in ``layout``."""
    return _plan(size, (layout,), Machine()).strategy


@functools.lru_cache(maxsize=64)
def _plan(size: ShardedShape, layouts: tuple[Layout, ...], machine: Machine) -> ParallelPlan:
    estimates = [_estimate(size, strategy, layout, machine) for layout in layouts for strategy in _possible(size)]
    # Ties go to the first: contiguous rows, and the ring, which needs the least memory.
    by_time = sorted(estimates, key=lambda estimate: estimate.seconds)
    cheapest_of = []
    for layout in layouts:
        of_layout = [one for one in estimates if one.layout == layout]
        fastest = min(one.seconds for one in of_layout)
        cheapest_of.append(next(one for one in of_layout if one.seconds <= _EQUAL * fastest))
    best = min(cheapest_of, key=lambda estimate: (estimate.imbalance > _BALANCED, estimate.seconds))
    return ParallelPlan(size.ranks, size.num_rows, (best, *(one for one in by_time if one is not best)))


def _possible(size: ShardedShape) -> list[Strategy]:
    if any(group.boundaries is not None for group in size.call.pattern.groups):
        raise NotImplementedError(
            "plans count segments of one length, and a SegmentedPattern has ragged ones; name the strategy: "
            'strategy="heads" on a 1-D mesh computes it'
        )
    is_padded_tail = any(group.tail == "zero_padded" for group in size.call.pattern.groups)
    strategies: list[Strategy] = [] if is_padded_tail else ["ring"]
    if not is_padded_tail and not size.call.pattern.rules:
        strategies.append("gather")
    if len(size.ranks) == 1 and size.num_heads >= size.ranks[0]:
        strategies.append("heads")
    if not strategies:
        raise NotImplementedError(
            f'tail="zero_padded" needs whole sequences, so strategy="heads" on a 1-D mesh of at most {size.num_heads} '
            f'ranks, one for every query head at least: got {size.ranks} ranks; or use tail="ragged"'
        )
    return strategies


def _estimate(size: ShardedShape, strategy: Strategy, layout: Layout, machine: Machine) -> ParallelEstimate:
    if strategy == "heads":
        costs = _heads_costs(size, size.ranks[0], size.num_rows, layout)
        flops, remote = _heads_flops(size, size.ranks[0]), torch.zeros(())
    else:
        costs, flops, remote = _row_costs(size, layout, is_gathered=strategy == "gather")
    seconds = 0.0
    for num_bytes, messages, times in (
        (costs.forward, costs.messages, 1.0),
        (costs.backward, costs.backward_messages, BACKWARD_PRODUCTS / FORWARD_PRODUCTS),
    ):
        sending = num_bytes / machine.bytes_per_second + messages * machine.message_seconds
        computing = torch.tensor(flops, dtype=torch.float64) * (times / machine.flops_per_second)
        if strategy == "ring":
            first = (messages > 0) * (costs.link / machine.bytes_per_second + machine.message_seconds)
            others = remote * (times / machine.flops_per_second)
            of_ranks = (computing - others).maximum(first) + others.maximum(sending - first)
            seconds += float(of_ranks.max())
        else:
            seconds += float(sending.max() + computing.max())
    num_ranks = math.prod(size.ranks)
    held = size.num_rows / num_ranks
    return ParallelEstimate(
        strategy,
        layout,
        tuple(costs.forward.tolist()),
        tuple(costs.backward.tolist()),
        costs.link,
        int(costs.messages.max()),
        int(costs.backward_messages.max()),
        tuple(flops),
        round((size.num_rows - held) * 2 * size.call.num_kv_heads * size.row_bytes),
        seconds,
    )


@dataclass(frozen=True, slots=True)
class ShardedShape:
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


class _Costs(NamedTuple):
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


def _row_costs(size: ShardedShape, layout: Layout, *, is_gathered: bool) -> tuple[_Costs, list[int], Tensor]:
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
        of_pair = pair_flops(size.batch_size * ratio, size.head_dim)
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
            costs = _heads_costs(size, num_parts, sum(stop - start for start, stop in runs), "contiguous")
            forward[ring] += costs.forward
            backward[ring] += costs.backward
            messages[ring] += costs.messages
            back_messages[ring] += costs.backward_messages
            link = max(link, costs.link)
    of_ranks = _Costs(forward.flatten(), backward.flatten(), link, messages.flatten(), back_messages.flatten())
    return of_ranks, flops, remote.flatten()


def _ring_costs(size: ShardedShape, call: ShardedCall, shards: Shards) -> _Costs:
    """Keys and values are sent in both passes; in the backward pass their gradients return."""
    sent, row = sent_rows(call, shards), 2 * size.row_bytes + size.mask_bytes
    there, back = sent.given * row, sent.taken * 2 * size.row_bytes
    return _Costs(there, there + back, sent.most * row, sent.messages, sent.messages + sent.messages_taken)


def _gather_costs(size: ShardedShape, call: ShardedCall, shards: Shards) -> _Costs:
    """Keys and values are gathered in both passes; in the backward pass their gradients are also reduce-scattered."""
    row = 2 * size.row_bytes + size.mask_bytes
    sent, sums = (gathered_rows(call, shards, of_row) for of_row in (row, 2 * size.sum_bytes))
    there, back = sent.given * row, sums.given * 2 * size.sum_bytes
    return _Costs(there, there + back, sent.most * row, sent.messages, sent.messages + sums.messages)


def _heads_costs(size: ShardedShape, num_ranks: int, num_rows: int, layout: Layout) -> _Costs:
    """Costs of the all-to-all of ``num_rows`` rows among ``num_ranks`` ranks, in both directions."""
    heads = Heads.split(size.num_heads, size.call.num_kv_heads, num_ranks)
    shards = Shards(num_rows, num_ranks, layout)
    held = torch.tensor([sum(stop - start for start, stop in runs) for runs in shards])
    row_bytes = [
        torch.tensor([len(own) * size.row_bytes for own in of_ranks]) for of_ranks in (heads.queries, heads.kv)
    ]
    row_bytes.append(torch.full((num_ranks,), size.batch_size if size.is_padded else 0))
    # Bytes of one tensor from the rank of the row to the rank of the column, on the way to the ranks of the heads.
    queries, kv, mask = (torch.outer(held, of_row).fill_diagonal_(0) for of_row in row_bytes)
    there = (queries, kv, kv, mask, queries.T)
    # The gradient of the output is sent to the ranks of the heads; those of query, key and value return.
    back = (queries, queries.T, kv.T, kv.T)
    sent, sent_back = torch.stack(there).sum(0), torch.stack(back).sum(0)
    messages, back_messages = (torch.stack(tables).count_nonzero((0, 2)) for tables in (there, back))
    return _Costs(sent.sum(1), sent_back.sum(1), int(sent.max()), messages, back_messages)


def _heads_flops(size: ShardedShape, num_ranks: int) -> list[int]:
    """Operations of each rank if each computes its heads for all rows."""
    heads = Heads.split(size.num_heads, size.call.num_kv_heads, num_ranks)
    call, rows = size.call, size.num_rows
    flops = []
    for rank in range(num_ranks):
        kv, ratio = heads.kv_of_queries(rank, size.ratio)
        of_heads = CallShape(
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
        flops.append(pair_flops(plan(of_heads, 1 << 62).num_pairs, size.head_dim))
    return flops
