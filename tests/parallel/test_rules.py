"""Windows, blocks and global tokens over several ranks: those of the whole, with the planned rows sent."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from checks import name_of
from dilated_attention_pytorch import global_tokens, local_window, parallel
from drawn_shards import NAMES, ShardedCase, draw_cases, planned
from ranks import run_ranks
from rule_checks import CHECKS, run_all

NUMBER = 30


@functools.cache
def drawn(world: int) -> tuple[list[ShardedCase], list[ShardedCase]]:
    """Cases to be compared with the oracle, and those of them whose traffic is planned."""
    cases = draw_cases(world, NUMBER, kind="rules")
    return cases, [case for case in cases if case.is_whole]


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3], ids=["2 ranks", "3 ranks"])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What every rank has found."""
    return run_ranks(request.param, run_all, *drawn(request.param))


def test_drawn_calls_equal_the_oracle(found: list[dict[str, Any]], figure: Any) -> None:
    cases, errors = drawn(len(found))[0], found[0]["errors"]
    for case, of_case in zip(cases, errors, strict=True):
        assert max(of_case.values()) <= 1e-10, (of_case, case)
        assert not any(math.isnan(error) for error in of_case.values()), (of_case, case)
    worst = {name: max(of_case[name] for of_case in errors) for name in NAMES}
    figure(f"parallel, rules, {len(found)} ranks, {len(cases)} drawn calls, largest float64 errors", worst)


def test_sent_bytes_are_the_planned_ones(found: list[dict[str, Any]], figure: Any) -> None:
    cases = drawn(len(found))[1]
    for index, case in enumerate(cases):
        estimate = planned(case)
        sent, received, back, received_back, messages, back_messages = zip(
            *(of_rank["traffic"][index] for of_rank in found), strict=True
        )
        assert (sent, back) == (estimate.forward_bytes, estimate.backward_bytes), case
        assert (max(messages), max(back_messages)) == (estimate.messages, estimate.backward_messages), case
        assert (sum(received), sum(received_back)) == (sum(sent), sum(back)), case
    moved = sum(any(of_rank["traffic"][index][0] for of_rank in found) for index in range(len(cases)))
    figure(f"bytes sent equal the planned ones, rules, {len(found)} ranks", f"{len(cases)} calls, {moved} send any")


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_law(check: Any, found: list[dict[str, Any]], figure: Any) -> None:
    for rank, of_rank in enumerate(found):
        error, _ = of_rank["checks"][name_of(check)]
        assert error is None, f"rank {rank}: {error}"
    measured = found[0]["checks"][name_of(check)][1]
    if measured is not None:
        figure(f"rules, {len(found)} ranks, {name_of(check).replace('_', ' ')}", measured)


def test_a_plan_of_rules_has_no_gather_and_counts_a_window_over_many_ranks() -> None:
    world, rows, window = 256, 64, 37
    plan = parallel.plan_parallel(local_window(window), (1, world * rows, 2, 4), world, is_causal=True)
    assert {estimate.strategy for estimate in plan.estimates} == {"ring"}
    (ring,) = (estimate for estimate in plan.estimates if estimate.layout == "contiguous")
    of_row = 2 * 2 * 4 * 2  # heads, key and value, width, bfloat16
    assert ring.forward_bytes == (window * of_row,) * (world - 1) + (0,)
    # Global tokens: everyone gets those, and the first rank gets everything.
    plan = parallel.plan_parallel(global_tokens(3), (1, world * rows, 2, 4), world)
    (ring,) = (estimate for estimate in plan.estimates if estimate.layout == "contiguous")
    assert ring.forward_bytes == ((world - 1) * 3 * of_row,) + (rows * of_row,) * (world - 1)
