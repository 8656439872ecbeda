"""Tiles that the Triton kernels compute for a case, and the blocks they iterate over, in numpy: nothing is launched.

A tile holds lines: rows of queries (of all heads that share it) or of keys. It iterates over runs, the selected rows of
one segment of one group, in blocks. The table of groups and the numbers of tiles are the launcher's own; the order of
rows and the loop bounds are reimplemented here, and tests compare them with the kernels and with explicit counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from dilated_attention_pytorch.benchmarks.shapes import Case
from dilated_attention_pytorch.kernels.triton import order, sides
from dilated_attention_pytorch.kernels.triton.configurations import Configuration
from dilated_attention_pytorch.kernels.triton.plan import LaunchPlan, plan_of
from dilated_attention_pytorch.kernels.triton.problem import Problem
from dilated_attention_pytorch.kernels.triton.regions import regions_of
from dilated_attention_pytorch.kernels.triton.table import group_numbers
from dilated_attention_pytorch.patterns.dilated import DilationGroup

Kernel = Literal["forward", "query_gradient", "key_gradient"]
KERNELS: tuple[Kernel, ...] = ("forward", "query_gradient", "key_gradient")
PRODUCTS: dict[Kernel, int] = {"forward": 2, "query_gradient": 3, "key_gradient": 4}
"""Matrix products per query-key pair; both gradients of one pair need at least five."""
Integers = NDArray[np.int64]

_FAR = 1 << 62


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """The tiles of one kernel, one program each, in launch order."""

    kv_head: Integers
    """``[tiles]``."""
    head_block: Integers
    """``[tiles]``: index of the block of query heads within the key/value head; 0 for tiles of keys."""
    rows: Integers
    """``[tiles, slots]``: the rows of a tile, -1 for empty slots."""
    pack: int
    """Query heads that share a tile."""
    window: int
    num_windows: int
    lines_per_head: int
    """Runs per key/value head that the table of runs has space for."""
    is_ordered: bool
    """Whether the kernels use a table with the order of rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Runs that the tiles iterate over, in order: one entry per tile, group and segment that it has a row in."""

    tile: Integers
    kv_head: Integers
    first: Integers
    """First row of the run, which has ``count`` rows at distance ``rate``."""
    rate: Integers
    count: Integers
    """For keys under a causal mask: only keys that some query of the tile sees."""
    edge: Integers
    """For keys: number of keys seen by every query of the run. For queries: number of queries before all its keys."""
    from_block: Integers
    to_block: Integers
    """The tile iterates over the blocks ``[from_block, to_block)`` of the run."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks of one query head, over all tiles."""
        return int((self.to_block - self.from_block).sum())


def plan_of_case(case: Case) -> LaunchPlan:
    """The launcher's plan of a case, from meta tensors."""
    if case.mode == "decode" or case.batch != 1:
        raise NotImplementedError(f"only whole sequences, one at a time, are modelled, got the case {case.name}")

    def empty(heads: int) -> torch.Tensor:
        return torch.empty(1, case.rows, heads, case.head_dim, dtype=case.torch_dtype, device="meta")

    key = empty(case.kv_heads)
    return plan_of(Problem(empty(case.heads), key, key, case.pattern.groups, case.causal, 1.0))


def configurations_of(case: Case, kernel: Kernel) -> tuple[Configuration, ...]:
    """The configurations that are shipped for the kernel and this case."""
    return plan_of_case(case).candidates(kernel)


def tiles_of(case: Case, kernel: Kernel, chosen: Configuration, *, window: int | None = None) -> Tiles:
    """The tiles of a kernel. ``window`` replaces the launcher's window size (a power of two), to try other sizes."""
    kind = plan_of_case(case).kind
    is_query = kernel != "key_gradient"
    pack = kind.packed_heads if is_query else 1
    window = window or _window_of(case, kernel)
    is_alike = len(kind.groups) == 1 and kind.groups[0].dilation_rate == 1
    is_ordered = not is_alike and case.rows > min(_tile_rows_of(case, kernel))
    side = sides.Side(case.rows, 0, window, is_ordered)
    slots = chosen.block_rows // pack
    head_blocks = case.heads // case.kv_heads // pack if is_query else 1
    num_tiles, layout = sides.layout_of(kind, side, slots, head_blocks)
    kv_head, head_block, its_window, tile = _tiles_in_order(
        num_tiles, case.kv_heads, *layout, head_blocks, last_first=is_query and case.causal
    )
    lines = _rows_by_tile(case, window, slots, is_ordered=is_ordered)
    # Spans are padded with windows that do not exist.
    exists = its_window < side.num_windows
    rows = np.full((num_tiles, slots), -1)
    rows[exists] = lines[kv_head[exists], its_window[exists], tile[exists]]
    return Tiles(
        kv_head=kv_head,
        head_block=head_block,
        rows=rows,
        pack=pack,
        window=window,
        num_windows=side.num_windows,
        lines_per_head=regions_of(kind, None, side, slots).lines,
        is_ordered=is_ordered,
    )


def runs_of(case: Case, kernel: Kernel, chosen: Configuration, tiles: Tiles) -> Runs:
    """The runs that every tile iterates over."""
    table = _table_of(case)
    parts = []
    for head in range(case.kv_heads):
        its_tiles = np.flatnonzero(tiles.kv_head == head)
        rows = tiles.rows[its_tiles]
        for group, of_head in enumerate(table):
            length, rate, offset, shift = (int(value) for value in of_head[head][:4])
            within, segment = (rows + shift) % length, (rows + shift) // length
            takes_part = (rows >= 0) & (within % rate == offset)
            first_segment = np.where(takes_part, segment, _FAR).min(1)
            num_segments = np.maximum(0, np.where(takes_part, segment, -1).max(1) - first_segment + 1)
            base = np.cumsum(num_segments) - num_segments
            run_tile = np.repeat(np.arange(len(its_tiles)), num_segments)
            run_segment = first_segment[run_tile] + np.arange(len(run_tile)) - base[run_tile]
            lowest, highest = np.full(len(run_tile), _FAR), np.full(len(run_tile), -1)
            place = (base[:, None] + segment - first_segment[:, None])[takes_part]
            np.minimum.at(lowest, place, rows[takes_part])
            np.maximum.at(highest, place, rows[takes_part])
            start = run_segment * length - shift
            low = np.maximum(start, 0)
            first = low + (offset - (low - start)) % rate
            count = np.maximum(0, -((first - np.minimum(start + length, case.rows)) // rate))
            edge = np.zeros_like(count) if kernel == "key_gradient" else count
            if case.causal and kernel == "key_gradient":
                edge = _count_up_to(lowest - 1, first, rate, count)
            elif case.causal:
                edge, count = (_count_up_to(position, first, rate, count) for position in (lowest, highest))
            fixed = np.full((3, len(run_tile)), [[head], [rate], [group]])
            of_group = np.stack([its_tiles[run_tile], run_segment, first, count, edge])
            parts.append(np.concatenate([of_group, fixed])[:, highest >= 0])
    runs = np.concatenate(parts, 1)
    tile, segment, first, count, edge, kv_head, rate, group = runs
    tile, first, count, edge, kv_head, rate = (
        column[np.lexsort((segment, group, tile))] for column in (tile, first, count, edge, kv_head, rate)
    )
    from_block = edge // chosen.block_run if kernel == "key_gradient" else np.zeros_like(edge)
    return Runs(
        tile=tile,
        kv_head=kv_head,
        first=first,
        rate=rate,
        count=count,
        edge=edge,
        from_block=from_block,
        to_block=-(-count // chosen.block_run),
    )


def executed_pairs(case: Case, kernel: Kernel, chosen: Configuration, num_blocks: int) -> int:
    """Query-key pairs that ``num_blocks`` blocks compute, including those that they mask."""
    heads_of_a_block = case.heads // case.kv_heads if kernel == "key_gradient" else 1
    return num_blocks * chosen.block_rows * chosen.block_run * heads_of_a_block


def classes_of(case: Case) -> Iterator[tuple[DilationGroup, int, int]]:
    """Every group, key/value head, and number of rows that the group selects for it in one of its segments."""
    for group in plan_of_case(case).kind.sorted_groups:
        for head in range(case.kv_heads):
            offset, begin = group.offset(head, case.kv_heads), 0
            while begin < case.rows:
                start, stop = group.segment_bounds(begin, group.shift(head))
                stop = min(stop, case.rows)
                yield group, head, group.selected(start, offset, begin, stop)[1]
                begin = stop


def blocks_of_dense_launches(case: Case, kernel: Kernel, chosen: Configuration) -> int:
    """Blocks of the alternative design: one launch per group, with dense tiles over the selected rows of a segment."""
    pack = 1 if kernel == "key_gradient" else plan_of_case(case).kind.packed_heads
    slots, block, total = chosen.block_rows // pack, chosen.block_run, 0
    for _, _, count in classes_of(case):
        tile_begin = np.arange(0, count, slots)
        walked = np.full_like(tile_begin, _ceil(count, block))
        if case.causal and kernel == "key_gradient":
            walked -= tile_begin // block
        elif case.causal:
            walked = -(-np.minimum(tile_begin + slots, count) // block)
        total += int(walked.sum())
    return total * (1 if kernel == "key_gradient" else case.heads // case.kv_heads // pack)


def _count_up_to(position: Integers, first: Integers, rate: int, count: Integers) -> Integers:
    return np.minimum(count, np.maximum(0, position - first + rate) // rate)


def _tile_rows_of(case: Case, kernel: Kernel) -> tuple[int, ...]:
    """Rows of the tiles that share one order of rows."""
    # Queries and keys have the same rows here: both gradients share the order.
    kernels: tuple[Kernel, ...] = ("forward",) if kernel == "forward" else ("query_gradient", "key_gradient")
    pack = plan_of_case(case).kind.packed_heads
    return tuple(
        chosen.block_rows // (1 if name == "key_gradient" else pack)
        for name in kernels
        for chosen in configurations_of(case, name)
    )


def _window_of(case: Case, kernel: Kernel) -> int:
    most = max(_tile_rows_of(case, kernel))
    shortest = min(plan_of_case(case).kind.segment_lengths)
    window = max(16, most, min(shortest, case.rows))
    return min(1 << (window - 1).bit_length(), sides.LARGEST_WINDOW)


def _table_of(case: Case) -> Integers:
    """``[groups, key/value heads, columns]`` as the kernels read it."""
    numbers = group_numbers(plan_of_case(case).kind.sorted_groups, case.kv_heads, case.rows)
    return np.array(numbers, np.int64)


def order_of_rows(case: Case, window: int) -> Integers:
    """``[key/value heads, windows, window]``: the rows of each window in order, -1 past the last row."""
    table = _table_of(case)
    lengths = plan_of_case(case).kind.segment_lengths
    shortest = lengths.index(min(lengths))
    bits, all_bits = order.MEMBERSHIP_BITS.value, order.ALL_BITS.value
    row = np.arange(_ceil(case.rows, window) * window).reshape(-1, window)
    index = np.arange(window)
    ordered = np.empty((case.kv_heads, *row.shape), np.int64)
    position = np.minimum(row, case.rows - 1)
    for head in range(case.kv_heads):
        length, _, _, shift = table[shortest, head, :4]
        is_boundary = (position == np.maximum(position - (position + shift) % length, 0)) & (index > 0)
        piece = np.cumsum(is_boundary, 1)
        membership = np.zeros_like(row)
        for length, rate, offset, shift in table[:bits, head, :4]:
            takes_part = (position + shift) % length % rate == offset
            membership = membership << 1 | takes_part
        code = (piece << bits | (all_bits - membership)) * window + index
        code = np.where(row < case.rows, code, _FAR)
        places = np.argsort(code, axis=1, kind="stable")
        ordered[head] = np.where(row < case.rows, row[:, :1] + places, -1)
    return ordered


def _rows_by_tile(case: Case, window: int, slots: int, *, is_ordered: bool) -> Integers:
    """``[key/value heads, windows, tiles of a window, slots]``."""
    if is_ordered:
        ordered = order_of_rows(case, window)
    else:
        row = np.arange(_ceil(case.rows, window) * window).reshape(-1, window)
        ordered = np.broadcast_to(np.where(row < case.rows, row, -1), (case.kv_heads, *row.shape))
    missing = _ceil(window, slots) * slots - window
    filled = np.pad(ordered, ((0, 0), (0, 0), (0, missing)), constant_values=-1)
    return filled.reshape(*filled.shape[:2], -1, slots)


def _tiles_in_order(
    num_tiles: int,
    num_kv_heads: int,
    num_spans: int,
    heads_per_span: int,
    windows_per_span: int,
    tiles_per_window: int,
    head_blocks: int,
    *,
    last_first: bool,
) -> tuple[Integers, Integers, Integers, Integers]:
    """Key/value head, block of query heads, window and tile in the window, as ``tile_of`` in the kernels."""
    inner, head_block = np.divmod(np.arange(num_tiles), head_blocks)
    outer, inner = np.divmod(inner, heads_per_span * windows_per_span * tiles_per_window)
    tile, inner = np.divmod(inner, heads_per_span * windows_per_span)
    head_in_span, window = np.divmod(inner, windows_per_span)
    span, heads = np.divmod(outer, num_kv_heads // heads_per_span)
    kv_head = heads * heads_per_span + head_in_span
    window = span * windows_per_span + window
    if last_first:
        window = num_spans * windows_per_span - 1 - window
    return kv_head, head_block, window, tile


def _ceil(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
