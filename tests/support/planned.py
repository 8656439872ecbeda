"""Plans of the Triton kernels on the device for tiles of any size, and calls with other block sizes."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch.kernels.triton import launch, plan
from dilated_attention_pytorch.kernels.triton.configurations import BlockSizes
from dilated_attention_pytorch.kernels.triton.problem import Problem
from dilated_attention_pytorch.kernels.triton.runs import BITS
from dilated_attention_pytorch.kernels.triton.sides import Side


class Planned(NamedTuple):
    """The rows of tiles, their order, and the runs that the tiles loop over."""

    side: Side
    order: Tensor
    lines: Tensor
    """int32 ``[heads, lines of a head, integers of a run]``: the runs of all tiles, with gaps."""
    ranges: Tensor
    """int32 ``[heads, tiles, 2]``: the first line of each tile, and its number of lines."""

    def runs(self, head: int, tile: int) -> Tensor:
        """int32 ``[runs of the tile, integers of a run]``."""
        first, number = self.ranges[head, tile].tolist()
        return self.lines[head, first : first + number].cpu()

    def check_ranges(self) -> None:
        """Check that every line is in the table and belongs to at most one tile."""
        for of_head in self.ranges.tolist():
            begin = 0
            for first, number in sorted(one for one in of_head if one[1]):
                assert first >= begin
                begin = first + number
            assert begin <= self.lines.shape[1]


def planned(
    problem: Problem, sizes: tuple[int, ...], tile_rows: int | None = None, *, of_queries: bool = False
) -> Planned:
    """Plan tiles of ``tile_rows`` rows (default: the first of ``sizes``) in an order that serves all ``sizes``."""
    whole = plan.plan_of(problem)
    lines = (sizes[0] if tile_rows is None else tile_rows) * (1 if of_queries else whole.kind.packed_heads)
    blocks = BlockSizes(lines, 16, 4, 1)
    side = whole.side(whole.positions.keys if of_queries else whole.positions.queries, sizes)
    kernel = whole.kernel_plan("key_gradient" if of_queries else "query_gradient", (blocks,), side)
    order = launch._order_of(problem, kernel)
    return Planned(side, *launch._runs_of(problem, kernel, kernel.walk(blocks), order))


def tiles_of(problem: Problem, tile_rows: int, *, of_queries: bool) -> tuple[Tensor, Planned]:
    """The rows of every tile ``[heads, tiles, rows]``, -1 for none, and the runs of the tiles."""
    runs = planned(problem, (tile_rows,), of_queries=of_queries)
    side = runs.side
    tiles, heads = -(-side.window // tile_rows), problem.key.shape[2]
    rows = torch.arange(side.num_windows * side.window).view(1, side.num_windows, -1).repeat(heads, 1, 1)
    if side.is_ordered:
        rows = runs.order.cpu().long()
    rows = torch.nn.functional.pad(rows, (0, tiles * tile_rows - side.window), value=side.num_rows)
    rows = torch.where(rows.view(heads, -1) < side.num_rows, rows.view(heads, -1), -1)
    # Entries past the last row are not written.
    index = torch.arange(rows.shape[1]) % (tiles * tile_rows) + torch.arange(rows.shape[1]) // (tiles * tile_rows) * (
        side.window
    )
    return torch.where(index < side.num_rows, rows, -1).view(heads, -1, tile_rows), runs


def check_runs(problem: Problem, counts: Tensor, tile_rows: int, *, of_queries: bool) -> int:
    """Compare the runs with the dense counts ``[heads, queries, keys]``; returns the number of runs."""
    tiles, runs = tiles_of(problem, tile_rows, of_queries=of_queries)
    runs.check_ranges()
    own_offset, others_offset = problem.query_offset, problem.key_offset
    if of_queries:
        own_offset, others_offset, counts = others_offset, own_offset, counts.mT
    got = torch.zeros_like(counts)
    for head, tile in itertools.product(range(tiles.shape[0]), range(tiles.shape[1])):
        rows = tiles[head, tile]
        for line in runs.runs(head, tile).tolist():
            first, rate, count, edge, extra = line[:5]
            is_active = torch.tensor([(line[BITS.value + i // 32] >> i % 32) & 1 for i in range(tile_rows)]) != 0
            active = rows[is_active]
            assert (active >= 0).all()
            assert count > 0
            others = first + rate * torch.arange(count)
            # Rows that are read must exist.
            assert others[0] >= others_offset
            assert others[-1] < others_offset + counts.shape[2]
            ahead = others[None] - (active[:, None] + own_offset)
            ahead = -ahead if of_queries else ahead
            low, high = -(2**31), 0 if problem.is_causal else 2**31
            if plan.plan_of(problem).kind.is_banded:
                low, high = line[-2:]
            seen = (ahead >= low) & (ahead <= high)
            if of_queries:
                assert not seen[:, :edge].any()
                if extra < count:
                    assert is_active.all()
                    assert len(rows) >= 32  # a slot without a row is ignored
                    assert seen[:, extra:].all()
            else:
                assert extra == 0
                assert seen[:, :edge].all()
            got[head, active[:, None], others[None] - others_offset] += seen.int()
    assert torch.equal(got, counts)
    return int(runs.ranges[..., 1].sum())


def with_candidates(monkeypatch: pytest.MonkeyPatch, *candidates: BlockSizes) -> None:
    """Give every kernel these candidates until the end of a test, with an empty cache of plans."""
    monkeypatch.setattr(plan, "candidates", lambda *_: candidates)
    monkeypatch.setattr(plan, "_plan", functools.lru_cache(maxsize=64)(plan.LaunchPlan))
