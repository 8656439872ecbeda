"""The runs of every tile: which rows at a constant distance its own rows see, or are seen by.

A run is what one group contributes to a tile in one interval. The kernels that compute know nothing of patterns: they
walk over runs. A run is a line of int32 in ``RUNS``, columns as named below, then one bit for every row of the tile:
whether it takes part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .segments import count_up_to, document_bounds, interval_of, is_selected, load_group, num_phantoms, selected
from .tiles import SIZES, rows_of

FAR = tl.constexpr(0x7FFFFFFF)

FIRST = tl.constexpr(0)  # the position of the first row
RATE = tl.constexpr(1)  # the distance of a row from the next
COUNT = tl.constexpr(2)  # how many rows; of keys under a causal mask, those that some query of the tile sees
# Of keys: how many are seen by every query of the run. Of queries: how many come before every key of the tile.
EDGE = tl.constexpr(3)
# Of keys: how many phantom keys come with them. Of queries: from which on every row of the tile is a key seen by them.
EXTRA = tl.constexpr(4)
BITS = tl.constexpr(5)


@triton.jit(do_not_specialize=SIZES)
def runs_kernel(
    RUNS, NUM_RUNS, ORDER, GROUPS, CU_SEQLENS, num_rows, offset, num_others, others_offset, last_position, num_groups,
    num_kv_heads, num_documents, search_steps, tiles_per_window, capacity,
    TILE_ROWS: tl.constexpr, SLOTS: tl.constexpr, WINDOW: tl.constexpr, ORDERED: tl.constexpr, CAUSAL: tl.constexpr,
    PACKED: tl.constexpr, PHANTOMS: tl.constexpr, OF_QUERIES: tl.constexpr,
):  # fmt: skip
    """``RUNS[kv_head, tile, capacity, :]`` and ``NUM_RUNS[kv_head, tile]`` of tiles of ``num_rows`` rows.

    Tiles hold queries and runs keys, or, with ``OF_QUERIES``, the other way round.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    slot = tl.arange(0, SLOTS)
    row = rows_of(
        ORDER, kv_head, tile // tiles_per_window, tile % tiles_per_window, num_rows, slot, TILE_ROWS, WINDOW, ORDERED
    )
    is_row = row >= 0
    position = tl.maximum(row, 0) + offset
    begin, end = document_bounds(position, CU_SEQLENS, num_documents, search_steps, last_position, PACKED)
    line = RUNS + (kv_head * tl.num_programs(0) + tile).to(tl.int64) * capacity * (BITS + SLOTS // 32)
    num_runs = tile * 0
    for group in range(num_groups):
        length, rate, group_offset, shift = load_group(GROUPS, group, kv_head, num_kv_heads)
        start, low, high = interval_of(position, begin, end, length, shift)
        # Wrong boundaries may leave rows outside of every document: they see nothing.
        is_inside = is_row & (position >= begin) & (position < end)
        takes_part = is_inside & is_selected(position, start, rate, group_offset)
        cursor = tl.min(tl.where(takes_part, low, FAR))
        last = tl.max(tl.where(takes_part, high, -1))
        while cursor < last:
            its_begin, its_end = document_bounds(cursor, CU_SEQLENS, num_documents, search_steps, last_position, PACKED)
            its_start, _, its_stop = interval_of(cursor, its_begin, its_end, length, shift)
            is_active = takes_part & (low == cursor)
            earliest = tl.min(tl.where(is_active, position, FAR))
            latest = tl.max(tl.where(is_active, position, -1))
            first, count = selected(
                its_start, rate, group_offset, tl.maximum(cursor, others_offset),
                tl.minimum(its_stop, others_offset + num_others),
            )  # fmt: skip
            if OF_QUERIES:
                is_mixed = tl.min(is_active.to(tl.int32)) == 0
                edge, extra = count * 0, tl.where(is_mixed, count, 0)
                if CAUSAL:
                    edge = count_up_to(earliest - 1, first, rate, count)
                    extra = tl.where(is_mixed, count, count_up_to(latest - 1, first, rate, count))
            else:
                edge, extra = count, count * 0
                if PHANTOMS:
                    extra = num_phantoms(GROUPS, group, kv_head, num_kv_heads, its_end - its_begin, count)
                if CAUSAL:
                    edge = count_up_to(earliest, first, rate, count)
                    count = count_up_to(latest, first, rate, count)
            if (latest >= 0) & (count + extra > edge * OF_QUERIES):
                tl.store(line + FIRST, first)
                tl.store(line + RATE, rate)
                tl.store(line + COUNT, count)
                tl.store(line + EDGE, edge)
                tl.store(line + EXTRA, extra)
                bits = tl.reshape(is_active.to(tl.int32) << (slot % 32), [SLOTS // 32, 32])
                tl.store(line + BITS + tl.arange(0, SLOTS // 32), tl.sum(bits, 1))
                line += BITS + SLOTS // 32
                num_runs += 1
            cursor = tl.maximum(its_stop, cursor + 1)
    tl.store(NUM_RUNS + kv_head * tl.num_programs(0) + tile, num_runs)


@triton.jit
def load_run(line):
    """The five numbers of a run."""
    return (
        tl.load(line + FIRST),
        tl.load(line + RATE),
        tl.load(line + COUNT),
        tl.load(line + EDGE),
        tl.load(line + EXTRA),
    )


@triton.jit
def is_active_in(line, slot):
    """Whether the row of each slot takes part in the run."""
    return (tl.load(line + BITS + slot // 32) >> (slot % 32)) & 1 != 0
