"""The order in which rows share tiles: rows that take part in the same groups are adjacent.

Rows are ordered within windows: by the piece between boundaries of the shortest segments, then by the groups that a row
takes part in, the densest group deciding first, rows that take part before those that do not. A tile is a range of this
order and takes part in a group if any of its rows does, so most tiles are full of rows of one kind, and nothing depends
on rates dividing lengths.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .segments import Documents, Groups, document_bounds, first_position, interval_of, is_selected, load_group
from .tiles import SIZES

MEMBERSHIP_BITS = tl.constexpr(9)
"""Number of groups that the order distinguishes; with more, it ignores the sparsest ones (the result is the same)."""
ALL_BITS = tl.constexpr(2**9 - 1)
NO_ROW = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=SIZES)
def order_kernel(
    ORDER,
    GROUPS,
    CU_SEQLENS,
    num_rows,
    offset,
    num_groups,
    num_kv_heads,
    shortest_group,
    num_documents,
    search_steps,
    last_position,
    WINDOW: tl.constexpr,
    PACKED: tl.constexpr,
):
    """``ORDER[kv_head, window, :]``: the rows of the window in order; entries past the last row are not written.

    ``offset`` is the position of the first row, or a pointer to it.
    """
    offset = first_position(offset, last_position - num_rows)
    window, kv_head = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, WINDOW)
    row = window * WINDOW + index
    position = tl.minimum(row, num_rows - 1) + offset
    documents = Documents(CU_SEQLENS, num_documents, search_steps, last_position)
    groups = Groups(GROUPS, num_groups, kv_head, num_kv_heads)
    begin, end = document_bounds(position, documents, PACKED)
    length, _, _, shift = load_group(groups, shortest_group)
    _, low, _ = interval_of(position, begin, end, length, shift)
    piece = tl.cumsum(((position == low) & (index > 0)).to(tl.int32), 0)
    membership = tl.zeros([WINDOW], tl.int32)
    for group in range(num_groups):
        length, rate, group_offset, shift = load_group(groups, group)
        start, _, _ = interval_of(position, begin, end, length, shift)
        takes_part = is_selected(position, start, rate, group_offset).to(tl.int32)
        membership = membership << 1 | takes_part
    code = (piece << MEMBERSHIP_BITS | (ALL_BITS - membership)) * WINDOW + index
    # If every row is a piece, the code of a window's last row may equal NO_ROW; that row is the last in order as well.
    code = tl.where(row < num_rows, code, NO_ROW)
    ordered = tl.sort(code)
    place = ORDER + (kv_head * tl.num_programs(0) + window).to(tl.int64) * WINDOW + index
    tl.store(place, window * WINDOW + ordered % WINDOW, mask=row < num_rows)
