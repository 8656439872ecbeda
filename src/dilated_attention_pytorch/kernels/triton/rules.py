"""The runs that rules (windows, blocks, global tokens) add to a tile: rows side by side, cut to what a band leaves.

Of a span of the table of rules (:mod:`.rule_table`) a tile meets one run of other rows. A band, the causal mask among
them, cuts it at the ends. Where much of it is met by all rows of the tile, the other end is a run of its own.
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
    """First span of a rule and head, one past the last, the least and the largest ``t - p`` of a pair."""
    line = LISTS + (rule * num_kv_heads + kv_head) * LIST_COLUMNS
    return tl.load(line), tl.load(line) + tl.load(line + 1), tl.load(line + 2), tl.load(line + 3)


@triton.jit
def first_span(SPANS, row, first, stop, steps):
    """The first span of a list that ends behind an own row, or is before one that does."""
    low, high = first, stop
    for _ in range(steps):
        middle = (low + high) // 2
        is_behind = tl.load(SPANS + middle.to(tl.int64) * NUM_COLUMNS + 4, mask=middle < stop, other=FAR) > row
        low = tl.where(is_behind, low, tl.minimum(middle + 1, high))
        high = tl.where(is_behind, middle, high)
    return low


@triton.jit
def load_span(SPANS, span, stop):
    """First own row and one past the last, first other row and one past the last; behind the list a row never met."""
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
    """Of the others in ``[first, stop)`` those that some own row meets, and those that all do: two ranges.

    Own rows lie at ``earliest`` to ``latest`` and meet what is ``nearest`` to ``farthest`` from them. The differences
    are taken first: a position and an unbounded distance do not add up in 32 bits.
    """
    some_first = earliest + tl.maximum(nearest, first - earliest)
    all_first = latest + tl.maximum(nearest, first - latest)
    some_stop = latest + tl.minimum(farthest, stop - 1 - latest) + 1
    all_stop = earliest + tl.minimum(farthest, stop - 1 - earliest) + 1
    return some_first, some_stop, all_first, all_stop


@triton.jit
def cut_of(some_first, some_stop, all_first, all_stop, width, is_mixed, OF_QUERIES: tl.constexpr):
    """Where the runs ``[some_first, cut)`` and ``[cut, some_stop)`` meet; EDGE of the second and EXTRA of the first.

    Of keys, what all own rows see begins the second run; of queries, it ends the first. Where that is less than
    ``width``, what a band shifts between the first own row and the last, it is not worth a run.
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
