"""How many rows every rank sends to every other, and how many pairs each computes: counted for all of them at once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns import DilationGroup, Range
from dilated_attention_pytorch.patterns import num_pairs as pairs_of_spans

from .exchange import heads_alike, ranks_that_see, seen_rows
from .shards import Run, Segment, ShardedCall, SortedRuns, document_at, segments_beyond, teams_of_segments


@functools.lru_cache(maxsize=64)
def sent_rows(call: ShardedCall, shards: tuple[tuple[Run, ...], ...]) -> Tensor:
    """Rows of one key/value head each that rank s sends to rank t under :func:`exchange`, int64 ``[ranks, ranks]``."""
    sent = _sent_because_of_groups(call, shards)
    for source, target in _may_send_because_of_rules(call, shards):
        sent[source, target] += sum(seen_rows(call, keys, shards[target]) for keys in shards[source])
    return sent


@functools.lru_cache(maxsize=64)
def distances(call: ShardedCall, shards: tuple[tuple[Run, ...], ...]) -> tuple[int, ...]:
    """How many places further a rank may be, around all ranks, that another sends rows to; ascending."""
    size = len(shards)
    sent = _sent_because_of_groups(call, shards).nonzero()
    found = set(((sent[:, 1] - sent[:, 0]) % size).tolist())
    found |= {(target - source) % size for source, target in _may_send_because_of_rules(call, shards)}
    return tuple(sorted(found))


def _may_send_because_of_rules(call: ShardedCall, shards: tuple[tuple[Run, ...], ...]) -> set[tuple[int, int]]:
    """Pairs of ranks of which the first has rows that rules may show to the second's queries."""
    if not call.pattern.rules:
        return set()
    runs = SortedRuns(shards)
    found = {(rank, other) for run, rank in runs for other in ranks_that_see(call, runs, run)}
    return {(source, target) for source, target in found if source != target}


def _sent_because_of_groups(call: ShardedCall, shards: tuple[tuple[Run, ...], ...]) -> Tensor:
    sent = torch.zeros(len(shards), len(shards), dtype=torch.int64)
    runs = SortedRuns(shards)
    for segment in {segment for run, _ in runs for segment in segments_beyond(call, run)}:
        ranks, rows = _runs_of(call, runs, segment)
        wanted = rows > 0
        if len(ranks.unique()) < len(ranks):
            # A row goes once to a rank, however many of its runs see it. The latest sees whatever the others do.
            served = wanted.new_zeros(len(shards), call.num_kv_heads)
            for run, rank in reversed(list(enumerate(ranks.tolist()))):
                of_rank = wanted[run].clone()
                wanted[run] &= ~served[rank]
                served[rank] |= of_rank
        is_sent = ranks[:, None] != ranks
        if call.is_causal:
            places = torch.arange(len(ranks))
            is_sent &= places[:, None] < places
        # Floating-point products of these integers are exact, far below 2^53, and fast.
        between = (rows.double() @ wanted.double().T).to(torch.int64) * is_sent
        sent.index_put_((ranks[:, None], ranks), between, accumulate=True)
    return sent


@functools.lru_cache(maxsize=64)
def num_pairs(call: ShardedCall, shards: tuple[tuple[Run, ...], ...]) -> tuple[int, ...]:
    """Pairs of a query and a key that every rank computes, for one query head per key/value head."""
    num_rows = max((stop for runs in shards for _, stop in runs), default=0)
    found = [
        (*part, min(end, num_rows), rank)
        for rank, runs in enumerate(shards) for run in runs for *part, end in _by_document(call, run)
    ]  # fmt: skip
    first, stop, begin, end, ranks = torch.tensor(found, dtype=torch.int64).view(-1, 5).T
    total = torch.zeros(len(shards), dtype=torch.int64)
    for group in call.pattern.groups:
        pairs = _pairs(call, group, *(x[:, None] for x in (first, stop, begin, end)))
        total.index_add_(0, ranks, pairs.sum(1))
    for row, stop_row, start, stop_of_all, rank in found:
        total[rank] += _pairs_of_rules(
            call, (row - start, stop_row - start), (max(start, 0) - start, stop_of_all - start)
        )
    return tuple(total.tolist())


@functools.lru_cache(maxsize=64)
def gathered_rows(call: ShardedCall, shards: tuple[tuple[Run, ...], ...]) -> tuple[tuple[tuple[int, ...], int], ...]:
    """For every team of :func:`teams` its members, and the rows of one head each that every member sends."""
    found, runs = [], SortedRuns(shards)
    for members, segments in sorted(teams_of_segments(call, shards).items()):
        total = torch.zeros(len(shards), dtype=torch.int64)
        for segment in segments:
            ranks, rows = _runs_of(call, runs, segment)
            total.index_add_(0, ranks, rows.sum(1))
        found.append((members, int(total.max())))
    return tuple(found)


class _Runs(NamedTuple):
    """The runs that have a part of one segment, in the order of the sequence."""

    ranks: Tensor
    """The rank that holds each, ``[runs]``."""
    rows: Tensor
    """Selected rows of the segment in each, for every head, ``[runs, heads]``."""


def _runs_of(call: ShardedCall, runs: SortedRuns, segment: Segment) -> _Runs:
    group = call.pattern.groups[segment.group]
    offsets, shifts = _heads(call, group)
    found = [(*run, rank) for run, rank in runs.overlapping(segment.start, segment.stop)]
    first, stop, ranks = torch.tensor(found, dtype=torch.int64).T
    first, stop = first.clamp(min=segment.start)[:, None], stop.clamp(max=segment.stop)[:, None]
    rows = _num_selected(group, segment.origin, offsets, first, stop)
    # The segments of heads with another shift lie elsewhere.
    return _Runs(ranks, rows.masked_fill_(shifts != segment.shift, 0))


def _pairs(call: ShardedCall, group: DilationGroup, first: Tensor, stop: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """Pairs of the queries in rows ``[first, stop)`` of a document under one group, for every head.

    The document has rows ``[max(begin, 0), end)``, and ``begin`` is where its position 0 is.
    """
    assert group.boundaries is None, "segments of one length are counted, and callers refuse others"
    offsets, shifts = _heads(call, group)
    # Segments of the first row and of the last, in rows of the whole sequence.
    (start, after), (last, beyond) = (_bounds(group, row - begin, shifts, begin) for row in (first, stop - 1))

    def rows(of_segment: Tensor, from_row: Tensor, to_row: Tensor) -> Tensor:
        return _num_selected(group, of_segment, offsets, from_row, torch.maximum(from_row, to_row))

    def within(number: Tensor) -> Tensor:
        return number * (number + 1) // 2 if call.is_causal else number * number

    is_one = start == last
    head = rows(start, first, torch.minimum(after, stop))
    tail = rows(last, last, stop).masked_fill_(is_one, 0)
    between = ((last - start) // group.segment_length - 1).clamp_(min=0)
    pairs = within(head) + within(tail) + between * within(rows(start, start, after))
    pairs += head * rows(start, torch.maximum(start, begin).clamp_(min=0), first)
    if not call.is_causal:
        pairs += torch.where(is_one, head, tail) * rows(last, stop, torch.minimum(beyond, end))
    return pairs


def _pairs_of_rules(call: ShardedCall, queries: Range, keys: Range) -> int:
    """Pairs of two ranges of positions of one document under all rules, for every head that they are for."""
    total = 0
    for rule in call.pattern.rules:
        before, after = rule.band(is_causal=call.is_causal)
        first = keys[0] if before is None else max(keys[0], queries[0] - before)
        stop = keys[1] if after is None else min(keys[1], queries[1] + after)
        for heads in heads_alike(call, rule):
            spans = rule.spans(heads[0], call.num_kv_heads, queries, (first, stop))
            total += len(heads) * pairs_of_spans(spans, before, after)
    return total


def _bounds(group: DilationGroup, position: Any, shift: Any, begin: Tensor) -> tuple[Tensor, Tensor]:
    """:meth:`DilationGroup.segment_bounds` of tensors, in rows of the whole sequence."""
    start, stop = group.segment_bounds(position, shift)
    return begin + start, begin + stop


def _num_selected(group: DilationGroup, segment_start: Any, offset: Any, start: Any, stop: Any) -> Tensor:
    """How many rows :meth:`DilationGroup.selected` gives, for tensors."""
    return torch.as_tensor(group.selected(segment_start, offset, start, stop)[1])


def _heads(call: ShardedCall, group: DilationGroup) -> tuple[Tensor, Tensor]:
    """Offset and shift of every key/value head, ``[heads]``."""
    heads = range(call.num_kv_heads)
    return (
        torch.tensor([group.offset(head, call.num_kv_heads) for head in heads]),
        torch.tensor([group.shift(head) for head in heads]),
    )


def _by_document(call: ShardedCall, run: Run) -> Iterator[tuple[int, int, int, int]]:
    """The parts of a run that lie in one document each: first row, stop, and the document's :func:`document_at`."""
    first = run[0]
    while first < run[1]:
        begin, end = document_at(call, first)
        yield first, min(end, run[1]), begin, end
        first = end
