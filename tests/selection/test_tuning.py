"""The cost model: a fit that finds the rates it was made from, and timings that survive a stop."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch.cli import tune
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.selection import Hardware, Profile, Rates, tuning
from dilated_attention_pytorch.selection.cost import FEATURES, features, nominal_rates, weighted
from dilated_attention_pytorch.selection.profile import Accuracy
from dilated_attention_pytorch.selection.tuning import fit_seconds, least_squares, rank_correlation
from selection.cases import GIB, workload

HARDWARE = Hardware.of_architecture("CPU", free_bytes=4 * GIB, processors=2)
TRUE = (2e-4, 3e-5, 2e-11, 8e-10, 1e-10)


def made_up(noise: float, rates: Sequence[float] = TRUE) -> list[tuning.Timing]:
    """Cases with times that a machine of these rates would have, each longer by up to ``noise`` of it."""
    generator = random.Random(0)
    return [
        replace(
            case,
            samples=[
                weighted(rates, features(case.pattern, case.workload)) * generator.uniform(1, 1 + noise)
                for _ in range(3)
            ],
        )
        for case in tuning.cases([torch.float32], HARDWARE)
    ]


def test_the_fit_finds_rates_that_predict_what_it_was_made_from() -> None:
    found = tuning.fit_rates(made_up(0.0), HARDWARE)
    assert [one.mode for one in found] == [("float32", False), ("float32", True)]
    for one in found:
        assert one.fitted.error < 1e-6
        assert one.fitted.correlation > 0.99
        assert all(seconds >= 0 for seconds in one.seconds)
        assert len(one.seconds) == len(FEATURES)
        assert one.samples == 12 * 8 * 3


def test_rates_of_a_machine_unlike_the_formula_are_used() -> None:
    fits = tuning.fit_rates(made_up(0.05), HARDWARE)
    for one in fits:
        assert one.fitted.correlation > one.formula.correlation
        assert one.fitted.error < 0.05 < one.formula.error
        assert one.is_better
    assert tuning.profile_of(fits, None).rates_of(workload()) is fits[1]


@pytest.mark.parametrize("seed", range(5))
def test_rates_fitted_to_noise_are_not_used(seed: int) -> None:
    generator = random.Random(seed)
    timings = tuning.cases([torch.float32], HARDWARE)
    noise = [replace(case, samples=[generator.lognormvariate(-4.0, 2.0)]) for case in timings]
    fits = tuning.fit_rates(noise, HARDWARE)
    assert [one.is_better for one in fits] == [False, False]
    assert tuning.profile_of(fits, None).rates_of(workload()) is None


def test_rates_are_judged_on_shapes_that_they_were_not_fitted_to() -> None:
    timings = made_up(0.0)
    shapes = list(dict.fromkeys(case.workload for case in timings if not case.workload.is_training))
    held_out = set(shapes[2::3])
    slow = [
        replace(case, samples=[3 * one for one in case.samples]) if case.workload in held_out else case
        for case in timings
    ]
    seen, disturbed = (tuning.fit_rates(one, HARDWARE)[0] for one in (timings, slow))
    assert len(held_out) == 4
    assert disturbed.seconds == seen.seconds
    assert disturbed.fitted.error == pytest.approx(2 / 3)


def test_a_machine_of_the_formula_s_own_rates_is_predicted_by_both() -> None:
    timings = [
        replace(case, samples=[weighted(nominal_rates(case.workload, HARDWARE), features(case.pattern, case.workload))])
        for case in tuning.cases([torch.float32], HARDWARE)
    ]
    for one in tuning.fit_rates(timings, HARDWARE):
        assert one.formula == Accuracy(pytest.approx(1.0), 0.0)
        assert one.fitted.error < 1e-6


def test_a_fit_is_not_negative_where_least_squares_would_be() -> None:
    assert fit_seconds([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], [3.0, 2.0, 1.0])[1] == 0.0


@pytest.mark.parametrize("seed", range(40))
def test_the_least_squares_solution_meets_its_conditions(seed: int) -> None:
    """Nothing below zero, and no feature along which the sum of squares would fall: equal, empty and scaled columns."""
    random = torch.Generator().manual_seed(seed)
    num_rows, num_features = 2 + seed % 9, 1 + seed % 6
    rows = torch.randn(num_rows, num_features, generator=random, dtype=torch.float64)
    if seed % 2:
        rows = rows.abs()
    if seed % 3 == 0:
        rows[:, 0] = rows[:, -1]
    if seed % 5 == 0:
        rows[:, num_features // 2] = 0
    weights = torch.rand(num_rows, generator=random, dtype=torch.float64)
    solution = least_squares(rows, weights)
    slopes = rows.T @ (weights * (1 - rows @ solution))
    assert (solution >= 0).all()
    assert slopes.max() <= 1e-9
    assert (slopes * solution).abs().max() <= 1e-9


def test_a_disturbed_timing_bends_the_fit_little() -> None:
    counts = [[1.0, float(number)] for number in range(10, 30)]
    seconds = [5.0 + 2.0 * number for _, number in counts]
    seconds[7] *= 1.8
    fixed, of_a_unit = fit_seconds(counts, seconds)
    assert fixed == pytest.approx(5.0, rel=0.05)
    assert of_a_unit == pytest.approx(2.0, rel=0.05)


def test_rank_correlation_is_that_of_the_order() -> None:
    assert rank_correlation([1, 2, 3], [5, 6, 70]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3], [9, 6, -7]) == pytest.approx(-1.0)
    assert rank_correlation([1, 1, 2], [4, 4, 5]) == pytest.approx(1.0)
    assert rank_correlation([1, 1], [2, 3]) == 0.0


def test_cases_are_the_same_in_every_run_and_have_names_of_their_own() -> None:
    dtypes = [torch.float32, torch.bfloat16]
    cases = tuning.cases(dtypes, HARDWARE)
    assert cases == tuning.cases(dtypes, HARDWARE)
    assert len({case.name for case in cases}) == len(cases) > 300
    assert all(
        case.workload.sequence_length >= 8192
        for case in tuning.cases([torch.bfloat16], Hardware.of_architecture("H100", free_bytes=GIB))
    )


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    cases = tuning.cases([torch.float32], HARDWARE, is_dry=True)
    file = tmp_path / "tune.json"
    assert tuning.kept_timings(file, cases, HARDWARE) == cases

    class Stop(Exception):
        pass

    def stop(timing: tuning.Timing) -> None:
        tuning.keep_timings(file, cases, HARDWARE)
        if sum(len(case.samples) for case in cases) == 8:
            raise Stop

    with pytest.raises(Stop):
        tuning.measure(cases, torch.device("cpu"), seconds=math.inf, finished=stop, is_once=True)
    kept = tuning.kept_timings(file, tuning.cases([torch.float32], HARDWARE, is_dry=True), HARDWARE)
    before = [list(case.samples) for case in kept]
    assert Counter(map(len, before)) == {2: 4, 0: len(cases) - 4}
    tuning.measure(kept, torch.device("cpu"), seconds=math.inf, finished=lambda timing: None, is_once=True)
    assert all(len(case.samples) == 2 for case in kept)
    assert all(not old or case.samples == old for case, old in zip(kept, before, strict=True))


class Clock:
    """A clock on which every timed case takes 2 s."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def finished(self, timing: tuning.Timing) -> None:
        self.now += 2.0


@pytest.mark.parametrize(("seconds", "cases"), [(0.0, 0), (15.0, 8), (16.0, 8), (73.0, 37)])
def test_the_time_that_is_asked_for_is_kept_also_in_the_first_round(seconds: float, cases: int) -> None:
    timings, clock = tuning.cases([torch.float32], HARDWARE, is_dry=True), Clock()
    tuning.measure(timings, torch.device("cpu"), seconds=seconds, finished=clock.finished, clock=clock)
    assert sum(len(timing.samples) // 2 for timing in timings) == cases
    assert clock.now - 100.0 <= seconds + 2.0


def test_a_quarter_of_the_first_round_is_enough_to_judge_rates() -> None:
    known = {timing.name: timing.samples for timing in made_up(0.05)}
    timings = tuning.cases([torch.float32], HARDWARE)
    for timing in timings[: len(timings) // 4]:
        timing.samples.extend(known[timing.name])
    fits = tuning.fit_rates(timings, HARDWARE)
    assert [(one.is_training, one.samples) for one in fits] == [(False, 6 * 4 * 3), (True, 6 * 4 * 3)]
    for timing in timings:
        if timing.workload.is_training:
            timing.samples.clear()
    assert [one.is_training for one in tuning.fit_rates(timings, HARDWARE)] == [False]


def test_a_record_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tune.json"
    cases = tuning.cases([torch.float32], HARDWARE, is_dry=True)
    tuning.keep_timings(file, cases, HARDWARE)
    with pytest.raises(RunError, match="was measured on another machine or version: processors"):
        tuning.kept_timings(file, cases, replace(HARDWARE, processors=9))
    without = json.dumps({**json.loads(file.read_text()), "samples": [1]})
    for text, words in (("{", "not JSON"), ("{}", "another format"), ("[]", "another format"), (without, "no samples")):
        file.write_text(text)
        with pytest.raises(RunError, match=f"{words}.*; delete it, or name another --output"):
            tuning.kept_timings(file, cases, HARDWARE)


BETTER, WORSE = (Accuracy(0.9, 0.1), Accuracy(0.8, 0.2)), (Accuracy(0.722, 0.1), Accuracy(0.778, 0.2))


def test_rates_that_were_not_measured_now_stay() -> None:
    old = Profile((Rates("float32", True, (1.0,)), Rates("float64", True, (2.0,))))
    new = Rates("float32", True, (3.0,), 9, *BETTER)
    assert set(tuning.profile_of([new], old).rates) == {new, Rates("float64", True, (2.0,))}
    assert tuning.profile_of([new], None).rates == (new,)


@pytest.mark.parametrize(
    ("fitted", "formula", "is_better"),
    [
        (*BETTER, True),
        (*WORSE, False),
        (Accuracy(0.8, 0.2), Accuracy(0.8, 0.2), True),
        (Accuracy(0.9, 0.21), Accuracy(0.8, 0.2), False),
        (Accuracy(0.49, 0.1), Accuracy(0.1, 0.2), False),
    ],
    ids=["better", "worse order", "equal", "larger error", "order by chance"],
)
def test_rates_are_used_where_they_predict_better_and_stored_in_any_case(
    fitted: Accuracy, formula: Accuracy, is_better: bool
) -> None:
    rates = Rates("float32", True, (3.0,), 9, fitted, formula)
    profile = tuning.profile_of([rates], None)
    assert profile.rates == (rates,)
    assert profile.rates_of(workload()) is (rates if is_better else None)


def test_a_run_of_fewer_times_leaves_the_rates_of_a_longer_one_in_use() -> None:
    old = Profile((Rates("float32", True, (1.0,), samples=500), Rates("float32", False, (2.0,), samples=100)))
    better = Rates("float32", True, (3.0,), 499, *BETTER)
    worse = Rates("float32", False, (4.0,), 99, *WORSE)
    assert tuning.profile_of([better, worse], old) == old
    said = tune._unused([better, worse], tuning.cases([torch.float32], HARDWARE), old)
    assert {sentence.partition(":")[0]: sentence.partition(", so ")[2].partition(";")[0] for sentence in said} == {
        "float32, forward": "the stored rates (100 times) stay in use",
        "float32, forward + backward": "the stored rates (500 times) stay in use",
    }


def test_a_call_that_is_timed_is_the_workload_s() -> None:
    call = tuning.call_of(
        workload(sequence_length=50, num_heads=2, num_kv_heads=1, dtype=torch.bfloat16), torch.device("cpu")
    )
    assert call(tuning.cases([torch.bfloat16], HARDWARE)[0].pattern) > 0.0
