"""Device memory traffic of a kernel, from a replay of its tiles against a cache model.

The model: an LRU cache of single rows of one head, which are whole sectors of 32
bytes if the head dimension is a multiple of 16. As many programs as fit run concurrently and read one block of a run
per step; when one ends, the next starts, as on the device. The cache is empty at the start.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dilated_attention_pytorch.benchmarks.shapes import Case
from dilated_attention_pytorch.kernels.triton.configurations import Configuration
from dilated_attention_pytorch.kernels.triton.runs import BITS

from .tiling import Integers, Kernel, Runs, Tiles

_SECTOR = 32
_STATISTIC = 4
"""Bytes per row and head of the log-sum-exp, and of delta."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """Traffic of one kernel."""

    bytes_by_capacity: dict[int, int]
    """Bytes read from and written to device memory, by cache capacity in bytes."""
    cache_bytes: int
    """Bytes of runs that programs read from the cache."""
    busy: float
    """Mean occupancy of the program slots until the last program ends."""


class _Cache:
    """LRU caches of several capacities at once: a unit is present if less was used since."""

    def __init__(self, sizes: Integers, num_steps: int, capacities: Sequence[int]) -> None:
        self.capacities, self.missed = capacities, dict.fromkeys(capacities, 0)
        self._sizes = sizes
        self._last_use = np.full(len(sizes), -1)
        self._turn = np.empty(len(sizes), np.int64)
        self._bytes_last_used = np.zeros(num_steps)
        self._oldest = dict.fromkeys(capacities, 0)

    def begin(self, step: int) -> None:
        """Start a step: entries last used before its horizon are dropped."""
        used_since = np.cumsum(self._bytes_last_used[:step][::-1])
        for capacity in self.capacities:
            self._oldest[capacity] = step - int(np.searchsorted(used_since, capacity, "right"))

    def use(self, step: int, units: Integers) -> None:
        """Read or write units, each once even if repeated."""
        turns = np.arange(len(units))
        self._turn[units] = turns
        units = units[self._turn[units] == turns]
        before, sizes = self._last_use[units], self._sizes[units]
        for capacity, oldest in self._oldest.items():
            self.missed[capacity] += int(sizes[before < oldest].sum())
        is_known = before >= 0
        self._bytes_last_used -= np.bincount(before[is_known], sizes[is_known], len(self._bytes_last_used))
        self._bytes_last_used[step] += sizes.sum()
        self._last_use[units] = step

    def pass_through(self, step: int, num_bytes: float) -> None:
        """Account for single-use bytes, which evict others."""
        self._bytes_last_used[step] += num_bytes


def replay(
    case: Case,
    kernel: Kernel,
    chosen: Configuration,
    tiles: Tiles,
    runs: Runs,
    *,
    capacities: Sequence[int],
    side_by_side: int,
) -> Replay:
    """The traffic of one launch with ``side_by_side`` concurrent programs."""
    ratio = case.heads // case.kv_heads
    members = ratio if kernel == "key_gradient" else 1
    entry = np.repeat(np.arange(len(runs.tile)), members)
    stream = runs.kv_head[entry] * members + np.arange(len(entry)) % members
    num_blocks = (runs.to_block - runs.from_block)[entry]
    steps_of_tile = np.bincount(runs.tile[entry], num_blocks, len(tiles.kv_head)).astype(np.int64)
    begin_of_tile = _beginnings(np.maximum(1, steps_of_tile), side_by_side)
    end_of_tile = begin_of_tile + np.maximum(1, steps_of_tile) - 1
    num_steps = int(end_of_tile.max()) + 1

    # Every use of a block: its run, its index in the run, its step.
    total = int(num_blocks.sum())
    of_entry = np.repeat(np.arange(len(entry)), num_blocks)
    within_entry = np.arange(total) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)
    steps_before = np.cumsum(num_blocks) - num_blocks
    before_in_tile = steps_before - (np.cumsum(steps_of_tile) - steps_of_tile)[runs.tile[entry]]
    time = (begin_of_tile[runs.tile[entry]] + before_in_tile)[of_entry] + within_entry
    block = runs.from_block[entry][of_entry] + within_entry
    table = np.stack([stream, runs.first[entry], runs.rate[entry], runs.count[entry]])
    distinct, same_run = np.unique(table, axis=1, return_inverse=True)
    sorted_by_time = np.argsort(time, kind="stable")
    use = (same_run[of_entry] * (int(block.max()) + 1) + block)[sorted_by_time]
    bounds = np.searchsorted(time[sorted_by_time], np.arange(num_steps + 1))

    num_streams = case.heads if kernel == "key_gradient" else case.kv_heads
    row_bytes = case.head_dim * case.torch_dtype.itemsize
    # Rows of keys with values, or of queries with gradients; then sectors of log-sum-exp, and in gradients of delta.
    num_sectors = -(-case.rows * case.heads * _STATISTIC // _SECTOR)
    sector_bytes = _SECTOR if kernel == "forward" else 2 * _SECTOR
    sizes = np.repeat([2 * row_bytes, sector_bytes], [num_streams * case.rows, num_sectors])
    cache = _Cache(sizes, num_steps, capacities)

    once = _bytes_used_once(case, kernel, tiles, runs)
    passing = np.bincount(begin_of_tile, once[0], num_steps) + np.bincount(end_of_tile, once[1], num_steps)
    sectors_at = _sectors_of_tiles(
        case, kernel, tiles, end_of_tile if kernel == "forward" else begin_of_tile, num_steps, len(sizes) - num_sectors
    )
    line = np.arange(chosen.block_run)
    for step in range(num_steps):
        cache.begin(step)
        run, its_block = np.divmod(np.unique(use[bounds[step] : bounds[step + 1]]), int(block.max()) + 1)
        head, first, rate, count = distinct[:, run]
        index = its_block[:, None] * chosen.block_run + line
        row = first[:, None] + index * rate[:, None]
        exists = index < count[:, None]
        used = [(head[:, None] * case.rows + row)[exists], *sectors_at[step]]
        if kernel == "key_gradient":
            used.append(_sector(case, row, head[:, None])[exists] + len(sizes) - num_sectors)
        cache.use(step, np.concatenate(used))
        cache.pass_through(step, passing[step])
    return Replay(
        bytes_by_capacity={c: missed + int(passing.sum()) for c, missed in cache.missed.items()},
        cache_bytes=total * chosen.block_run * 2 * row_bytes,
        busy=float(steps_of_tile.sum()) / (num_steps * side_by_side),
    )


def bytes_of_run(tiles: Tiles) -> int:
    """Bytes of one entry of the table of runs: its numbers, and a bit per slot of the tile."""
    slots = tiles.rows.shape[1]
    return 4 * (BITS.value + max(32, 1 << (slots - 1).bit_length()) // 32)


def _bytes_used_once(case: Case, kernel: Kernel, tiles: Tiles, runs: Runs) -> Integers:
    """``[2, tiles]``: bytes at the start and at the end of every tile: its own rows, their order, its runs."""
    row_bytes = case.head_dim * case.torch_dtype.itemsize
    num_rows = (tiles.rows >= 0).sum(1)
    read, written = {"forward": (1, 1), "query_gradient": (2, 1), "key_gradient": (2, 2)}[kernel]
    tables = np.bincount(runs.tile, minlength=len(num_rows)) * bytes_of_run(tiles) + 8
    tables += 4 * num_rows * tiles.is_ordered
    return np.stack([num_rows * tiles.pack * read * row_bytes + tables, num_rows * tiles.pack * written * row_bytes])


def _sectors_of_tiles(
    case: Case, kernel: Kernel, tiles: Tiles, when: Integers, num_steps: int, first_sector: int
) -> list[list[Integers]]:
    """Sectors of log-sum-exp (and delta) that query tiles touch in every step."""
    at: list[list[Integers]] = [[] for _ in range(num_steps)]
    if kernel == "key_gradient":
        return at
    head = tiles.kv_head * (case.heads // case.kv_heads) + tiles.head_block * tiles.pack
    for tile, step in enumerate(when):
        row = tiles.rows[tile]
        heads = head[tile] + np.arange(tiles.pack)
        at[step].append(first_sector + _sector(case, row[row >= 0][:, None], heads).ravel())
    return at


def _sector(case: Case, row: Integers, head: Integers) -> Integers:
    return (row * case.heads + head) * _STATISTIC // _SECTOR


def _beginnings(steps: Integers, side_by_side: int) -> Integers:
    """Start step of every tile: in order, each as soon as a slot is free."""
    free, begin = [0] * side_by_side, np.empty(len(steps), np.int64)
    for tile, length in enumerate(steps):
        begin[tile] = heapq.heappop(free)
        heapq.heappush(free, int(begin[tile] + length))
    return begin
