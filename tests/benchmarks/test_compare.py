"""What moved: an injected slowdown is found, noise is not, and other machines are told apart."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dilated_attention_pytorch.benchmarks.compare import Earlier, TimePair, judge_moves
from dilated_attention_pytorch.benchmarks.results import Row
from dilated_attention_pytorch.errors import RunError
from support.benchmark_cases import small_case

MACHINE = {"processor": "one", "cores": 2, "threads": 2, "cuda_devices": []}


def rows_of(time: Callable[[int], float], *, noise: float, calls: int = 7, seed: int = 0) -> list[Row]:
    """300 cases whose calls take ``time(case)``, with Gaussian noise and now and then an interrupted call."""
    generator = random.Random(seed)

    def sample(index: int) -> float:
        return time(index) * (1 + generator.gauss(0, noise) + (0.5 if generator.random() < 0.03 else 0.0))

    return [
        Row(
            case=small_case(rows=10 + index),
            contestant="ours, aten",
            computes="pattern",
            status="timed",
            samples=[sample(index) for _ in range(calls)],
            limit_seconds=0.5,
        )
        for index in range(300)
    ]


def timings_of(rows: list[Row]) -> dict[tuple[str, str], TimePair]:
    return {row.key: TimePair(row.samples, row.limit_seconds) for row in rows}


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03, 0.1])
def test_noise_moves_next_to_nothing(noise: float, figure: Any) -> None:
    before, after = (rows_of(lambda index: 1.0, noise=noise, seed=seed) for seed in (1, 2))
    moves = judge_moves(timings_of(before), after)
    assert len(moves) == 300
    false = sum(move.is_beyond_noise for move in moves)
    figure(f"comparison of equal code at {noise:.0%} noise: times said to have moved", f"{false} of 300")
    assert false <= 6


def test_a_slowdown_of_a_fifth_is_found_where_it_is_and_nowhere_else() -> None:
    before = rows_of(lambda index: 1.0, noise=0.02, seed=1)
    after = rows_of(lambda index: 1.2 if index % 10 == 0 else 1.0, noise=0.02, seed=2)
    moves = judge_moves(timings_of(before), after)
    found = {index for index, move in enumerate(moves) if move.is_beyond_noise}
    slow = {index for index in range(300) if index % 10 == 0}
    assert len(slow - found) <= 4  # those where two calls of a run were interrupted
    assert len(found - slow) <= 6


def test_a_machine_that_is_slower_as_a_whole_moves_nothing() -> None:
    before = rows_of(lambda index: 1.0, noise=0.01, seed=1)
    after = rows_of(lambda index: 1.5, noise=0.01, seed=2)
    assert all(move.is_beyond_noise for move in judge_moves(timings_of(before), after))
    for row in after:
        row.limit_seconds *= 1.5
    assert not any(move.is_beyond_noise for move in judge_moves(timings_of(before), after))


@pytest.mark.parametrize("drift", [0.05, 0.5, 2.0, 20.0])
@pytest.mark.parametrize("factor", [1e-3, 0.04, 0.3, 0.97, 1.03, 3.0, 25.0, 1e3])
def test_a_machine_that_drifted_explains_a_factor_either_way_and_no_more(drift: float, factor: float) -> None:
    (before,), (after,) = (
        [
            Row(
                case=small_case(rows=9),
                contestant="ours, aten",
                computes="pattern",
                status="timed",
                samples=[seconds] * 3,
                limit_seconds=limit_seconds,
            )
        ]
        for seconds, limit_seconds in ((1.0, 0.5), (factor, 0.5 * drift))
    )
    (move,) = judge_moves(timings_of([before]), [after])
    assert move.is_beyond_noise == (max(factor, 1 / factor) > 1.06 * max(drift, 1 / drift))


def test_only_what_was_timed_in_both_runs_is_compared() -> None:
    before = rows_of(lambda index: 1.0, noise=0.0)
    after = [*before[:3], Row(case=small_case(rows=9), contestant="x", computes="pattern", status="skipped")]
    assert len(judge_moves(timings_of(before[1:]), after)) == 2


def test_a_run_of_another_machine_is_refused_unless_asked_for() -> None:
    earlier = Earlier(
        Path("old.json"), {**MACHINE, "processor": "another"}, {}, {("case", "ours"): TimePair([1.0], 0.5)}
    )
    with pytest.raises(RunError, match="processor 'another' there, 'one' here") as raised:
        earlier.check(MACHINE, {"case"}, any_machine=False)
    assert "--compare-any-machine" in str(raised.value)
    earlier.check(MACHINE, {"case"}, any_machine=True)


def test_a_run_of_other_cases_is_refused() -> None:
    earlier = Earlier(Path("old.json"), MACHINE, {}, {("case", "ours"): TimePair([1.0], 0.5)})
    with pytest.raises(RunError, match="holds no time of any case that is about to be run"):
        earlier.check(MACHINE, {"another case"}, any_machine=True)
