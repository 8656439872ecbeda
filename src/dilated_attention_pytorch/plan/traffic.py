"""Number of rows that every rank sends to every other, computed for some ranks at a time.

For each segment, a rank sends the same rows to all ranks whose queries need the same heads. In sequence order these are
a few ranges of runs if each rank holds rows of every head. So a rank's row of the table of all pairs is the prefix sum
of a few differences, and the whole table is never materialised.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .gather_rounds import gather_rounds, is_passed_on, num_messages
from .layout import Run, Shards
from .seen_rows import rows_sent_by_rules
from .segments import Sharing, shared_segments
from .shards import ShardedCall

_CELLS = 1 << 20
"""Maximum number of rank pairs and differences held at once."""


class Links(NamedTuple):
    """Rows (per key/value head) sent between some ranks; all other pairs of these sources send none."""

    sources: range
    targets: range
    rows: Tensor
    """int64 ``[sources, targets]``."""


class Sent(NamedTuple):
    """Totals of rows (per key/value head) sent between ranks."""

    given: Tensor
    """Rows that every rank sends, int64 ``[ranks]``."""
    taken: Tensor
    """Rows that every rank receives, int64 ``[ranks]``."""
    most: int
    """Largest number of rows from one rank to one other."""
    messages: Tensor
    """Messages that every rank sends, int64 ``[ranks]``."""
    messages_taken: Tensor
    """Messages that every rank receives, int64 ``[ranks]``."""

    @classmethod
    def of(cls, links: Iterator[Links], size: int) -> Sent:
        """Sums over all links of ``size`` ranks; a rank sends one message to every rank that it sends rows to."""
        given, taken, messages, messages_taken = torch.zeros(4, size, dtype=torch.int64)
        most = 0
        for sources, targets, rows in links:
            if rows.numel():
                given[sources.start : sources.stop] += rows.sum(1)
                taken[targets.start : targets.stop] += rows.sum(0)
                messages[sources.start : sources.stop] += rows.count_nonzero(1)
                messages_taken[targets.start : targets.stop] += rows.count_nonzero(0)
                most = max(most, int(rows.max()))
        return cls(given, taken, most, messages, messages_taken)


@functools.lru_cache(maxsize=64)
def sent_rows(call: ShardedCall, shards: Shards) -> Sent:
    """Rows sent between ranks under :func:`seen_rows`."""
    return Sent.of(ring_links(call, shards), len(shards))


@functools.lru_cache(maxsize=64)
def gathered_rows(call: ShardedCall, shards: Shards, row_bytes: int) -> Sent:
    """Rows that ranks send to each other within :func:`gather_groups`: every member as many as the one with most.

    They are sent in the rounds of :func:`gather_rounds`, for rows of ``row_bytes`` bytes.
    """
    parts = gather_group_parts(call, shards)
    sent = Sent.of(_gather_links(parts, len(shards), row_bytes), len(shards))
    sizes = zip(parts.num_members.tolist(), (parts.most * row_bytes).tolist(), strict=True)
    of_gather_group = torch.tensor([num_messages(*size) for size in sizes], dtype=torch.int64)
    messages = torch.zeros_like(sent.given).index_add_(0, parts.rank, of_gather_group[parts.gather_group])
    return sent._replace(messages=messages, messages_taken=messages)


def ring_links(call: ShardedCall, shards: Shards) -> Iterator[Links]:
    """Rows from every rank to every other under :func:`seen_rows`, some ranks at a time."""
    table = _Sources.joined([_Sources.of(sharing, shards) for sharing in shared_segments(call, shards)])
    bounds = _at_once(len(shards), table.rank, table.stop_range - table.first_range)
    for first, stop in bounds:
        of_rules = _sent_because_of_rules(call, shards, range(first, stop)) if call.pattern.rules else []
        yield _links(range(first, stop), table.differences(call, len(shards), first, stop), of_rules)


class _Sources(NamedTuple):
    """Runs that send rows of segments, with the ranges of target runs that receive the same heads of them."""

    rank: Tensor
    run: Tensor
    value: Tensor
    """Start of a source's values, one per kind of range."""
    first_range: Tensor
    """First range (in the tables below) of the source's segment."""
    stop_range: Tensor
    """One past the last."""
    first_run: Tensor
    """First run of every range."""
    stop_run: Tensor
    kind: Tensor
    """Kind of a range: the heads that its runs receive."""
    values: Tensor

    @classmethod
    def of(cls, sharing: Sharing, shards: Shards) -> _Sources:
        """The sources for the segments of one group and shift."""
        run, segment, rows = sharing.run, sharing.segment, sharing.rows
        rows_kinds, rows_kind = _distinct(rows)
        wanted_kinds, wanted_kind = _distinct(_wanted(sharing, shards).long())
        is_first = torch.ones(len(run), dtype=torch.bool)
        is_first[1:] = (segment[1:] != segment[:-1]) | (wanted_kind[1:] != wanted_kind[:-1])
        first = is_first.nonzero().squeeze(1)
        stop = torch.cat([first[1:], torch.tensor([len(run)])])[: len(first)]
        is_any = wanted_kinds.any(1)[wanted_kind[first]]
        first, stop = first[is_any], stop[is_any]
        sends = rows_kinds.any(1)[rows_kind].nonzero().squeeze(1)
        segment_of_range = segment[first]
        of_run = run[sends]
        return cls(
            shards.owner_of(of_run),
            of_run,
            rows_kind[sends] * len(wanted_kinds),
            torch.searchsorted(segment_of_range, segment[sends]),
            torch.searchsorted(segment_of_range, segment[sends], right=True),
            run[first],
            run[stop - 1] + 1,
            wanted_kind[first],
            (rows_kinds @ wanted_kinds.T).flatten(),
        )

    @classmethod
    def joined(cls, tables: list[_Sources]) -> _Sources:
        """Concatenation of all tables, sorted by rank."""
        values = num_ranges = 0
        moved = []
        for table in tables:
            value, first, stop = table.value + values, table.first_range + num_ranges, table.stop_range + num_ranges
            moved.append(table._replace(value=value, first_range=first, stop_range=stop))
            values, num_ranges = values + len(table.values), num_ranges + len(table.kind)
        none = torch.zeros(0, dtype=torch.int64)
        columns = [torch.cat(column) for column in zip(*moved, strict=True)] if moved else [none] * len(cls._fields)
        order = columns[0].argsort(stable=True)
        return cls(*(column[order] for column in columns[:5]), *columns[5:])

    def differences(self, call: ShardedCall, size: int, first: int, stop: int) -> _Differences:
        """Rows from the ranks ``first`` to ``stop`` to ranges of ranks."""
        low, high = torch.searchsorted(self.rank, torch.tensor([first, stop])).tolist()
        counts = (self.stop_range - self.first_range)[low:high]
        source = torch.arange(low, high).repeat_interleave(counts)
        range_index = torch.arange(len(source)) - (
            counts.cumsum(0) - counts - self.first_range[low:high]
        ).repeat_interleave(counts)
        first_run, stop_run = self.first_run[range_index], self.stop_run[range_index]
        if call.is_causal:
            first_run = torch.maximum(first_run, self.run[source] + 1)
        value, rank = self.values[self.value[source] + self.kind[range_index]], self.rank[source]
        of_first_half = _Differences(rank, first_run, stop_run.clamp(max=size), value).that_count()
        if not (stop_run > size).any():
            return of_first_half
        # Runs of the second half belong to ranks in descending order.
        descending = (2 * size - 1 - stop_run, 2 * size - 1 - first_run.clamp(min=size))
        of_second_half = _Differences(rank, *descending, value).that_count()
        return _Differences(*map(torch.cat, zip(of_first_half, of_second_half, strict=True)))


class _Differences(NamedTuple):
    """Ranks that send ``value`` rows to each of the ranks ``start`` to ``stop``; int64 tensors of equal length."""

    rank: Tensor
    start: Tensor
    stop: Tensor
    value: Tensor

    def that_count(self) -> _Differences:
        """Only non-empty differences."""
        counts = (self.start < self.stop) & (self.value != 0)
        return _Differences(*(column[counts] for column in self))


def _links(sources: range, differences: _Differences, others: list[tuple[int, int, int]]) -> Links:
    """Prefix sums of the differences, plus individual rank-to-rank counts."""
    rank, start, stop, value = differences
    bounds = [(int(start.min()), int(stop.max()))] if len(start) else []
    bounds += [(target, target + 1) for _, target, _ in others]
    low, high = (min(bound[0] for bound in bounds), max(bound[1] for bound in bounds)) if bounds else (0, 0)
    width = high - low + 1
    sums = torch.zeros(len(sources) * width, dtype=torch.int64)
    offset = (rank - sources.start) * width - low
    sums.index_add_(0, offset + start, value).index_add_(0, offset + stop, -value)
    rows = sums.view(len(sources), width).cumsum(1)[:, :-1]
    for source, target, number in others:
        rows[source - sources.start, target - low] += number
    own = torch.tensor([one for one in sources if low <= one < high], dtype=torch.int64)
    rows[own - sources.start, own - low] = 0
    return Links(sources, range(low, high), rows)


def _at_once(size: int, rank: Tensor, counts: Tensor) -> Iterator[Run]:
    """Ranges of ranks to process together; ``counts`` are the numbers of differences per source of each ``rank``."""
    totals = torch.zeros(size, dtype=torch.int64).index_add_(0, rank, counts).tolist()
    first = held = 0
    for one, total in enumerate(totals):
        if one > first and (held + total > _CELLS or (one + 1 - first) * size > _CELLS):
            yield first, one
            first, held = one, 0
        held += total
    if size:
        yield first, size


def _sent_because_of_rules(call: ShardedCall, shards: Shards, ranks: range) -> list[tuple[int, int, int]]:
    """Source, target and number of rows that some ranks send because of rules."""
    return [(source, target, number) for source in ranks for target, number in rows_sent_by_rules(call, shards, source)]


def _wanted(sharing: Sharing, shards: Shards) -> Tensor:
    """Heads of a segment that a run receives, bool ``[entries, heads]``.

    A row is sent to a rank once, however many of its runs use it: the later of two runs sees all that the earlier sees.
    """
    wanted, size = sharing.rows > 0, len(shards)
    if shards.layout == "contiguous":
        return wanted
    later = 2 * size - 2 - sharing.run
    has_later = (sharing.run < size - 1) & (later < sharing.stop_run[sharing.segment])
    entry = (sharing.first_entry - sharing.first_run)[sharing.segment] + later
    wanted[has_later] &= ~wanted[entry[has_later]]
    return wanted


class GatherGroupParts(NamedTuple):
    """Every rank's part in each of its :func:`gather_groups`, sorted by group, then by rank."""

    gather_groups: tuple[tuple[Run, ...], ...]
    """The ranks of each group as sorted disjoint non-adjacent ranges."""
    gather_group: Tensor
    """Group number, int64 ``[parts]``."""
    rank: Tensor
    rows: Tensor
    """Rows (per key/value head) that the rank sends to the group."""
    pairs: Tensor
    """Pairs of its queries with rows of other members, per query head of a key/value head."""

    @property
    def num_members(self) -> Tensor:
        """Members of every gather group, int64 ``[gather_groups]``."""
        return torch.bincount(self.gather_group, minlength=len(self.gather_groups))

    @property
    def most(self) -> Tensor:
        """Rows that every member of a gather group sends: those of the member with most, int64 ``[gather_groups]``."""
        most = torch.zeros(len(self.gather_groups), dtype=torch.int64)
        return most.scatter_reduce_(0, self.gather_group, self.rows, "amax")


@functools.lru_cache(maxsize=2)
def gather_group_parts(call: ShardedCall, shards: Shards) -> GatherGroupParts:
    """The parts of all ranks in all groups."""
    size = len(shards)
    gather_group_of: dict[tuple[Run, ...], int] = {}
    names, parts = [], []
    for sharing in shared_segments(call, shards):
        bounds = zip(sharing.first_run.tolist(), sharing.stop_run.tolist(), strict=True)
        gather_groups = [gather_group_of.setdefault(shards.rank_ranges(*runs), len(gather_group_of)) for runs in bounds]
        names.append(
            torch.tensor(gather_groups, dtype=torch.int64)[sharing.segment] * size + shards.owner_of(sharing.run)
        )
        seen = _rows_of_others(sharing, shards, is_causal=call.is_causal)
        parts.append(torch.stack([sharing.rows.sum(1), (sharing.rows * seen).sum(1)], 1))
    members, index = torch.cat([torch.zeros(0, dtype=torch.int64), *names]).unique(return_inverse=True)
    none = torch.zeros(0, 2, dtype=torch.int64)
    sums = torch.zeros(len(members), 2, dtype=torch.int64).index_add_(0, index, torch.cat([none, *parts]))
    return GatherGroupParts(tuple(gather_group_of), members // size, members % size, *sums.unbind(1))


def _rows_of_others(sharing: Sharing, shards: Shards, *, is_causal: bool) -> Tensor:
    """Rows of other ranks in its segment that the queries of every entry attend to, per head."""
    before = sharing.rows.cumsum(0) - sharing.rows
    of_segment = before[sharing.first_entry]
    if is_causal:
        seen = before - of_segment[sharing.segment]
    else:
        totals = torch.zeros_like(of_segment).index_add_(0, sharing.segment, sharing.rows)
        seen = totals[sharing.segment] - sharing.rows
    if shards.layout == "zigzag":
        # Rows of the same rank's other run are local: of the earlier run, and without a causal mask of both.
        other = 2 * len(shards) - 2 - sharing.run
        is_there = (other >= sharing.first_run[sharing.segment]) & (other < sharing.stop_run[sharing.segment])
        is_there &= (other < sharing.run) if is_causal else (other != sharing.run)
        entry = (sharing.first_entry - sharing.first_run)[sharing.segment] + other
        seen[is_there] -= sharing.rows[entry[is_there]]
    return seen


def _gather_links(parts: GatherGroupParts, size: int, row_bytes: int) -> Iterator[Links]:
    """Rows that members of groups send to each other, some ranks at a time."""
    num_members, most = parts.num_members, parts.most
    is_passed = is_passed_on(num_members, most * row_bytes)
    # Direct: to the ranges of the gather group's ranks.
    at_once = (~is_passed[parts.gather_group]).nonzero().squeeze(1)
    ranges = [(*some, (0, 0))[:2] for some in parts.gather_groups]
    start, stop = torch.tensor(ranges, dtype=torch.int64).view(-1, 2, 2).unbind(2)
    of = parts.gather_group[at_once]
    found = [
        _Differences(parts.rank[at_once], start[of, index], stop[of, index], most[of]).that_count() for index in (0, 1)
    ]
    # Forwarded: to single ranks of the gather group. Parts are sorted by gather group, then by rank.
    first = num_members.cumsum(0) - num_members
    for count in num_members[is_passed].unique().tolist():
        alike = (is_passed & (num_members == count))[parts.gather_group].nonzero().squeeze(1)
        of = parts.gather_group[alike]
        offset = alike - first[of]
        for (hop,) in gather_rounds(count, 1):
            target = parts.rank[first[of] + (offset - hop.distance) % count]
            found.append(_Differences(parts.rank[alike], target, target + 1, most[of] * hop.num_tensors).that_count())
    together = _Differences(*map(torch.cat, zip(*found, strict=True)))
    together = _Differences(*(column[together.rank.argsort(stable=True)] for column in together))
    for begin, end in _at_once(size, together.rank, torch.ones_like(together.rank)):
        low, high = torch.searchsorted(together.rank, torch.tensor([begin, end])).tolist()
        yield _links(range(begin, end), _Differences(*(column[low:high] for column in together)), [])


def _distinct(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows of an int64 matrix, and the index of each row among them."""
    # By a hash of every row: comparing whole rows takes a hundred times as long.
    weights = torch.arange(1, rows.shape[1] + 1) * 0x9E3779B97F4A7C1
    numbers, kind = (rows * weights).sum(1).unique(return_inverse=True)
    kinds = rows.new_zeros(len(numbers), rows.shape[1]).index_copy_(0, kind, rows)
    if not torch.equal(kinds[kind], rows):  # hash collision
        kinds, kind = rows.unique(dim=0, return_inverse=True)
    return kinds, kind
