"""Event-based simulation of the parallel strategies at given rates of computation and communication."""

from __future__ import annotations

import functools
import itertools
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.planning.layout import Layout, Shards
from dilated_attention_pytorch.planning.pairs import num_pairs
from dilated_attention_pytorch.planning.rounds import gather_rounds
from dilated_attention_pytorch.planning.shards import ShardedCall
from dilated_attention_pytorch.planning.traffic import Links, gather_group_parts, ring_links, ring_pairs

from .costs import BACKWARD_FLOPS, Shape, head_messages, heads_flops
from .plan import Machine, shape_of
from .sharding import check_layout
from .simulated_ranks import SimulatedRanks

SimulatedStrategy = Literal["ring", "gather", "heads"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """Timeline of the simulated ranks, per rank."""

    seconds: tuple[float, ...]
    """Seconds until the rank has finished."""
    compute_seconds: tuple[float, ...]
    """Seconds of computation."""
    link_seconds: tuple[float, ...]
    """Seconds of communication: sending or receiving, whichever takes longer."""
    messages: tuple[int, ...]
    """Number of messages sent."""
    bytes: tuple[int, ...]
    """Bytes sent."""
    distances: tuple[tuple[int, int, int], ...]
    """``(d, messages, bytes)`` for every distance d: totals of all ranks to the rank d places after them, modulo the
    number of ranks."""

    @property
    def step_seconds(self) -> float:
        """Seconds of the slowest rank."""
        return max(self.seconds)

    @property
    def imbalance(self) -> float:
        """Largest computation time of a rank over the mean."""
        mean = sum(self.compute_seconds) / len(self.compute_seconds)
        return max(self.compute_seconds) / mean if mean else 1.0

    @property
    def overlap(self) -> float:
        """Fraction of the slowest rank's communication that is hidden behind computation; 1 without communication."""
        slowest = self.seconds.index(max(self.seconds))
        waiting, sending = self.seconds[slowest] - self.compute_seconds[slowest], self.link_seconds[slowest]
        return max(0.0, 1.0 - waiting / sending) if sending else 1.0


def simulate(
    pattern: Pattern,
    shape: Sequence[int],
    ranks: int,
    *,
    strategy: SimulatedStrategy = "ring",
    num_kv_heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    is_causal: bool = False,
    query_offset: int = 0,
    cu_seqlens: Tensor | None = None,
    layout: Layout = "contiguous",
    machine: Machine | None = None,
    is_backward: bool = False,
    noise: float = 0.0,
    seed: int = 0,
) -> Simulation:
    """Simulate a strategy of :func:`attend` event by event, with the exact bytes and pairs of every step.

    ``"ring"``: a rank computes its own rows while the rows of its first step are in transit, waits for them, starts the
    transfer of the next step's rows, computes with those received, and so on. ``"gather"``: it computes its own rows;
    then it gathers rows with each set of ranks that share segments, round by round (small tensors are forwarded, see
    :func:`plan_parallel`), and computes. ``"heads"``: rows are sent to the ranks of their heads, query, key and value
    one after the other, attention is computed, and outputs are sent back. In the backward pass, gradients return the
    same way.

    A message starts when both ranks have posted it and neither's link is busy in that direction; it takes
    ``message_seconds`` plus its bytes over ``bytes_per_second``. A partial takes its operations over
    ``flops_per_second``: 4 D per pair forward, 2.5 times as many backward. Links of different ranks are independent,
    and launching a partial is free. In an exchange among several ranks each sends to the others in turn, and no link
    carries two messages at a time.

    Args:
        pattern: dilation groups; other rules only with ``"heads"``.
        shape, num_kv_heads, dtype, is_causal, query_offset, cu_seqlens: see :func:`plan_parallel`.
        ranks: number of ranks.
        strategy: the strategy, see :func:`attend`.
        layout: assignment of rows to ranks.
        machine: rates of every rank.
        is_backward: simulate the backward pass instead of the forward pass.
        noise: every duration is multiplied by ``exp(noise x)``, x standard normal.
        seed: seed of the noise.

    Returns:
        seconds, messages and bytes per rank. For a ring, memory grows with the number of ranks times the number of
        distances between communicating ranks.

    Raises:
        TypeError, ValueError: see :func:`plan_parallel`; an unknown strategy or layout; more ranks than query heads
            with ``"heads"``; or negative noise.
        NotImplementedError: rules, segments of unequal length or zero-padded tails with a strategy other than
            ``"heads"``.

    >>> from dilated_attention_pytorch import parallel
    >>> run = parallel.simulate(DilatedPattern([2048, 32768], [1, 12]), (1, 32768, 12, 64), 4)
    >>> run.messages, run.bytes[0]
    ((3, 3, 3, 3), 6291456)
    """
    size = shape_of(
        pattern,
        shape,
        ranks,
        num_kv_heads=num_kv_heads,
        dtype=dtype,
        is_causal=is_causal,
        query_offset=query_offset,
        cu_seqlens=cu_seqlens,
        is_padded=False,
    )
    check_layout(layout)
    if not (isinstance(noise, int | float) and math.isfinite(noise) and noise >= 0):
        raise ValueError(f"noise must be a finite number, at least 0, got {noise!r}")
    if strategy not in get_args(SimulatedStrategy):
        raise ValueError(f"strategy must be one of {', '.join(get_args(SimulatedStrategy))}, got {strategy!r}")
    of_segments = not pattern.rules and all(g.boundaries is None and g.tail == "ragged" for g in pattern.groups)
    if strategy != "heads" and not of_segments:
        raise NotImplementedError(
            f'strategy="{strategy}" is simulated for dilation groups of segments of one length with ragged tails: got '
            f"{type(pattern).__name__} with rules, other segments or padded tails; plan_parallel counts what rules send"
        )
    one = _Pass(
        size,
        layout,
        SimulatedRanks(ranks, machine or Machine(), noise, seed),
        4 * size.head_dim * (BACKWARD_FLOPS if is_backward else 1),
        is_backward,
    )
    passes: dict[SimulatedStrategy, Callable[[_Pass], None]] = {"ring": _ring, "gather": _gather, "heads": _heads}
    passes[strategy](one)
    return one.simulation()


class _Pass(NamedTuple):
    """One simulated pass."""

    size: Shape
    layout: Layout
    ranks: SimulatedRanks
    flops_of_pair: float
    is_backward: bool

    @property
    def shards(self) -> Shards:
        return Shards(self.size.num_rows, self.size.ranks[0], self.layout)

    def flops(self, pairs: Tensor) -> Tensor:
        """Operations for pairs counted per key/value head."""
        return pairs.double() * (self.flops_of_pair * self.size.batch_size * self.size.ratio)

    def simulation(self) -> Simulation:
        """The result of the pass."""
        ranks = self.ranks
        distances = ranks.messages_of.nonzero().squeeze(1).tolist()
        return Simulation(
            seconds=tuple(ranks.ready.tolist()),
            compute_seconds=tuple(ranks.computed.tolist()),
            link_seconds=tuple(torch.maximum(ranks.seconds_sent, ranks.seconds_received).tolist()),
            messages=tuple(int(x) for x in ranks.messages.tolist()),
            bytes=tuple(int(x) for x in ranks.bytes.tolist()),
            distances=tuple((one, int(ranks.messages_of[one]), int(ranks.bytes_of[one])) for one in distances),
        )


def _ring(run: _Pass) -> None:
    """Simulate :class:`ring.Ring`: distance after distance, in each rank's order of steps."""
    ranks, size = run.ranks, run.size
    tables = _ring_tables(size.call, run.shards)
    ranks.compute(run.flops(tables.own_pairs))
    posted, returned = torch.zeros_like(ranks.ready), torch.zeros_like(ranks.ready)

    def wait_for(through: Tensor, ends: tuple[Tensor, Tensor]) -> None:
        for some in ends:
            ranks.ready[some] = torch.maximum(ranks.ready[some], through)

    def send(distance: int) -> _Step:
        sources, rows = tables.rows.of(distance)
        ends, num_bytes = (sources, (sources + distance) % len(posted)), rows * (2 * size.row_bytes)
        return _Step(ends, num_bytes, ranks.send(*ends, num_bytes, posted))

    steps = tables.rows.distances
    under_way = send(steps[0]) if steps else None
    for distance, following in itertools.zip_longest(steps, steps[1:]):
        assert under_way is not None
        ends, num_bytes, through = under_way
        wait_for(through, ends)
        for some in ends:
            posted[some] = ranks.ready[some]
        under_way = send(following) if following is not None else None
        sources, targets = ends
        ranks.compute(run.flops(tables.pairs.at(distance, sources)), targets)
        if run.is_backward:
            for some in ends:
                ranks.ready[some] = torch.maximum(ranks.ready[some], returned[some])
            back = ranks.send(targets, sources, num_bytes, ranks.ready)
            returned[sources] = 0.0
            returned[targets] = back
            returned[sources] = torch.maximum(returned[sources], back)
    ranks.ready = torch.maximum(ranks.ready, returned)


class _Step(NamedTuple):
    """The messages of one distance."""

    ends: tuple[Tensor, Tensor]
    """The sending ranks, and the ranks that they send to."""
    num_bytes: Tensor
    through: Tensor
    """Arrival time of each message."""


def _gather(run: _Pass) -> None:
    """Simulate :class:`gather.Gather`: group after group, in the order common to all ranks."""
    ranks, size = run.ranks, run.size
    parts = gather_group_parts(size.call, run.shards)
    remote = torch.zeros(len(run.shards), dtype=torch.int64).index_add_(0, parts.rank, parts.pairs)
    ranks.compute(run.flops(torch.tensor(num_pairs(size.call, run.shards)) - remote))
    counts = parts.num_members
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).tolist()
    of_row = (2 * size.row_bytes, 2 * size.sum_bytes)
    num_bytes = [(parts.most * one).tolist() for one in of_row]
    ranks_of = [
        [rank for start, stop in gather_group for rank in range(start, stop)] for gather_group in parts.gather_groups
    ]
    in_order = sorted(
        range(len(ranks_of)), key=lambda gather_group: (len(ranks_of[gather_group]), ranks_of[gather_group])
    )
    for gather_group in in_order:
        part = slice(bounds[gather_group], bounds[gather_group + 1])
        members = parts.rank[part]
        for hops in gather_rounds(len(members), num_bytes[0][gather_group]):
            ranks.shift(members, [(-hop.distance, hop.num_tensors * num_bytes[0][gather_group]) for hop in hops])
        ranks.compute(run.flops(parts.pairs[part]), members)
        if run.is_backward:
            for hops in reversed(gather_rounds(len(members), num_bytes[1][gather_group])):
                ranks.shift(members, [(hop.distance, hop.num_tensors * num_bytes[1][gather_group]) for hop in hops])


def _heads(run: _Pass) -> None:
    """Simulate :func:`heads.to_heads` and :func:`heads.to_rows`, before and after the computation."""
    ranks, size = run.ranks, run.size
    everyone = torch.arange(size.ranks[0])
    sent = head_messages(size, size.ranks[0], size.num_rows, run.layout)
    there = [sent.queries_there, sent.kv_there, sent.kv_there]
    home = [sent.queries_home]
    if run.is_backward:
        there, home = [sent.queries_there], [sent.queries_home, sent.kv_home, sent.kv_home]
    for table in there:
        ranks.exchange(everyone, table)
    forward_flops = torch.tensor(heads_flops(size, size.ranks[0]), dtype=torch.float64)
    ranks.compute(forward_flops * (run.flops_of_pair / (4 * size.head_dim)))
    for table in home:
        ranks.exchange(everyone, table)


class _RingTables(NamedTuple):
    """Bytes between ranks, and the pairs computed with them."""

    rows: _ByDistance
    pairs: _ByDistance
    own_pairs: Tensor


@functools.lru_cache(maxsize=1)
def _ring_tables(call: ShardedCall, shards: Shards) -> _RingTables:
    """Independent of pass and noise, hence cached."""
    rows = _ByDistance(ring_links(call, shards), len(shards), torch.int32)
    pairs = _ByDistance(ring_pairs(call, shards), len(shards), torch.float32)
    return _RingTables(rows, pairs, torch.tensor(num_pairs(call, shards)) - pairs.taken)


class _ByDistance:
    """Amounts that every rank sends to the rank d places after it, for every distance d with communication."""

    def __init__(self, links: Iterator[Links], num_ranks: int, dtype: torch.dtype) -> None:
        # Anonymous memory is zero-initialised, and only touched pages take memory.
        self._memory = mmap.mmap(-1, num_ranks**2 * dtype.itemsize)
        self._table = torch.frombuffer(self._memory, dtype=dtype).view(num_ranks, num_ranks)
        has_any = torch.zeros(num_ranks, dtype=torch.bool)
        self.taken = torch.zeros(num_ranks, dtype=torch.int64)
        """Total amount that every rank receives."""
        for sources, targets, numbers in links:
            source, target = numbers.nonzero().unbind(1)
            distance = (target + targets.start - source - sources.start) % num_ranks
            self._table[distance, source + sources.start] = numbers[source, target].to(dtype)
            has_any[distance] = True
            self.taken[targets.start : targets.stop] += numbers.sum(0)
        self.distances: list[int] = has_any.nonzero().squeeze(1).tolist()

    def of(self, distance: int) -> tuple[Tensor, Tensor]:
        """The ranks that send anything to the rank ``distance`` places after them, and what each sends, float64."""
        row = self._table[distance]
        sources = row.nonzero().squeeze(1)
        return sources, row[sources].double()

    def at(self, distance: int, sources: Tensor) -> Tensor:
        """What each of ``sources`` sends to the rank ``distance`` places after it, float64."""
        return self._table[distance][sources].double()
