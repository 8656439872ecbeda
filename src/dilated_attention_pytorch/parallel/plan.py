"""What every strategy would send and compute, before anything is: and which is the cheapest."""

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
from dilated_attention_pytorch.planning import Call, Layout, ShardedCall, Shards, plan
from dilated_attention_pytorch.planning.pairs import num_pairs
from dilated_attention_pytorch.planning.traffic import gathered_rows, sent_rows

from .heads import Heads

Strategy = Literal["auto", "ring", "gather", "heads"]

_BALANCED = 1.05
"""A layout in which a rank has more than so much of the mean work is taken only if no other has less: that rank is
waited for in every layer, while bytes weigh less the more rows a rank has, and a ring sends them while it computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """How fast a rank computes and sends: what weighs bytes against operations. Assumptions, not measurements."""

    flops_per_second: float = 4e14
    """Operations of attention per second and rank; 4e14 is an H100's in bfloat16 at half of its peak."""
    bytes_per_second: float = 5e10
    """Bytes per second that a rank sends while it receives as many; 5e10 is a 400 Gbit/s network card."""
    message_seconds: float = 2e-5
    """Seconds that a message takes beside its bytes."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one strategy with one layout sends and computes. Bytes and operations are exact."""

    strategy: Strategy
    layout: Layout
    forward_bytes: tuple[int, ...]
    """Bytes that every rank sends in the forward pass."""
    backward_bytes: tuple[int, ...]
    """Bytes that every rank sends in the backward pass."""
    link_bytes: int
    """Most bytes that one rank sends to one other in the forward pass."""
    messages: int
    """About how many messages a rank sends at most in the forward pass, for :attr:`seconds`."""
    flops: tuple[int, ...]
    """Operations of every rank in the forward pass, 4 D for a pair; the backward pass takes 2.5 times as many."""
    dense_ring_bytes: int
    """What every rank of a dense ring sends in the forward pass: all keys and values of all other ranks' rows."""
    seconds: float
    """Of both passes on the :class:`Machine` that was assumed."""

    @property
    def imbalance(self) -> float:
        """Most operations of a rank over the mean; 1 is balanced."""
        mean = sum(self.flops) / len(self.flops)
        return max(self.flops) / mean if mean else 1.0

    @property
    def dense_ratio(self) -> float:
        """Bytes of a dense ring over the most bytes that a rank sends, forward."""
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
    """Rows of the whole sequence."""
    estimates: tuple[Estimate, ...]

    @property
    def strategy(self) -> Strategy:
        """The chosen strategy."""
        return self.estimates[0].strategy

    @property
    def layout(self) -> Layout:
        """The chosen layout."""
        return self.estimates[0].layout

    def __str__(self) -> str:
        """A table, a line for every strategy and layout."""
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
        """Those of a row that is added up on the way."""
        return self.batch_size * self.head_dim * torch.promote_types(self.dtype, torch.float32).itemsize

    @property
    def mask_bytes(self) -> int:
        return self.batch_size * self.dtype.itemsize if self.is_padded else 0


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

    Counted from the pattern, exactly: a group of segment length w and rate r needs per rank of l rows
    ``(w - l) / r`` rows from others, and none where segments end with shards; of windows, blocks and global tokens the
    rows that they show to its queries. Needs no process group.

    Args:
        pattern: the pattern.
        shape: ``(B, N, H, D)`` of the whole query: batch, rows, query heads, width of a head.
        mesh: the mesh, or the number of ranks, or ``(ranks of the ring, ranks that split heads)``.
        num_kv_heads: number G of key/value heads; H without it.
        dtype: of keys and values.
        is_causal, query_offset, cu_seqlens: see :func:`attend`.
        is_padded: whether there is a key padding mask, which travels with the rows.
        machine: how fast ranks compute and send, which weighs bytes against operations.

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
    size = shape_of(
        pattern, shape, mesh, num_kv_heads=num_kv_heads, dtype=dtype, is_causal=is_causal, query_offset=query_offset,
        cu_seqlens=cu_seqlens, is_padded=is_padded,
    )  # fmt: skip
    return _plan(size, ("contiguous", "zigzag"), machine or Machine())


def shape_of(
    pattern: Pattern,
    shape: Sequence[int],
    mesh: DeviceMesh | int | tuple[int, int],
    *,
    num_kv_heads: int | None,
    dtype: torch.dtype,
    is_causal: bool,
    query_offset: int,
    cu_seqlens: Tensor | None,
    is_padded: bool,
) -> Shape:
    """The sizes of a call, or what :func:`plan_parallel` raises."""
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
    return Shape(call, batch, rows, heads, head_dim, dtype, is_padded, ranks)


def cheapest(size: Shape, layout: Layout) -> Strategy:
    """The cheapest strategy for rows that lie as ``layout`` says."""
    return _plan(size, (layout,), Machine()).strategy


@functools.lru_cache(maxsize=64)
def _plan(size: Shape, layouts: tuple[Layout, ...], machine: Machine) -> ParallelPlan:
    estimates = [_estimate(size, strategy, layout, machine) for layout in layouts for strategy in _possible(size)]
    # Of equals the first: contiguous rows, and the ring, which needs least memory.
    by_time = sorted(estimates, key=lambda estimate: estimate.seconds)
    cheapest_of = [next(one for one in by_time if one.layout == layout) for layout in layouts]
    best = min(cheapest_of, key=lambda estimate: (estimate.imbalance > _BALANCED, estimate.seconds))
    return ParallelPlan(size.ranks, size.num_rows, (best, *(one for one in by_time if one is not best)))


def _possible(size: Shape) -> list[Strategy]:
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


def _estimate(size: Shape, strategy: Strategy, layout: Layout, machine: Machine) -> Estimate:
    if strategy == "heads":
        costs, flops = _heads_costs(size, size.ranks[0], size.num_rows, layout), _heads_flops(size, size.ranks[0])
    else:
        costs, flops = _by_rows(size, strategy, layout)
    forward, backward = tuple(costs.forward.tolist()), tuple(costs.backward.tolist())
    busiest = max(f + b for f, b in zip(forward, backward, strict=True))
    sending = busiest / machine.bytes_per_second + 3 * costs.messages * machine.message_seconds
    computing = 3.5 * max(flops) / machine.flops_per_second
    num_ranks = math.prod(size.ranks)
    held = size.num_rows / num_ranks
    return Estimate(
        strategy, layout, forward, backward, costs.link, costs.messages, tuple(flops),
        round((size.num_rows - held) * 2 * size.call.num_kv_heads * size.row_bytes),
        max(sending, computing) if strategy == "ring" else sending + computing,
    )  # fmt: skip


class _Costs(NamedTuple):
    """What some ranks send to each other."""

    forward: Tensor
    """Bytes that every rank sends forward, int64 ``[ranks]``."""
    backward: Tensor
    """Bytes that every rank sends backward."""
    link: int
    """Most bytes from one rank to one other forward."""
    messages: int
    """Most messages of a rank forward."""


def _by_rows(size: Shape, strategy: Strategy, layout: Layout) -> tuple[_Costs, list[int]]:
    """Ring or gather along the first axis, for what the heads axis leaves of the heads; and every rank's operations."""
    num_rings, num_parts = size.ranks[0], size.ranks[1] if len(size.ranks) == 2 else 1
    heads = Heads.split(size.num_heads, size.call.num_kv_heads, num_parts)
    shards = Shards(size.num_rows, num_rings, layout)
    forward = torch.zeros(num_rings, num_parts, dtype=torch.int64)
    backward, link, messages = torch.zeros_like(forward), 0, 0
    flops = [0] * (num_rings * num_parts)
    for part in range(num_parts):
        kv, ratio = heads.kv_of_queries(part, size.ratio)
        call = size.call
        if num_parts > 1:
            call = ShardedCall(
                call.pattern.for_heads(kv, call.num_kv_heads), len(kv), call.is_causal, call.offset, call.documents
            )
        costs = _ring_costs(size, call, shards) if strategy == "ring" else _gather_costs(size, call, shards)
        forward[:, part] += costs.forward
        backward[:, part] += costs.backward
        link, messages = max(link, costs.link), max(messages, costs.messages)
        for ring, pairs in enumerate(num_pairs(call, shards)):
            flops[ring * num_parts + part] = 4 * size.head_dim * size.batch_size * ratio * pairs
    if num_parts > 1:
        for ring, runs in enumerate(shards):
            costs = _heads_costs(size, num_parts, sum(stop - start for start, stop in runs), "contiguous")
            forward[ring] += costs.forward
            backward[ring] += costs.backward
            link = max(link, costs.link)
        messages += 4 * (num_parts - 1)
    return _Costs(forward.flatten(), backward.flatten(), link, messages), flops


def _ring_costs(size: Shape, call: ShardedCall, shards: Shards) -> _Costs:
    """Keys and values there in both passes; in the second their gradients come back."""
    sent, row = sent_rows(call, shards), 2 * size.row_bytes + size.mask_bytes
    there = sent.given * row
    return _Costs(there, there + sent.taken * 2 * size.row_bytes, sent.most * row, sent.receivers)


def _gather_costs(size: Shape, call: ShardedCall, shards: Shards) -> _Costs:
    """Keys and values there in both passes; in the second the parts of their gradients' sums as well."""
    sent, row = gathered_rows(call, shards), 2 * size.row_bytes + size.mask_bytes
    there = sent.given * row
    return _Costs(there, there + sent.given * 2 * size.sum_bytes, sent.most * row, sent.receivers)


def _heads_costs(size: Shape, num_ranks: int, num_rows: int, layout: Layout) -> _Costs:
    """All-to-all of ``num_rows`` rows among ``num_ranks`` ranks, there and home again."""
    heads = Heads.split(size.num_heads, size.call.num_kv_heads, num_ranks)
    shards = Shards(num_rows, num_ranks, layout)
    held = torch.tensor([sum(stop - start for start, stop in runs) for runs in shards])
    queries = torch.tensor([len(some) for some in heads.queries])
    kv = torch.tensor([len(some) for some in heads.kv])
    mask_bytes = size.batch_size if size.is_padded else 0
    # From the rank of the row to that of the column: its rows of the other's heads there, the other's rows home.
    there = held[:, None] * ((queries + 2 * kv) * size.row_bytes + mask_bytes)
    sent = there + queries[:, None] * held * size.row_bytes
    # The gradient of the output goes there, those of query, key and value come home.
    back = (held[:, None] * queries + (queries + 2 * kv)[:, None] * held) * size.row_bytes
    sent.fill_diagonal_(0)
    return _Costs(sent.sum(1), back.fill_diagonal_(0).sum(1), int(sent.max()), 4 * (num_ranks - 1))


def _heads_flops(size: Shape, num_ranks: int) -> list[int]:
    """Operations of ranks that each compute some heads of the whole sequence."""
    heads = Heads.split(size.num_heads, size.call.num_kv_heads, num_ranks)
    call, rows = size.call, size.num_rows
    flops = []
    for rank in range(num_ranks):
        kv, ratio = heads.kv_of_queries(rank, size.ratio)
        whole = Call(
            call.pattern.for_heads(kv, call.num_kv_heads), size.batch_size, rows, rows, len(kv) * ratio, len(kv),
            call.offset, call.offset, call.is_causal, call.documents,
        )  # fmt: skip
        flops.append(4 * size.head_dim * plan(whole, 1 << 62).num_pairs)
    return flops
