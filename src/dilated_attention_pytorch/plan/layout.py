"""Row layouts of sharded sequences, in closed form, so that nothing grows with the number of ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["contiguous", "zigzag"]
Run = tuple[int, int]
"""Rows ``[start, stop)`` of the whole sequence."""


@functools.lru_cache(maxsize=4096)
def shard_runs(
    num_rows: int, num_shards: int, shard: int, layout: Layout, *, part: tuple[int, int] = (0, 1)
) -> tuple[Run, ...]:
    """The non-empty, non-adjacent row ranges of one shard, in its order.

    ``"contiguous"``: chunk ``shard`` of ``num_shards``. ``"zigzag"``: of twice as many chunks, number ``shard`` from
    the start and from the end, which balances the work under a causal mask (Llama 3, arXiv 2407.21783,
    section 3.3.2). Sizes differ by at most one row, the first are the larger. ``part = (j, M)`` selects the j-th of
    M parts of the shard's rows.
    """
    chunks = [shard] if layout == "contiguous" else [shard, 2 * num_shards - 1 - shard]
    total = num_shards if layout == "contiguous" else 2 * num_shards
    runs = _joined([(_cut(num_rows, total, chunk), _cut(num_rows, total, chunk + 1)) for chunk in chunks])
    index, parts = part
    size = sum(stop - start for start, stop in runs)
    first, last = _cut(size, parts, index), _cut(size, parts, index + 1)
    clipped, offset = [], 0
    for start, stop in runs:
        clipped.append((start + max(0, first - offset), min(stop, start + last - offset)))
        offset += stop - start
    return _joined(clipped)


def with_rows(runs: tuple[Run, ...]) -> Iterator[tuple[Run, int]]:
    """Every run with its first row within the shard."""
    row = 0
    for run in runs:
        yield run, row
        row += run[1] - run[0]


@dataclass(frozen=True, slots=True)
class Shards:
    """The shards of one sequence: ``shards[rank]`` are the :func:`shard_runs` of a rank.

    Runs of all ranks are numbered in sequence order. Run i belongs to rank i; runs from ``size`` on (the second half of
    a zigzag layout, whose first chunk is joined with the last of the first half) belong to ranks ``size - 2``
    downwards.
    """

    num_rows: int
    size: int
    """Number of ranks."""
    layout: Layout

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, rank: int) -> tuple[Run, ...]:
        if not 0 <= rank < self.size:
            raise IndexError(f"rank must be one of 0 to {self.size - 1}, got {rank}")
        return shard_runs(self.num_rows, self.size, rank, self.layout)

    def __iter__(self) -> Iterator[tuple[Run, ...]]:
        return (self[rank] for rank in range(self.size))

    @property
    def num_runs(self) -> int:
        """Number of runs of all ranks."""
        if self.layout == "contiguous" or self.num_rows <= self.size:
            return min(self.size, self.num_rows)
        return min(2 * self.size, self.num_rows) - 1

    def owner(self, run: int) -> int:
        """The rank that holds run number ``run``."""
        return run if run < self.size else 2 * self.size - 2 - run

    def owner_of(self, runs: Tensor) -> Tensor:
        """:meth:`owner` for a tensor of run numbers."""
        return torch.where(runs < self.size, runs, 2 * self.size - 2 - runs)

    def bounds(self) -> tuple[Tensor, Tensor]:
        """Start and stop of every run, int64 ``[runs]``."""
        cuts = [self._cut(run) for run in range(self.num_runs + 1)]
        all_cuts = torch.tensor(cuts, dtype=torch.int64)
        return all_cuts[:-1], all_cuts[1:]

    def runs_between(self, start: int, stop: int) -> range:
        """Numbers of the runs with a row in ``[start, stop)``."""
        start, stop = max(start, 0), min(stop, self.num_rows)
        if start >= stop:
            return range(0)
        return range(self._run_at(start), self._run_at(stop - 1) + 1)

    def owners(self, runs: range) -> set[int]:
        """The ranks that hold any of the runs."""
        return {rank for first, stop in self.rank_ranges(runs.start, runs.stop) for rank in range(first, stop)}

    def rank_ranges(self, first: int, stop: int) -> tuple[Run, ...]:
        """The ranks that hold any of the runs ``[first, stop)``, as sorted disjoint non-adjacent ranges."""
        size = self.size
        found = sorted(
            (a, b)
            for a, b in ((first, min(stop, size)), (2 * size - 1 - stop, 2 * size - 1 - max(first, size)))
            if a < b
        )
        if len(found) == 2 and found[1][0] <= found[0][1]:
            return ((found[0][0], max(found[0][1], found[1][1])),)
        return tuple(found)

    def _cut(self, run: int) -> int:
        """First row of a run; for the number of runs, the end of the last one."""
        if self.layout == "contiguous":
            return _cut(self.num_rows, self.size, run)
        # The last chunk of the first half and the first of the second half form one run.
        return _cut(self.num_rows, 2 * self.size, run if run < self.size else run + 1)

    def _run_at(self, row: int) -> int:
        chunks = self.size if self.layout == "contiguous" else 2 * self.size
        base, longer = divmod(self.num_rows, chunks)
        of_longer = longer * (base + 1)
        chunk = row // (base + 1) if row < of_longer else longer + (row - of_longer) // base
        return chunk if chunk < self.size else chunk - 1


def _cut(size: int, parts: int, index: int) -> int:
    """Start of part ``index`` of ``parts`` parts."""
    return index * (size // parts) + min(index, size % parts)


def _joined(runs: list[Run]) -> tuple[Run, ...]:
    joined: list[Run] = []
    for start, stop in runs:
        if start >= stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
