"""Metrics equal those computed by hand and by a double loop; their intervals draw patients."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch.slides.finetune.labels import Task
from dilated_attention_pytorch.slides.finetune.metrics import (
    BEST,
    discordance,
    kaplan_meier,
    log_odds,
    metrics,
    why_undefined,
    with_intervals,
)


def made(task: Task, cases: int, outputs: int, seed: int) -> tuple[Tensor, Tensor]:
    """Scores that know something of their targets, with ties (but of logits, whose log-odds round ties apart)."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(cases, outputs, generator=generator)
    if task == "classification":
        targets = torch.randint(outputs, (cases,), generator=generator)
        scores = noise + torch.nn.functional.one_hot(targets, outputs)
    elif task == "survival":
        targets = torch.stack([torch.randint(9, (cases,), generator=generator), torch.arange(cases) % 3 > 0], 1).float()
        scores = noise - targets[:, :1] / 4
    else:
        targets = torch.randn(cases, outputs, generator=generator)
        scores = noise + targets
        targets = (targets > 0).float() if task == "multilabel" else targets
    return scores if task == "classification" and outputs > 2 else (scores * 4).round() / 4, targets


BY_HAND: list[tuple[Task, list[list[float]], list[Any], dict[str, float]]] = [
    # Called 0 1 1 1 0. Of 6 pairs, 3 are in order; precision at the positive cases, by score: 1, 2/3, 3/5.
    ("classification", [[0, -1], [0, 2], [0, 1], [0, 3], [0, -2]], [0, 0, 1, 1, 1],
     {"auroc": 3 / 6, "average_precision": (1 + 2 / 3 + 3 / 5) / 3, "accuracy": 3 / 5,
      "balanced_accuracy": (1 / 2 + 2 / 3) / 2, "f1": 4 / 6, "kappa": (0.6 - 0.52) / (1 - 0.52)}),
    # Called 0 2 2 1. AUROC 1, 2/3 and 3/4; F1 1, 0 and 1/2; squared distances 2, expected 5.5.
    ("classification", [[3, 0, 0], [0, 1, 2], [0, 0, 3], [0, 2, 1]], [0, 1, 2, 2],
     {"auroc": (1 + 2 / 3 + 3 / 4) / 3, "accuracy": 2 / 4, "balanced_accuracy": (1 + 0 + 1 / 2) / 3,
      "f1": (1 + 0 + 1 / 2) / 3, "kappa": (0.5 - 0.375) / (1 - 0.375), "quadratic_kappa": 1 - 2 / 5.5}),
    # Nobody has or gets class 2, and class 3 stays two grades above class 1. Called 0 1 3 1.
    ("classification", [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0]], [0, 1, 3, 3],
     {"auroc": math.nan, "accuracy": 3 / 4, "balanced_accuracy": (1 + 1 + 1 / 2) / 3,
      "f1": (1 + 2 / 3 + 2 / 3) / 3, "kappa": (0.75 - 5 / 16) / (1 - 5 / 16), "quadratic_kappa": 1 - 4 / 12.5}),
    ("multilabel", [[-1, 1], [2, 0], [1, 3], [3, 2], [-2, 4]], [[0, 0], [0, 0], [1, 0], [1, 1], [1, 1]],
     {"auroc": (3 / 6 + 5 / 6) / 2, "average_precision": ((1 + 2 / 3 + 3 / 5) / 3 + (1 + 2 / 3) / 2) / 2}),
    ("regression", [[1, 3], [2, 3], [4, 0]], [[2, 3], [2, 3], [5, 0]],
     {"pearson_r": (5 / math.sqrt(28) + 1) / 2, "r2": (1 - 2 / 6 + 1) / 2, "mae": (2 / 3 + 0) / 2}),
]  # fmt: skip


@pytest.mark.parametrize(("task", "scores", "targets", "expected"), BY_HAND)
def test_metrics_equal_those_computed_by_hand(
    task: Task, scores: list[list[float]], targets: list[Any], expected: dict[str, float]
) -> None:
    of = torch.tensor(targets) if task == "classification" else torch.tensor(targets, dtype=torch.float32)
    found = metrics(task, torch.tensor(scores, dtype=torch.float32), of)
    assert found == pytest.approx(expected, abs=1e-12, nan_ok=True)
    assert list(found) == list(expected)


def c_index_by_loops(risk: Tensor, targets: Tensor) -> float:
    pairs = concordant = 0.0
    for i in range(len(risk)):
        for j in range(len(risk)):
            (time_i, event_i), (time_j, event_j) = targets[i].tolist(), targets[j].tolist()
            if event_i == 1 and (time_j > time_i or (time_j == time_i and event_j == 0)):
                pairs += 1
                concordant += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    return concordant / pairs


@pytest.mark.parametrize("seed", range(3))
def test_the_c_index_equals_a_double_loop_with_ties_of_time_and_risk(seed: int) -> None:
    scores, targets = made("survival", 31, 1, seed)
    expected = c_index_by_loops(scores[:, 0], targets)
    assert metrics("survival", scores, targets) == {"c_index": pytest.approx(expected, abs=1e-12)}
    assert metrics("survival", -scores, targets) == {"c_index": pytest.approx(1 - expected, abs=1e-12)}


def test_logits_that_saturate_as_probabilities_keep_their_order() -> None:
    scores = torch.tensor([[0.0, 800.0], [0.0, 900.0], [0.0, 1000.0], [0.0, 1100.0]])
    assert metrics("classification", scores, torch.tensor([0, 0, 1, 1]))["auroc"] == 1
    three = torch.cat([scores, scores[:, :1] - 2000], 1)
    assert log_odds(three.double())[:, 1].tolist() == [800, 900, 1000, 1100]


TASKS: list[tuple[Task, int]] = [
    ("classification", 2),
    ("classification", 3),
    ("multilabel", 2),
    ("regression", 1),
    ("survival", 1),
]


@pytest.mark.parametrize(("task", "outputs"), TASKS)
def test_a_perfect_prediction_is_the_best_of_the_metric_that_chooses_the_epoch(task: Task, outputs: int) -> None:
    scores, targets = made(task, 30, outputs, 0)
    perfect = {
        "classification": lambda: torch.nn.functional.one_hot(targets, outputs).float(),
        "survival": lambda: targets[:, 1:] / 2 - targets[:, :1],
    }.get(task, lambda: targets)()
    assert metrics(task, perfect, targets)[BEST[task]] == 1
    assert metrics(task, scores, targets)[BEST[task]] < 1


UNDEFINED: list[tuple[Task, Tensor, tuple[str, ...], str, set[str]]] = [
    ("classification", torch.zeros(7, dtype=torch.long), ("a", "b"), "No case has the class b, ", {"accuracy"}),
    ("classification", torch.arange(7) % 2, ("a", "b", "c"), "No case has the class c, ",
     {"accuracy", "balanced_accuracy", "f1", "kappa", "quadratic_kappa"}),
    ("multilabel", torch.zeros(7, 1), ("er",), "All cases have the same value of er, ", set()),
    ("regression", torch.full((7, 1), 0.1), ("age",), "All cases have the same value of age, ", {"mae"}),
    ("survival", torch.tensor([[1.0, 0.0]] * 7), ("time", "event"), "No two cases can be compared", set()),
]  # fmt: skip


@pytest.mark.parametrize(("task", "targets", "classes", "sentence", "defined"), UNDEFINED)
def test_a_metric_that_is_not_defined_is_nan_and_the_reason_is_said(
    task: Task, targets: Tensor, classes: tuple[str, ...], sentence: str, defined: set[str]
) -> None:
    scores = torch.randn(7, 1 if task == "survival" else len(classes))
    found = metrics(task, scores, targets)
    assert {name for name, value in found.items() if not math.isnan(value)} == defined
    assert (why_undefined(task, targets, classes) or "").startswith(sentence)
    intervals = with_intervals(task, scores, targets, ["p", "q", "r", "s", "t", "u", "v"], resamples=10, seed=0)
    assert all(
        interval.undefined == 10 and math.isnan(interval.low) and math.isnan(interval.high)
        for name, interval in intervals.items()
        if name not in defined
    )


@pytest.mark.parametrize(("task", "outputs"), TASKS)
def test_intervals_are_those_of_the_metrics_of_every_resample(task: Task, outputs: int) -> None:
    scores, targets = made(task, 12, outputs, 1)
    patients = [f"p{index // 3 * index % 7}" for index in range(12)]
    names = list(dict.fromkeys(patients))
    drawn = torch.randint(len(names), (30, len(names)), generator=torch.Generator().manual_seed(5)).tolist()
    cases = [[i for name in row for i, patient in enumerate(patients) if patient == names[name]] for row in drawn]
    resampled = [metrics(task, scores[indices], targets[indices]) for indices in cases]
    found = with_intervals(task, scores, targets, patients, resamples=30, seed=5, level=0.8)
    for name, interval in found.items():
        values = [of[name] for of in resampled]
        ends = np.nanquantile(values, [0.1, 0.9])
        assert (interval.low, interval.high) == pytest.approx(tuple(ends), abs=1e-9), name
        assert interval.undefined == sum(map(math.isnan, values)), name


@pytest.mark.parametrize(("task", "outputs"), TASKS)
def test_the_cases_of_a_patient_are_drawn_together(task: Task, outputs: int) -> None:
    """Each case three times, as slides of one patient, tells no more than once."""
    scores, targets = made(task, 20, outputs, 3)
    patients = [f"p{index}" for index in range(20)]
    assert why_undefined(task, targets, "abc"[: targets.shape[-1] if targets.dim() > 1 else outputs]) is None
    once = with_intervals(task, scores, targets, patients, resamples=30, seed=0)
    thrice = with_intervals(task, scores.repeat(3, 1), torch.cat([targets] * 3), patients * 3, resamples=30, seed=0)
    alone = with_intervals(
        task, scores.repeat(3, 1), torch.cat([targets] * 3), [f"{n}" for n in range(60)], resamples=30, seed=0
    )
    for name, interval in once.items():
        assert tuple(thrice[name]) == pytest.approx(tuple(interval), abs=1e-9), name
        assert alone[name].high - alone[name].low < interval.high - interval.low, name


def test_the_interval_covers_the_value_of_the_population_about_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        targets = torch.randn(80, 1, generator=generator)
        scores = targets + torch.randn(80, 1, generator=generator)
        patients = [str(index) for index in range(80)]
        _, low, high, _ = with_intervals("regression", scores, targets, patients, resamples=50, seed=seed)["mae"]
        covered += low <= math.sqrt(2 / math.pi) <= high  # the mean of | N(0, 1) |
    assert 36 <= covered <= 39, covered


def test_undefined_resamples_are_left_out_and_counted() -> None:
    scores, targets = torch.tensor([[0.0, 1.0], [0.0, -1.0], [0.0, -2.0]]), torch.tensor([1, 0, 0])
    found = with_intervals("classification", scores, targets, ["p", "q", "r"], resamples=50, seed=0)
    drawn = torch.randint(3, (50, 3), generator=torch.Generator().manual_seed(0))
    positives = (drawn == 0).sum(1)
    assert found["auroc"].undefined == int(((positives == 0) | (positives == 3)).sum()) > 0
    assert (found["auroc"].value, found["auroc"].low, found["accuracy"].undefined) == (1, 1, 0)
    assert found == with_intervals("classification", scores, targets, ["p", "q", "r"], resamples=50, seed=0)


def test_wrong_scores_are_refused() -> None:
    scores, targets = made("classification", 5, 3, 0)
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: metrics("classification", scores[:4], targets), r"targets \[4\] for classification, got \[4, 3\]"),
        (lambda: metrics("survival", scores[:, :1], targets), r"targets \[5, 2\] for survival, got \[5, 1\] and \[5\]"),
        (lambda: metrics("regression", scores[:, 0], targets), r"expected scores \[N, K\]"),
        (lambda: metrics("regression", scores[:0], scores[:0]), r"with N >= 1"),
        (lambda: metrics("classification", scores * math.nan, targets), "must be finite, got NaN or infinity"),
    ]  # fmt: skip
    for call, sentence in random.sample(wrong, len(wrong)):
        with pytest.raises(ValueError, match=sentence):
            call()


def test_the_kaplan_meier_estimate_is_that_of_a_table_by_hand() -> None:
    """Events at 2 (one of 6), 3 (two of 4) and 5 (one of 1); one case is censored at 2, one at 3."""
    targets = torch.tensor([[3.0, 1], [2, 1], [3, 0], [2, 0], [3, 1], [5, 1]])
    times, alive = kaplan_meier(targets)
    assert times.tolist() == [0, 2, 3, 5]
    assert alive.tolist() == pytest.approx([1, 5 / 6, 5 / 6 * 2 / 4, 0])


def test_the_discordance_of_a_case_is_its_share_of_wrong_pairs() -> None:
    risk, targets = torch.tensor([1.0, 0.0, 2.0, 1.0]), torch.tensor([[1.0, 1], [2, 0], [3, 1], [0, 0]])
    assert discordance(risk, targets).tolist() == pytest.approx([0.5, 0, 1, math.nan], nan_ok=True)
