"""One sequence over several ranks: output, log-sum-exp and all gradients are those of the whole."""

from __future__ import annotations

import math
from typing import Any

import pytest

from drawn_shards import NAMES, draw_cases, largest_errors
from ranks import run_ranks


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_drawn_calls_equal_the_oracle(world: int, figure: Any) -> None:
    cases = draw_cases(world, {1: 10, 2: 30, 3: 40, 4: 60}[world])
    errors = run_ranks(world, largest_errors, cases)[0]
    for case, of_case in zip(cases, errors, strict=True):
        assert max(of_case.values()) <= 1e-10, (of_case, case)
        assert not any(math.isnan(error) for error in of_case.values()), (of_case, case)
    worst = {name: max(of_case[name] for of_case in errors) for name in NAMES}
    figure(f"parallel, {world} ranks, {len(cases)} drawn calls, largest float64 errors", worst)
