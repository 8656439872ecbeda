"""The runs of every tile: rows at a constant distance that the tile's own rows see, or are seen by.

A run is the contribution to a tile of one group in one interval, or of one rule in one of its spans. The computing
kernels know nothing of patterns: they walk over runs. A run is a line of int32 in ``RUNS``: the columns named below,
then one bit per row of the tile (whether it takes part), and if the pattern has a window (``BANDED``), the smallest and
the largest ``t - p`` of a pair. Without a window, the only bound is that of the causal mask, 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .problem import next_power_of_2
from .regions import Regions, first_line
from .rules import FAR, cut_of, first_span, load_list, load_span, within_band
from .segments import (
    Documents,
    Groups,
    count_up_to,
    document_bounds,
    first_position,
    interval_of,
    is_selected,
    load_group,
    num_zero_pad_keys,
    selected,
)
from .tiles import SIZES, TilePlace, rows_of

FIRST = tl.constexpr(0)
RATE = tl.constexpr(1)
COUNT = tl.constexpr(2)
EDGE = tl.constexpr(3)
EXTRA = tl.constexpr(4)
BITS = tl.constexpr(5)


class Run(NamedTuple):
    """The numbers of a run."""

    first: tl.tensor
    """Position of the first row."""
    rate: tl.tensor
    """Distance from a row to the next."""
    count: tl.tensor
    """Number of rows; of keys under a causal mask, those that some query of the tile sees."""
    edge: tl.tensor
    """Of keys: number of those that every query of the run sees. Of queries: of those before every key of the tile."""
    extra: tl.tensor
    """Of keys: number of zero-padding keys to add. Of queries: index from which on they see every key of the tile."""
    low: tl.tensor
    """Smallest ``t - p`` of a pair; never read without a window in the pattern, like ``high``."""
    high: tl.tensor


class Seen(NamedTuple):
    """The keys of a run that each query of a tile sees."""

    is_active: tl.tensor
    """Whether the query takes part in the run."""
    start: tl.tensor
    """Index of the first key in the run, ``FAR`` for a query that sees none."""
    stop: tl.tensor
    """One past the last, 0 for a query that sees none."""


class Tables(NamedTuple):
    """The tables of a pattern's groups and rules, and the boundaries of packed documents."""

    GROUPS: Any
    SPANS: Any
    LISTS: Any
    CU_SEQLENS: Any


class PlanningOptions(NamedTuple):
    """Compile-time constants of the kernel that writes runs."""

    TILE_ROWS: int
    SLOTS: int
    WINDOW: int
    ORDERED: bool
    CAUSAL: bool
    PACKED: bool
    ZERO_PAD_KEYS: bool
    OF_QUERIES: bool
    RULES: bool
    BANDED: bool
    LINE: int


def mask_bits(tile_rows: int) -> int:
    """Number of bits of a run: one per row of a tile, padded to whole words."""
    return max(32, next_power_of_2(tile_rows))


def line_of(tile_rows: int, *, is_banded: bool) -> int:
    """Integers per run: its numbers, the bits for the rows of a tile, the two ends of a band."""
    return BITS.value + mask_bits(tile_rows) // 32 + 2 * is_banded


@triton.jit(do_not_specialize=SIZES)
def runs_kernel(
    TILES,
    TABLES,
    num_rows,
    offset,
    num_others,
    others_offset,
    last_position,
    num_groups,
    num_rules,
    num_kv_heads,
    num_documents,
    search_steps,
    span_steps,
    tiles_per_window,
    per_tile,
    per_document,
    lines_per_head,
    OPTIONS: tl.constexpr,
):
    """``RUNS[kv_head, lines_per_head, :]``, and ``RANGES[kv_head, tile, :]``: a tile's first line, and number of lines.

    Tiles hold queries and runs hold keys, or, with ``OF_QUERIES``, vice versa. ``offset`` is the position of the first
    row that tiles hold, or a pointer to it. ``TILES`` are :class:`.TileRuns`, ``TABLES`` :class:`Tables`, ``OPTIONS``
    :class:`PlanningOptions`.
    """
    offset = first_position(offset, last_position - num_rows)
    index, kv_head = tl.program_id(0), tl.program_id(1)
    tile = TilePlace(0, kv_head, 0, index // tiles_per_window, index % tiles_per_window)
    row = rows_of(TILES.ORDER, tile, num_rows, tl.arange(0, OPTIONS.SLOTS), OPTIONS.TILE_ROWS, OPTIONS)
    is_row = row >= 0
    position = tl.maximum(row, 0) + offset
    documents = Documents(TABLES.CU_SEQLENS, num_documents, search_steps, last_position)
    groups = Groups(TABLES.GROUPS, num_groups, kv_head, num_kv_heads)
    begin, end = document_bounds(position, documents, OPTIONS.PACKED)
    # Invalid boundaries may leave rows outside of every document: they see nothing.
    is_inside = is_row & (position >= begin) & (position < end)
    regions = Regions(per_tile, per_document, lines_per_head)
    ends = first_line(groups, documents, regions, index + tl.arange(0, 2), num_rows, offset, tiles_per_window, OPTIONS)
    first_run = tl.min(ends)
    # At least the number of runs; the bound keeps memory safe from invalid boundaries.
    room = tl.max(ends) - first_run
    table = TILES.RUNS + (kv_head.to(tl.int64) * lines_per_head + first_run) * OPTIONS.LINE
    num_runs = index * 0
    low, high = num_runs - FAR, num_runs + FAR
    if OPTIONS.CAUSAL:
        high = num_runs
    for group in range(num_groups):
        length, rate, group_offset, shift = load_group(groups, group)
        start, its_first, its_last = interval_of(position, begin, end, length, shift)
        takes_part = is_inside & is_selected(position, start, rate, group_offset)
        cursor = tl.min(tl.where(takes_part, its_first, FAR))
        last = tl.max(tl.where(takes_part, its_last, -1))
        while cursor < last:
            its_begin, its_end = document_bounds(cursor, documents, OPTIONS.PACKED)
            its_start, _, its_stop = interval_of(cursor, its_begin, its_end, length, shift)
            is_active = takes_part & (its_first == cursor)
            earliest = tl.min(tl.where(is_active, position, FAR))
            latest = tl.max(tl.where(is_active, position, -1))
            first, count = selected(
                its_start,
                rate,
                group_offset,
                tl.maximum(cursor, others_offset),
                tl.minimum(its_stop, others_offset + num_others),
            )
            if OPTIONS.OF_QUERIES:
                is_mixed = tl.min(is_active.to(tl.int32)) == 0
                edge, extra = count * 0, tl.where(is_mixed, count, 0)
                if OPTIONS.CAUSAL:
                    edge = count_up_to(earliest - 1, first, rate, count)
                    extra = tl.where(is_mixed, count, count_up_to(latest - 1, first, rate, count))
            else:
                edge, extra = count, count * 0
                if OPTIONS.ZERO_PAD_KEYS:
                    extra = num_zero_pad_keys(groups, group, its_end - its_begin, count)
                if OPTIONS.CAUSAL:
                    edge = count_up_to(earliest, first, rate, count)
                    count = count_up_to(latest, first, rate, count)
            if (latest >= 0) & (count + extra > edge * OPTIONS.OF_QUERIES) & (num_runs < room):
                run = Run(first, rate, count, edge, extra, low, high)
                num_runs = _append(table, num_runs, run, is_active, OPTIONS)
            cursor = tl.maximum(its_stop, cursor + 1)
    if OPTIONS.RULES:
        for rule in range(num_rules):
            num_runs = _append_rule(
                table,
                num_runs,
                room,
                TABLES.SPANS,
                span_steps,
                load_list(TABLES.LISTS, rule, kv_head, num_kv_heads),
                documents,
                position,
                is_inside,
                num_others,
                others_offset,
                OPTIONS,
            )
    place = TILES.RANGES + (kv_head * tl.num_programs(0) + index) * 2
    tl.store(place, first_run)
    tl.store(place + 1, num_runs)


@triton.jit
def _append(table, num_runs, run, is_active, OPTIONS: tl.constexpr):
    """Append a run to the tile's ``num_runs``; return the new number."""
    line = table + num_runs * OPTIONS.LINE
    tl.store(line + FIRST, run.first)
    tl.store(line + RATE, run.rate)
    tl.store(line + COUNT, run.count)
    tl.store(line + EDGE, run.edge)
    tl.store(line + EXTRA, run.extra)
    bits = tl.reshape(is_active.to(tl.int32) << (tl.arange(0, OPTIONS.SLOTS) % 32), [OPTIONS.SLOTS // 32, 32])
    tl.store(line + BITS + tl.arange(0, OPTIONS.SLOTS // 32), tl.sum(bits, 1))
    if OPTIONS.BANDED:
        tl.store(line + OPTIONS.LINE - 2, run.low)
        tl.store(line + OPTIONS.LINE - 1, run.high)
    return num_runs + 1


@triton.jit
def _append_rule(
    table,
    num_runs,
    room,
    SPANS,
    span_steps,
    rule,
    documents,
    position,
    is_inside,
    num_others,
    others_offset,
    OPTIONS: tl.constexpr,
):
    """Append the runs of one rule, document by document and span by span; return the tile's new number of runs."""
    list_first, list_stop, low, high = rule
    nearest, farthest = low, high
    if OPTIONS.OF_QUERIES:
        nearest, farthest = -high, -low
    cursor = tl.min(tl.where(is_inside, position, FAR))
    while cursor < FAR:
        # Rules count positions from the beginning of a document.
        begin, end = document_bounds(cursor, documents, OPTIONS.PACKED)
        is_its = is_inside & (position >= begin) & (position < end)
        own = position - begin
        last_row = tl.max(tl.where(is_its, own, -1))
        span = first_span(SPANS, cursor - begin, list_first, list_stop, span_steps)
        start, stop, first_other, stop_other = load_span(SPANS, span, list_stop)
        while start <= last_row:
            is_active = is_its & (own >= start) & (own < stop)
            earliest = tl.min(tl.where(is_active, own, FAR))
            latest = tl.max(tl.where(is_active, own, -1))
            first_other = tl.maximum(first_other, tl.maximum(others_offset - begin, 0))
            stop_other = tl.minimum(stop_other, tl.minimum(others_offset + num_others, end) - begin)
            if latest >= 0:
                some_first, some_stop, all_first, all_stop = within_band(
                    earliest, latest, first_other, stop_other, nearest, farthest
                )
                is_mixed = tl.min(is_active.to(tl.int32)) == 0
                cut, edge, extra = cut_of(
                    some_first, some_stop, all_first, all_stop, latest - earliest, is_mixed, OPTIONS.OF_QUERIES
                )
                if (cut > some_first) & (num_runs < room):
                    run = Run(some_first + begin, 1, cut - some_first, 0, extra, low, high)
                    num_runs = _append(table, num_runs, run, is_active, OPTIONS)
                if (some_stop > cut) & (num_runs < room):
                    extra = (some_stop - cut) * OPTIONS.OF_QUERIES
                    run = Run(cut + begin, 1, some_stop - cut, edge, extra, low, high)
                    num_runs = _append(table, num_runs, run, is_active, OPTIONS)
            span += 1
            start, stop, first_other, stop_other = load_span(SPANS, span, list_stop)
        cursor = tl.min(tl.where(is_inside & (position >= end), position, FAR))
    return num_runs


@triton.jit
def load_run(line, OPTIONS: tl.constexpr):
    """The :class:`Run` in a line."""
    first, rate, count = tl.load(line + FIRST), tl.load(line + RATE), tl.load(line + COUNT)
    edge, extra = tl.load(line + EDGE), tl.load(line + EXTRA)
    low, high = edge, extra
    if OPTIONS.BANDED:
        low, high = tl.load(line + OPTIONS.LINE - 2), tl.load(line + OPTIONS.LINE - 1)
    return Run(first, rate, count, edge, extra, low, high)


@triton.jit
def is_active_in(line, slot):
    """Whether the row of each slot takes part in the run."""
    return (tl.load(line + BITS + slot // 32) >> (slot % 32)) & 1 != 0


@triton.jit
def is_in_band(key_position, query_position, run, OPTIONS: tl.constexpr):
    """Whether the run's mask keeps a pair; without a window in the pattern, this is the causal mask."""
    if OPTIONS.BANDED:
        distance = key_position - query_position
        return (distance >= run.low) & (distance <= run.high)
    return key_position <= query_position


@triton.jit
def keys_seen(run, position, is_active, OPTIONS: tl.constexpr):
    """The keys of a run that :func:`is_in_band` keeps for each query.

    Differences are taken first: a position plus an unbounded distance would overflow 32 bits.
    """
    start, stop = run.count * 0, tl.where(is_active, run.count, 0)
    high = run.high if OPTIONS.BANDED else 0
    if OPTIONS.CAUSAL or OPTIONS.BANDED:
        last = run.first + (run.count - 1) * run.rate
        stop = count_up_to(position + tl.minimum(last - position, high), run.first, run.rate, stop)
    if OPTIONS.BANDED:
        first_seen = position + tl.maximum(run.first - position, run.low)
        start = count_up_to(first_seen - 1, run.first, run.rate, run.count)
    sees_some = start < stop
    return Seen(is_active, tl.where(sees_some, start, FAR), tl.where(sees_some, stop, 0))
