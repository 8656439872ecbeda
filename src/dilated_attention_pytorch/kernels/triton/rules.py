"""The runs that rules (windows, blocks, global tokens) add to a tile: consecutive rows, clipped to a band.

For each span of the table of rules (:mod:`.rule_table`) a tile meets one run of other rows. A band, such as the causal
mask, clips it at the ends. If all rows of the tile meet a large part of it, the other end becomes a separate run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import rule_table

NUM_COLUMNS = tl.constexpr(rule_table.NUM_COLUMNS)
LIST_COLUMNS = tl.constexpr(rule_table.LIST_COLUMNS)
FAR = tl.constexpr(0x7FFFFFFF)


@triton.jit
def load_list(LISTS, rule, kv_head, num_kv_heads):
    """First span of a rule and head, one past the last, smallest and largest ``t - p`` of a pair."""
    line = LISTS + (rule * num_kv_heads + kv_head) * LIST_COLUMNS
    return tl.load(line), tl.load(line) + tl.load(line + 1), tl.load(line + 2), tl.load(line + 3)


@triton.jit
def first_span(SPANS, row, first, stop, steps):
    """Binary search: first span whose running maximum end exceeds ``row``."""
    low, high = first, stop
    for _ in range(steps):
        middle = (low + high) // 2
        is_behind = tl.load(SPANS + middle.to(tl.int64) * NUM_COLUMNS + 4, mask=middle < stop, other=FAR) > row
        low = tl.where(is_behind, low, tl.minimum(middle + 1, high))
        high = tl.where(is_behind, middle, high)
    return low


@triton.jit
def load_span(SPANS, span, stop):
    """First own row and one past the last, first other row and one past the last; past the list, a row never met."""
    line = SPANS + span.to(tl.int64) * NUM_COLUMNS
    is_span = span < stop
    return (
        tl.load(line, mask=is_span, other=FAR),
        tl.load(line + 1, mask=is_span, other=FAR),
        tl.load(line + 2, mask=is_span, other=0),
        tl.load(line + 3, mask=is_span, other=0),
    )


@triton.jit
def within_band(earliest, latest, first, stop, nearest, farthest):
    """Union and intersection of the ranges in ``[first, stop)`` that the own rows see.

    Own rows lie from ``earliest`` to ``latest`` and see rows at distances from ``nearest`` to ``farthest``.
    Differences are taken first: a position plus an unbounded distance would overflow 32 bits.
    """
    some_first = earliest + tl.maximum(nearest, first - earliest)
    all_first = latest + tl.maximum(nearest, first - latest)
    some_stop = latest + tl.minimum(farthest, stop - 1 - latest) + 1
    all_stop = earliest + tl.minimum(farthest, stop - 1 - earliest) + 1
    return some_first, some_stop, all_first, all_stop


@triton.jit
def cut_of(some_first, some_stop, all_first, all_stop, width, is_mixed, OF_QUERIES: tl.constexpr):
    """Boundary of the runs ``[some_first, cut)`` and ``[cut, some_stop)``, EDGE of the second, EXTRA of the first.

    Among keys, those that all own rows see begin the second run; among queries, those that all see end the first. If
    there are no more of them than ``width``, the shift of a band from the first own row to the last, they are not
    worth a separate run.
    """
    is_worth_a_run = all_stop - all_first > width
    zero = width * 0
    if OF_QUERIES:
        cut = tl.where(is_worth_a_run & (is_mixed == 0), all_stop, some_stop)
        count = cut - some_first
        extra = tl.where(is_mixed | (all_stop < cut), count, tl.minimum(all_first - some_first, count))
        return cut, zero, extra
    cut = tl.where(is_worth_a_run, all_first, some_first)
    return cut, tl.where(all_first <= cut, tl.maximum(all_stop - cut, 0), zero), zero
