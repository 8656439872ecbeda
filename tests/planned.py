"""What the Triton kernels plan on the device for tiles of any size, and calls with other blocks than the shipped."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
from torch import Tensor

from dilated_attention_pytorch.kernels.triton import launch, plan
from dilated_attention_pytorch.kernels.triton.configurations import Configuration
from dilated_attention_pytorch.kernels.triton.problem import Problem
from dilated_attention_pytorch.kernels.triton.sides import Side


class Planned(NamedTuple):
    """The rows that tiles hold, their order, and what the tiles walk over."""

    side: Side
    order: Tensor
    lines: Tensor
    """int32 ``[heads, tiles, the most runs of a tile, integers of a run]``."""
    numbers: Tensor
    """int32 ``[heads, tiles]``: the runs of each tile."""


def planned(
    problem: Problem, sizes: tuple[int, ...], tile_rows: int | None = None, *, of_queries: bool = False
) -> Planned:
    """For tiles of ``tile_rows`` rows (the first of ``sizes``) in an order that serves all ``sizes``."""
    whole = plan.plan_of(problem)
    lines = (sizes[0] if tile_rows is None else tile_rows) * (1 if of_queries else whole.kind.packed_heads)
    blocks = Configuration(lines, 16, 4, 1)
    side = whole.side(whole.positions.keys if of_queries else whole.positions.queries, sizes)
    kernel = whole.kernel_plan("key_gradient" if of_queries else "query_gradient", (blocks,), side)
    order = launch.order_of(problem, kernel)
    return Planned(side, order, *launch.runs_of(problem, kernel, kernel.walk(blocks), order))


def with_candidates(monkeypatch: pytest.MonkeyPatch, *candidates: Configuration) -> None:
    """Until the end of a test, every kernel has these candidates; plans of other ones are forgotten."""
    monkeypatch.setattr(plan, "candidates", lambda *_: candidates)
    monkeypatch.setattr(plan, "_plan", functools.lru_cache(maxsize=64)(plan.LaunchPlan))
