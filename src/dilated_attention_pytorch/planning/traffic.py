"""How many rows every rank sends to every other: for some ranks at a time, in ranges of ranks that are sent alike.

Of a segment a rank sends the same rows to all ranks of which the queries want the same heads. In the order of the
sequence these are ranges of runs, few where a rank holds rows of every head: so a rank's row of the table of all pairs
is a few differences, summed up. The table as a whole is never there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .exchange import ranks_in_sight, seen_rows
from .layout import Run, Shards
from .segments import Sharing, shared_segments
from .shards import ShardedCall

_CELLS = 1 << 20
"""Pairs of ranks, and differences, that are held at once."""


class Links(NamedTuple):
    """Rows of one key/value head each that some ranks send to some others; to all others they send none."""

    sources: range
    targets: range
    rows: Tensor
    """int64 ``[sources, targets]``."""


class Sent(NamedTuple):
    """Rows of one key/value head each that ranks send to each other."""

    given: Tensor
    """What every rank sends to all others, int64 ``[ranks]``."""
    taken: Tensor
    """What every rank is sent by all others, int64 ``[ranks]``."""
    most: int
    """The most that one rank sends to one other."""
    receivers: int
    """To how many ranks the rank sends that sends to most."""

    @classmethod
    def of(cls, links: Iterator[Links], size: int) -> Sent:
        """The sums over all links of ``size`` ranks."""
        given, taken = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
        most = receivers = 0
        for sources, targets, rows in links:
            if rows.numel():
                given[sources.start : sources.stop] += rows.sum(1)
                taken[targets.start : targets.stop] += rows.sum(0)
                most = max(most, int(rows.max()))
                receivers = max(receivers, int(rows.count_nonzero(1).max()))
        return cls(given, taken, most, receivers)


@functools.lru_cache(maxsize=64)
def sent_rows(call: ShardedCall, shards: Shards) -> Sent:
    """Rows that ranks send to each other under :func:`exchange`."""
    return Sent.of(ring_links(call, shards), len(shards))


@functools.lru_cache(maxsize=64)
def gathered_rows(call: ShardedCall, shards: Shards) -> Sent:
    """Rows that ranks send to each other among :func:`teams`: all members of a team as many as the one with most."""
    return Sent.of(_gather_links(call, shards), len(shards))


def ring_links(call: ShardedCall, shards: Shards) -> Iterator[Links]:
    """What every rank sends to every other under :func:`exchange`, some ranks at a time."""
    table = _Sources.joined([
        _Sources.of(sharing, _wanted(sharing, shards).long(), shards) for sharing in shared_segments(call, shards)
    ])  # fmt: skip
    bounds = _at_once(len(shards), table.rank, table.piece_stop - table.piece_first)
    for first, stop in bounds:
        of_rules = _sent_because_of_rules(call, shards, range(first, stop)) if call.pattern.rules else []
        yield _links(range(first, stop), table.differences(call, len(shards), first, stop), of_rules)


def ring_pairs(call: ShardedCall, shards: Shards) -> Iterator[Links]:
    """Pairs of a query of the column's rank and a key of the row's under the dilation groups, as :func:`ring_links`."""
    table = _Sources.joined([_Sources.of(sharing, sharing.rows, shards) for sharing in shared_segments(call, shards)])
    for first, stop in _at_once(len(shards), table.rank, table.piece_stop - table.piece_first):
        yield _links(range(first, stop), table.differences(call, len(shards), first, stop), [])


class _Sources(NamedTuple):
    """The runs that send rows of segments, and the ranges of runs for which each row counts alike, head by head."""

    rank: Tensor
    run: Tensor
    value: Tensor
    """Where the values of a source begin: for every kind of ranges what it is that the source counts with them."""
    piece_first: Tensor
    """The first range of the source's segment, of the ones below."""
    piece_stop: Tensor
    """One past the last."""
    first_run: Tensor
    """The first run of every range."""
    stop_run: Tensor
    kind: Tensor
    """How the runs of a range count every head."""
    values: Tensor

    @classmethod
    def of(cls, sharing: Sharing, counts: Tensor, shards: Shards) -> _Sources:
        """Those of the segments of one group and shift.

        ``counts`` says of every entry how often a row of a segment counts for it, by head, int64 ``[entries, heads]``:
        once where it is sent, as often as there are queries that see it where pairs are counted.
        """
        run, segment, rows = sharing.run, sharing.segment, sharing.rows
        rows_kinds, rows_kind = _distinct(rows)
        counts_kinds, counts_kind = _distinct(counts)
        is_first = torch.ones(len(run), dtype=torch.bool)
        is_first[1:] = (segment[1:] != segment[:-1]) | (counts_kind[1:] != counts_kind[:-1])
        first = is_first.nonzero().squeeze(1)
        stop = torch.cat([first[1:], torch.tensor([len(run)])])[: len(first)]
        is_any = counts_kinds.any(1)[counts_kind[first]]
        first, stop = first[is_any], stop[is_any]
        sends = rows_kinds.any(1)[rows_kind].nonzero().squeeze(1)
        pieces_of = segment[first]
        of_run = run[sends]
        return cls(
            shards.owner_of(of_run), of_run,
            rows_kind[sends] * len(counts_kinds),
            torch.searchsorted(pieces_of, segment[sends]), torch.searchsorted(pieces_of, segment[sends], right=True),
            run[first], run[stop - 1] + 1, counts_kind[first], (rows_kinds @ counts_kinds.T).flatten(),
        )  # fmt: skip

    @classmethod
    def joined(cls, tables: list[_Sources]) -> _Sources:
        """All tables as one, by rank."""
        values = pieces = 0
        moved = []
        for table in tables:
            value, first, stop = table.value + values, table.piece_first + pieces, table.piece_stop + pieces
            moved.append(table._replace(value=value, piece_first=first, piece_stop=stop))
            values, pieces = values + len(table.values), pieces + len(table.kind)
        none = torch.zeros(0, dtype=torch.int64)
        columns = [torch.cat(column) for column in zip(*moved, strict=True)] if moved else [none] * len(cls._fields)
        order = columns[0].argsort(stable=True)
        return cls(*(column[order] for column in columns[:5]), *columns[5:])

    def differences(self, call: ShardedCall, size: int, first: int, stop: int) -> _Differences:
        """What the ranks ``first`` to ``stop`` send to ranges of ranks."""
        low, high = torch.searchsorted(self.rank, torch.tensor([first, stop])).tolist()
        counts = (self.piece_stop - self.piece_first)[low:high]
        source = torch.arange(low, high).repeat_interleave(counts)
        piece = torch.arange(len(source)) - (counts.cumsum(0) - counts - self.piece_first[low:high]).repeat_interleave(
            counts
        )
        first_run, stop_run = self.first_run[piece], self.stop_run[piece]
        if call.is_causal:
            first_run = torch.maximum(first_run, self.run[source] + 1)
        value, rank = self.values[self.value[source] + self.kind[piece]], self.rank[source]
        of_first_half = _Differences(rank, first_run, stop_run.clamp(max=size), value).that_count()
        if not (stop_run > size).any():
            return of_first_half
        # Runs of the second half belong to ranks in descending order.
        descending = (2 * size - 1 - stop_run, 2 * size - 1 - first_run.clamp(min=size))
        of_second_half = _Differences(rank, *descending, value).that_count()
        return _Differences(*map(torch.cat, zip(of_first_half, of_second_half, strict=True)))


class _Differences(NamedTuple):
    """Ranks that send ``value`` rows to each of the ranks ``start`` to ``stop``; int64 each, of one length."""

    rank: Tensor
    start: Tensor
    stop: Tensor
    value: Tensor

    def that_count(self) -> _Differences:
        """Those that are not empty."""
        counts = (self.start < self.stop) & (self.value != 0)
        return _Differences(*(column[counts] for column in self))


def _links(sources: range, differences: _Differences, others: list[tuple[int, int, int]]) -> Links:
    """The sums of differences, and of rows from rank to rank besides."""
    rank, start, stop, value = differences
    bounds = [(int(start.min()), int(stop.max()))] if len(start) else []
    bounds += [(target, target + 1) for _, target, _ in others]
    low, high = (min(bound[0] for bound in bounds), max(bound[1] for bound in bounds)) if bounds else (0, 0)
    width = high - low + 1
    sums = torch.zeros(len(sources) * width, dtype=torch.int64)
    place = (rank - sources.start) * width - low
    sums.index_add_(0, place + start, value).index_add_(0, place + stop, -value)
    rows = sums.view(len(sources), width).cumsum(1)[:, :-1]
    for source, target, number in others:
        rows[source - sources.start, target - low] += number
    own = torch.tensor([one for one in sources if low <= one < high], dtype=torch.int64)
    rows[own - sources.start, own - low] = 0
    return Links(sources, range(low, high), rows)


def _at_once(size: int, rank: Tensor, counts: Tensor) -> Iterator[Run]:
    """Ranges of ranks that are looked at together; ``counts`` are the differences of a source of each ``rank``."""
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
    """From, to and how many rows some ranks send because of rules."""
    found = []
    for source in ranks:
        for keys in shards[source]:
            for target in ranks_in_sight(call, shards, keys, of_queries=False) - {source}:
                number = seen_rows(call, keys, shards[target])
                if number:
                    found.append((source, target, number))
    return found


def _wanted(sharing: Sharing, shards: Shards) -> Tensor:
    """Which heads of a segment a run is sent, bool ``[entries, heads]``.

    A row goes once to a rank, however many of its runs see it: the later of two sees whatever the earlier does.
    """
    wanted, size = sharing.rows > 0, len(shards)
    if shards.layout == "contiguous":
        return wanted
    later = 2 * size - 2 - sharing.run
    has_later = (sharing.run < size - 1) & (later < sharing.stop_run[sharing.segment])
    entry = (sharing.first_entry - sharing.first_run)[sharing.segment] + later
    wanted[has_later] &= ~wanted[entry[has_later]]
    return wanted


def _gather_links(call: ShardedCall, shards: Shards) -> Iterator[Links]:
    """What the members of teams send to each other, some ranks at a time."""
    size = len(shards)
    team_of: dict[tuple[Run, ...], int] = {}
    names, rows = [], []
    for sharing in shared_segments(call, shards):
        bounds = zip(sharing.first_run.tolist(), sharing.stop_run.tolist(), strict=True)
        teams = [team_of.setdefault(shards.rank_ranges(*runs), len(team_of)) for runs in bounds]
        names.append(torch.tensor(teams, dtype=torch.int64)[sharing.segment] * size + shards.owner_of(sharing.run))
        rows.append(sharing.rows.sum(1))
    members, index = torch.cat([torch.zeros(0, dtype=torch.int64), *names]).unique(return_inverse=True)
    held = torch.zeros(len(members), dtype=torch.int64).index_add_(0, index, torch.cat([index[:0], *rows]))
    team, rank = members // size, members % size
    most = torch.zeros(len(team_of), dtype=torch.int64).scatter_reduce_(0, team, held, "amax")
    ranges = [(*some, (0, 0))[:2] for some in team_of]
    start, stop = torch.tensor(ranges, dtype=torch.int64).view(-1, 2, 2).unbind(2)
    order = rank.argsort(stable=True)
    team, rank = team[order], rank[order]
    for first, last in _at_once(size, rank, torch.full_like(rank, 2)):
        low, high = torch.searchsorted(rank, torch.tensor([first, last])).tolist()
        of = team[low:high]
        sent = _Differences(
            rank[low:high].repeat(2), start[of].T.flatten(), stop[of].T.flatten(), most[of].repeat(2)
        )  # fmt: skip
        yield _links(range(first, last), sent.that_count(), [])


def _distinct(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows of an int64 matrix, and which of them each row is."""
    # By a number for every row: comparing whole rows takes a hundred times as long.
    weights = torch.arange(1, rows.shape[1] + 1) * 0x9E3779B97F4A7C1
    numbers, kind = (rows * weights).sum(1).unique(return_inverse=True)
    kinds = rows.new_zeros(len(numbers), rows.shape[1]).index_copy_(0, kind, rows)
    if not torch.equal(kinds[kind], rows):  # two rows with one number
        kinds, kind = rows.unique(dim=0, return_inverse=True)
    return kinds, kind
