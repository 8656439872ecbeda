"""Device-side arithmetic of :class:`~.patterns.dilated.DilationGroup`.

Positions are int32 scalars or blocks. A group's interval around a position is its segment there, clipped to the
document: the intervals of one group partition the rows. A test compares each function with its namesake in Python.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

# Columns of the table of groups, which has one line per group and key/value head.
LENGTH = tl.constexpr(0)
RATE = tl.constexpr(1)
OFFSET = tl.constexpr(2)
SHIFT = tl.constexpr(3)
IS_ZERO_PADDED = tl.constexpr(4)
NUM_COLUMNS = tl.constexpr(5)


class Groups(NamedTuple):
    """The groups of one key/value head, in a table of all heads."""

    TABLE: tl.tensor
    number: tl.tensor
    kv_head: tl.tensor
    num_kv_heads: tl.tensor


class Documents(NamedTuple):
    """The documents that are packed into the rows; without any, one that ends at ``last_position``."""

    CU_SEQLENS: tl.tensor
    number: tl.tensor
    search_steps: tl.tensor
    last_position: tl.tensor


@triton.jit
def first_position(offset, most):
    """``offset``; if it is a pointer, the integer there, clamped between 0 and ``most``."""
    if offset.dtype.is_ptr():
        position = tl.minimum(tl.maximum(tl.load(offset), 0), most).to(tl.int32)
    else:
        position = offset
    return position


@triton.jit
def load_group(groups, group):
    """Segment length, rate, offset and shift of a group."""
    line = groups.TABLE + (group * groups.num_kv_heads + groups.kv_head) * NUM_COLUMNS
    return tl.load(line + LENGTH), tl.load(line + RATE), tl.load(line + OFFSET), tl.load(line + SHIFT)


@triton.jit
def document_of(position, documents, PACKED: tl.constexpr):
    """Index, first position, and one past the last, of the document that contains each position.

    ``PACKED`` is an argument of its own: a constant in a tuple made by a kernel is none in the functions it calls.
    """
    begin = position * 0
    end = begin + documents.last_position
    low = begin
    if PACKED:
        high = begin + documents.number
        for _ in range(documents.search_steps):  # cu_seqlens[low] <= position < cu_seqlens[high]
            middle = (low + high) // 2
            is_later = tl.load(documents.CU_SEQLENS + middle) <= position
            low = tl.where(is_later, middle, low)
            high = tl.where(is_later, high, middle)
        begin = tl.load(documents.CU_SEQLENS + low)
        end = tl.load(documents.CU_SEQLENS + low + 1)
    return low, begin, end


@triton.jit
def document_bounds(position, documents, PACKED: tl.constexpr):
    """First position, and one past the last, of the document that contains each position."""
    _, begin, end = document_of(position, documents, PACKED)
    return begin, end


@triton.jit
def segment_start(position, begin, length, shift):
    """First position of the segment that holds ``position``, in a document that begins at ``begin``."""
    return position - (position - begin + shift) % length


@triton.jit
def interval_of(position, begin, end, length, shift):
    """Start of the segment, and the interval of the document's rows in it."""
    start = segment_start(position, begin, length, shift)
    return start, tl.maximum(start, begin), tl.minimum(start + length, end)


@triton.jit
def is_selected(position, start, rate, offset):
    """Whether a group selects the position, in the segment that begins at ``start``."""
    return (position - start) % rate == offset


@triton.jit
def selected(start, rate, offset, low, high):
    """The selected rows of a segment within ``[low, high)``: the first of them, and how many."""
    first = low + (rate + offset - (low - start) % rate) % rate
    return first, tl.maximum(0, (high - first + rate - 1)) // rate


@triton.jit
def count_up_to(position, first, rate, count):
    """How many of ``count`` rows that begin at ``first`` lie at or before ``position``."""
    return tl.where(position < first, 0, tl.minimum(count, tl.maximum(position - first, 0) // rate + 1))


@triton.jit
def num_zero_pad_keys(groups, group, document_length, num_selected):
    """Number of zero-padding keys for a class of ``num_selected`` rows under ``tail="zero_padded"``; 0 otherwise."""
    length, rate, _, _ = load_group(groups, group)
    is_padded = tl.load(groups.TABLE + (group * groups.num_kv_heads + groups.kv_head) * NUM_COLUMNS + IS_ZERO_PADDED)
    filled = (tl.minimum(length, document_length) + rate - 1) // rate
    return is_padded * tl.maximum(0, filled - num_selected)
