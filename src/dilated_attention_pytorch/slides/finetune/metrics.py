"""Metrics of predictions, with intervals by bootstrap over patients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .labels import Task

BEST: Mapping[Task, str] = {
    "classification": "auroc",
    "multilabel": "auroc",
    "regression": "r2",
    "survival": "c_index",
}
"""The validation metric by which the best epoch is chosen. Greater is better."""


class Interval(NamedTuple):
    """A metric with its bootstrap interval."""

    value: float
    low: float
    high: float
    undefined: int
    """Resamples for which the metric is not defined; the interval is over the others."""


def metrics(task: Task, scores: Tensor, targets: Tensor) -> dict[str, float]:
    r"""Compute the metrics of a task in float64.

    - classification of two classes: ``auroc``, ``average_precision``, ``balanced_accuracy``, ``accuracy``, ``f1``,
      ``kappa`` (Cohen), the second class being the positive one;
    - of more: ``auroc`` (mean over classes against the others), ``balanced_accuracy``, ``accuracy``, ``f1`` (mean over
      classes), ``kappa``, ``quadratic_kappa`` (weights :math:`(i-j)^2`, for classes in order);
    - multilabel: ``auroc`` and ``average_precision``, means over labels;
    - regression: ``pearson_r``, ``r2``, ``mae``, means over columns;
    - survival: ``c_index`` (Harrell), see :func:`c_index`.

    A metric that the cases do not define is NaN; :func:`why_undefined` says why.

    Args:
        task: the task.
        scores: ``[N, K]``: logits of classes or labels, values, or ``[N, 1]`` log-risks.
        targets: as in :class:`.labels.Labels`.

    Raises:
        ValueError: there are no cases, the shapes disagree, or a score is not finite.
    """
    expected = {"classification": (len(scores),), "survival": (len(scores), 2)}.get(task, tuple(scores.shape))
    if scores.dim() != 2 or not len(scores) or targets.shape != expected:
        raise ValueError(
            f"expected scores [N, K] with N >= 1 and targets {list(expected)} for {task}, got {list(scores.shape)} and "
            f"{list(targets.shape)}"
        )
    if not scores.isfinite().all():
        raise ValueError("scores must be finite, got NaN or infinity: the training has diverged")
    return _METRICS[task](scores.double(), targets)


def with_intervals(
    task: Task,
    scores: Tensor,
    targets: Tensor,
    patients: Sequence[str],
    *,
    resamples: int = 1000,
    seed: int,
    level: float = 0.95,
) -> dict[str, Interval]:
    """The metrics with percentile intervals by bootstrap.

    A resample draws as many patients as there are, with replacement, and takes all cases of each.

    Args:
        task: as for :func:`metrics`.
        scores: as for :func:`metrics`.
        targets: as for :func:`metrics`.
        patients: the patient of each case.
        resamples: number of resamples.
        seed: seed of the resamples.
        level: share of the resamples inside the interval. Its ends are NaN if no resample defines the metric.

    Raises:
        ValueError: see :func:`metrics`.
    """
    values = metrics(task, scores, targets)
    cases: dict[str, list[int]] = {}
    for index, patient in enumerate(patients):
        cases.setdefault(patient, []).append(index)
    of_patients = [torch.tensor(indices) for indices in cases.values()]
    generator = torch.Generator().manual_seed(seed)
    drawn: dict[str, list[float]] = {name: [] for name in values}
    for _ in range(resamples):
        patients_drawn = torch.randint(len(of_patients), (len(of_patients),), generator=generator)
        indices = torch.cat([of_patients[patient] for patient in patients_drawn.tolist()])
        for name, value in metrics(task, scores[indices], targets[indices]).items():
            drawn[name].append(value)
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    intervals = {}
    for name, value in values.items():
        defined = torch.tensor([x for x in drawn[name] if not math.isnan(x)], dtype=torch.float64)
        low, high = defined.quantile(ends).tolist() if len(defined) else (math.nan, math.nan)
        intervals[name] = Interval(value, low, high, resamples - len(defined))
    return intervals


def why_undefined(task: Task, targets: Tensor, classes: Sequence[str]) -> str | None:
    """Why some metric of these targets is NaN, in a sentence; None if the targets define all of them."""
    if task == "classification":
        absent = [name for index, name in enumerate(classes) if not (targets == index).any()]
        return f"No case has the class {absent[0]}, so some metrics are not defined." if absent else None
    if task == "survival":
        lacks = not bool(_comparable(targets).any())
        return "No two cases can be compared, so the C-index is not defined." if lacks else None
    constant = [
        name for name, values in zip(classes, targets.unbind(1), strict=True) if bool((values == values[0]).all())
    ]
    return f"All cases have the same value of {constant[0]}, so some metrics are not defined." if constant else None


def roc_curve(score: Tensor, is_positive: Tensor) -> tuple[Tensor, Tensor]:
    """Rates of false and of true positives ``[T + 1]``, from (0, 0) to (1, 1), at the T distinct scores."""
    true, false = _counts(score, is_positive)
    origin = true.new_zeros(1)
    return torch.cat([origin, false / false[-1]]), torch.cat([origin, true / true[-1]])


def c_index(risk: Tensor, targets: Tensor) -> float:
    r"""Harrell's index of concordance of risks ``[N]`` with times and events ``[N, 2]``.

    .. math:: \frac{\sum_{(i,j)} 1[r_i > r_j] + \tfrac12 1[r_i = r_j]}{\sum_{(i,j)} 1}

    over the pairs in which i has an event before time j, or at the time at which j is censored. Source: Harrell, Lee
    and Mark (1996), Statistics in Medicine 15, 361-387.
    """
    return float(_concordance(risk)[_comparable(targets)].mean())


def discordance(risk: Tensor, targets: Tensor) -> Tensor:
    """The share of each case's pairs ``[N]`` that :func:`c_index` counts as wrong; NaN for a case without pairs."""
    comparable = _comparable(targets)
    wrong = (1 - _concordance(risk)).where(comparable, 0)
    return (wrong.sum(0) + wrong.sum(1)) / (comparable.sum(0) + comparable.sum(1))


def kaplan_meier(targets: Tensor) -> tuple[Tensor, Tensor]:
    r"""Times ``[T + 1]``, from 0 on, and the share of cases ``[N, 2]`` without event after each of them.

    .. math:: S(t) = \prod_{t_i \le t} \left(1 - d_i / n_i\right)

    with :math:`d_i` events at the distinct times :math:`t_i` and :math:`n_i` cases whose time is not before. Source:
    Kaplan and Meier (1958), Journal of the American Statistical Association 53, 457-481.
    """
    time, event = targets.double().unbind(1)
    times, which = time.unique(return_inverse=True)
    number = torch.zeros_like(times).index_add(0, which, torch.ones_like(time))
    events = torch.zeros_like(times).index_add(0, which, event)
    left = number.flip(0).cumsum(0).flip(0)
    start = times.new_zeros(1)
    return torch.cat([start, times]), torch.cat([start + 1, (1 - events / left).cumprod(0)])


def confusion_matrix(scores: Tensor, targets: Tensor) -> Tensor:
    """Counts ``[K, K]`` of target (row) and of the class with the largest score (column)."""
    number = scores.shape[1]
    pairs = targets * number + scores.argmax(1)
    return pairs.bincount(minlength=number**2).view(number, number)


def log_odds(scores: Tensor) -> Tensor:
    """Logarithms of the odds of each class by its logits, both ``[N, K]``; unlike probabilities they never saturate."""
    others = ~torch.eye(scores.shape[1], dtype=torch.bool)
    rest = scores[:, None, :].where(others, -math.inf).logsumexp(2)
    return scores - rest


def _concordance(risk: Tensor) -> Tensor:
    """1 where the risk of the row is greater than that of the column, 1/2 where they are equal."""
    difference = risk[:, None] - risk
    return (difference > 0).double() + (difference == 0).double() / 2


def _comparable(targets: Tensor) -> Tensor:
    time, event = targets[:, 0], targets[:, 1] > 0
    return event[:, None] & ((time[:, None] < time) | ((time[:, None] == time) & ~event))


def _counts(score: Tensor, is_positive: Tensor) -> tuple[Tensor, Tensor]:
    """True and false positives ``[T]`` among the cases that reach each of the T distinct scores, descending."""
    score, order = score.sort(descending=True)
    is_last = torch.cat([score[1:] != score[:-1], torch.ones(1, dtype=torch.bool)])
    true = is_positive[order].double().cumsum(0)[is_last]
    return true, is_last.nonzero()[:, 0] + 1 - true


def _auroc(score: Tensor, is_positive: Tensor) -> float:
    """NaN without a positive or a negative case."""
    false, true = roc_curve(score, is_positive)
    return float(torch.trapezoid(true, false))


def _average_precision(score: Tensor, is_positive: Tensor) -> float:
    """The sum over scores of the precision times the step of the recall; NaN without a positive case."""
    true, false = _counts(score, is_positive)
    steps = true.diff(prepend=true.new_zeros(1)) / true[-1]
    return float((steps * true / (true + false)).sum())


def _of_classes(scores: Tensor, targets: Tensor) -> dict[str, float]:
    number = scores.shape[1]
    confusion = confusion_matrix(scores, targets).double()
    hits, actual, called = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    seen = actual > 0
    f1 = 2 * hits / (actual + called)  # NaN for a class that no case has or gets
    grade = torch.arange(number, dtype=torch.float64)
    distance = grade[:, None] - grade
    odds = log_odds(scores)
    ranking = {"auroc": _mean([_auroc(odds[:, k], targets == k) for k in range(1 if number == 2 else 0, number)])}
    if number == 2:
        ranking["average_precision"] = _average_precision(odds[:, 1], targets == 1)
    found = {
        **ranking,
        "accuracy": float(hits.sum() / len(scores)),
        "balanced_accuracy": float((hits / actual)[seen].mean()),
        "f1": float(f1[1] if number == 2 else f1.nanmean()),
        "kappa": _kappa(confusion, distance != 0),
    }
    if number > 2:
        found["quadratic_kappa"] = _kappa(confusion, distance**2)
    if seen.sum() < 2:
        return {**dict.fromkeys(found, math.nan), "accuracy": found["accuracy"]}
    return found


def _kappa(confusion: Tensor, weight: Tensor) -> float:
    """Cohen's kappa: 1 - weighted disagreement / the same expected of independent ratings."""
    chance = confusion.sum(1)[:, None] * confusion.sum(0) / confusion.sum()
    return float(1 - (weight * confusion).sum() / (weight * chance).sum())


def _of_labels(scores: Tensor, targets: Tensor) -> dict[str, float]:
    columns = list(zip(scores.unbind(1), (targets > 0).unbind(1), strict=True))
    return {
        "auroc": _mean([_auroc(*column) for column in columns]),
        "average_precision": _mean([_average_precision(*column) for column in columns]),
    }


def _of_values(scores: Tensor, targets: Tensor) -> dict[str, float]:
    targets = targets.double()
    error = scores - targets
    centred, of_scores = targets - targets.mean(0), scores - scores.mean(0)
    variation = centred.square().sum(0).where((targets != targets[0]).any(0), math.nan)
    of_scores = of_scores.where((scores != scores[0]).any(0), math.nan)
    correlation = (centred * of_scores).sum(0) / (variation * of_scores.square().sum(0)).sqrt()
    r2 = 1 - error.square().sum(0) / variation
    return {"pearson_r": float(correlation.mean()), "r2": float(r2.mean()), "mae": float(error.abs().mean())}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_METRICS: Mapping[Task, Callable[[Tensor, Tensor], dict[str, float]]] = {
    "classification": _of_classes,
    "multilabel": _of_labels,
    "regression": _of_values,
    "survival": lambda scores, targets: {"c_index": c_index(scores[:, 0], targets)},
}
