"""Sharded calls: the rows that a rank holds, and the rows of other ranks that its queries attend to."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.patterns.dilated import DilationGroup
from dilated_attention_pytorch.patterns.rules import NO_END

from .layout import Run, Shards, with_rows


@dataclass(frozen=True, slots=True)
class Block:
    """``count`` rows, ``step`` apart, of ``num_heads`` key/value heads: head ``head + i`` from ``row + i skew`` on."""

    row: int
    count: int
    step: int
    head: int
    num_heads: int
    skew: int


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Queries that all attend to all rows of a key block, for heads starting at the block's ``first_head``."""

    queries: Block
    block: int
    first_head: int


@dataclass(frozen=True, slots=True)
class ShardedCall:
    """The cache key of the traffic: pattern, heads, mask, position of the first row and documents; no tensors."""

    pattern: Pattern
    num_kv_heads: int
    is_causal: bool
    offset: int
    documents: tuple[int, ...] | None
    """Boundaries of packed documents in rows of the whole sequence; None = one document."""


@dataclass(frozen=True, slots=True)
class ShardPart:
    """Rows of a run for one engine call: a part of one document starting at ``position``, or whole documents."""

    rows: tuple[int, int]
    position: int
    boundaries: tuple[int, ...] | None


def shard_parts(call: ShardedCall, runs: tuple[Run, ...]) -> Iterator[ShardPart]:
    """A shard's own runs as engine calls; rows count within the shard."""
    row = 0
    for start, stop in runs:
        if call.documents is None:
            yield ShardPart((row, row + stop - start), start + call.offset, None)
        else:
            inner = [boundary for boundary in call.documents if start < boundary < stop]
            begin = max(boundary for boundary in call.documents if boundary <= start)
            if begin < start:  # the document starts on another rank
                end = inner[0] if inner else stop
                yield ShardPart((row, row + end - start), start - begin, None)
            else:
                end = start
            if end < stop:
                boundaries = (*(boundary - end for boundary in inner if boundary > end), stop - end)
                yield ShardPart((row + end - start, row + stop - start), 0, (0, *boundaries))
        row += stop - start


@dataclass(frozen=True, slots=True)
class GatherGroup:
    """A group of ranks that share segments, with the rows that each sends to all the others."""

    members: tuple[int, ...]
    blocks: tuple[tuple[Block, ...], ...]
    """Key blocks of every member; rows count within its shard."""
    rectangles: tuple[tuple[Rectangle, ...], ...]
    """Per member, the visibility of its blocks to this rank's queries."""


class _Seen(NamedTuple):
    """Rows of one head in a run of keys that are visible to a run of queries."""

    query: int
    num_queries: int
    key: int
    num_keys: int


class _FoldedRanges:
    """Key ranges of one run under one group, folded into blocks, with the location of each head's range."""

    def __init__(self, step: int, wanted: set[tuple[int, int, int]], blocks: list[Block]) -> None:
        """``wanted`` holds (head, first row, number of rows). Appends to ``blocks``."""
        self._step = step
        self._location_of: dict[tuple[int, int, int], tuple[int, int]] = {}
        slots: list[dict[int, tuple[int, int]]] = []  # the k-th range of every head, by head
        for head, key, num_keys in sorted(wanted):
            slot = next((slot for slot in slots if head not in slot), None)
            if slot is None:
                slots.append(slot := {})
            slot[head] = (key, num_keys)
        for slot in slots:
            for block in _blocks(step, slot):
                for index in range(block.num_heads):
                    name = (block.head + index, block.row + index * block.skew, block.count)
                    self._location_of[name] = (len(blocks), index)
                blocks.append(block)

    def rectangles(self, seen: list[_Seen | None]) -> Iterator[Rectangle]:
        """Visibility of the blocks to a run of queries, by head; ranges outside the blocks are skipped."""
        by_block: dict[int, dict[int, tuple[int, int]]] = {}
        first_head = {}
        for head, one in enumerate(seen):
            if one and (head, one.key, one.num_keys) in self._location_of:
                block, first_head[head] = self._location_of[head, one.key, one.num_keys]
                by_block.setdefault(block, {})[head] = (one.query, one.num_queries)
        for number, rows in by_block.items():
            for queries in _blocks(self._step, rows):
                yield Rectangle(queries, number, first_head[queries.head])


def rectangles_between(
    call: ShardedCall, key_runs: tuple[Run, ...], query_runs: tuple[Run, ...]
) -> tuple[tuple[Block, ...], tuple[Rectangle, ...]]:
    """Visibility of one shard's rows to another shard's queries under dilation groups; rows count within the shards.

    Two disjoint runs share at most one segment per dilation group, so all selected queries of
    one attend to all selected keys of the other, or (later keys, with a causal mask) to none: dense rectangles. A run
    that both shards hold is excluded, since its segments are whole and causality splits them.
    """
    blocks: list[Block] = []
    rectangles: list[Rectangle] = []
    for keys, key_row in with_rows(key_runs):
        for group in call.pattern.groups:
            seen = _seen_by_runs(call, group, keys, key_row, query_runs)
            wanted = {(head, one.key, one.num_keys) for heads in seen for head, one in enumerate(heads) if one}
            folded = _FoldedRanges(group.dilation_rate, wanted, blocks)
            for heads in seen:
                rectangles += folded.rectangles(heads)
    return tuple(blocks), tuple(rectangles)


@functools.lru_cache(maxsize=64)
def gather_groups(call: ShardedCall, shards: Shards, rank: int) -> tuple[GatherGroup, ...]:
    """The groups of ranks that share segments with ``rank``, in an order common to all of them.

    Smaller groups come first: groups of one size have few ranks in common, so that they can work in parallel.
    Every member sends its selected rows of the segments that exactly the members of the group overlap.
    """
    segments_of: dict[tuple[int, ...], set[Segment]] = {}
    for run in shards[rank]:
        for segment in segments_beyond(call, run):
            members = tuple(sorted(shards.owners(shards.runs_between(segment.start, segment.stop))))
            if len(members) > 1:
                segments_of.setdefault(members, set()).add(segment)
    found = []
    for members in sorted(segments_of, key=lambda members: (len(members), members)):
        segments = segments_of[members]
        all_blocks, all_rectangles = [], []
        for member in members:
            blocks: list[Block] = []
            rectangles: list[Rectangle] = []
            for keys, key_row in with_rows(shards[member]):
                for number, group in enumerate(call.pattern.groups):
                    inside = {segment for segment in segments if segment.group == number}
                    folded = _FoldedRanges(group.dilation_rate, set(ranges(call, group, keys, key_row, inside)), blocks)
                    if member != rank:
                        for heads in _seen_by_runs(call, group, keys, key_row, shards[rank]):
                            rectangles += folded.rectangles(heads)
            all_blocks.append(tuple(blocks))
            all_rectangles.append(tuple(rectangles))
        found.append(GatherGroup(members, tuple(all_blocks), tuple(all_rectangles)))
    return tuple(found)


class Segment(NamedTuple):
    """A segment of one group clipped to its document, in rows of the whole sequence; ``origin`` is its true start."""

    group: int
    shift: int
    origin: int
    start: int
    stop: int


def segments_beyond(call: ShardedCall, run: Run) -> Iterator[Segment]:
    """The segments of every group and shift that a run holds partly but not entirely."""
    for number, group in enumerate(call.pattern.groups):
        for shift in {group.shift(head) for head in range(call.num_kv_heads)}:
            for row in {run[0], run[1] - 1}:
                begin, end = document_at(call, row)
                start, stop = group.segment_bounds(row - begin, shift)
                clipped = max(start + begin, begin, 0), min(stop + begin, end)
                if clipped[0] < run[0] or clipped[1] > run[1]:
                    yield Segment(number, shift, start + begin, *clipped)


def ranges(
    call: ShardedCall, group: DilationGroup, keys: Run, key_row: int, segments: Collection[Segment]
) -> Iterator[tuple[int, int, int]]:
    """Head, first row within the shard and number of a run's rows, for the given segments."""
    for segment in segments:
        first, last = max(segment.start, keys[0]), min(segment.stop, keys[1])
        for head in range(call.num_kv_heads):
            if first < last and group.shift(head) == segment.shift:
                offset = group.offset(head, call.num_kv_heads)
                key, num_keys = group.selected(segment.origin, offset, first, last)
                if num_keys:
                    yield head, key - keys[0] + key_row, num_keys


def _seen_by_runs(
    call: ShardedCall, group: DilationGroup, keys: Run, key_row: int, query_runs: tuple[Run, ...]
) -> list[list[_Seen | None]]:
    """Per run of queries and head, the visible rows of a run of keys; rows count within the shards."""
    return [
        [
            one and one._replace(query=one.query + query_row, key=one.key + key_row)
            for one in _seen(call, group, keys, queries)
        ]
        for queries, query_row in with_rows(query_runs)
        if queries != keys and not (call.is_causal and keys[0] > queries[0])
    ]


def _seen(call: ShardedCall, group: DilationGroup, keys: Run, queries: Run) -> Iterator[_Seen | None]:
    """Per key/value head, the rows of both runs in their common segment, if there is one."""
    later, earlier = max(keys[0], queries[0]), min(keys[1], queries[1])
    begin, end = document_at(call, earlier - 1)
    for head in range(call.num_kv_heads):
        start, stop = group.segment_bounds(later - begin, group.shift(head))
        start, stop = start + begin, stop + begin
        if start >= earlier or later >= end:
            yield None
            continue
        offset = group.offset(head, call.num_kv_heads)
        key, num_keys = group.selected(start, offset, max(start, begin, keys[0]), min(stop, end, keys[1]))
        query, num_queries = group.selected(start, offset, max(start, begin, queries[0]), min(stop, end, queries[1]))
        found = num_keys and num_queries
        yield _Seen(query - queries[0], num_queries, key - keys[0], num_keys) if found else None


def document_at(call: ShardedCall, row: int) -> tuple[int, int]:
    """Start and end of the document that contains a row; the start is the row of position 0, possibly negative."""
    if call.documents is None:
        return -call.offset, NO_END
    index = bisect.bisect_right(call.documents, row)
    return call.documents[index - 1], call.documents[index]


def _blocks(step: int, rows: dict[int, tuple[int, int]]) -> Iterator[Block]:
    """Heads with first row and number of rows as blocks of consecutive heads at a constant distance."""
    heads = sorted(rows)
    index = 0
    while index < len(heads):
        head = heads[index]
        (row, count), size, skew = rows[head], 1, 0
        while index + size < len(heads) and heads[index + size] == head + size:
            following, as_many = rows[head + size]
            if size == 1:
                skew = following - row
            # Strides of a view cannot be negative.
            if as_many != count or skew < 0 or following != row + size * skew:
                break
            size += 1
        yield Block(row, count, step, head, size, skew if size > 1 else 0)
        index += size
