"""Metrics of predictions, with intervals by bootstrap over patients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from .labels import Task

BEST: Mapping[Task, str] = {
    "classification": "auroc",
    "multilabel": "auroc",
    "regression": "r2",
    "survival": "c_index",
}
"""The validation metric by which the best epoch is chosen. Greater is better."""


_BATCH = 100
"""Resamples that are computed together."""


class Interval(NamedTuple):
    """A metric with its bootstrap interval."""

    value: float
    low: float
    high: float
    undefined: int
    """Resamples for which the metric is not defined; the interval is over the others."""


def metrics(task: Task, scores: Tensor, targets: Tensor) -> dict[str, float]:
    r"""Compute the metrics of a task in float64.

    - classification of two classes: ``auroc``, ``average_precision``, ``accuracy``, ``balanced_accuracy``, ``f1``,
      ``kappa`` (Cohen), the second class being the positive one;
    - of more: ``auroc`` (mean over classes against the others), ``accuracy``, ``balanced_accuracy``, ``f1`` (mean over
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
    values = _METRICS[task](scores.double(), targets, torch.ones(1, len(scores), dtype=torch.float64))
    return {name: value.item() for name, value in values.items()}


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
    number = {patient: index for index, patient in enumerate(dict.fromkeys(patients))}
    owners = torch.tensor([number[patient] for patient in patients])
    drawn = torch.randint(len(number), (resamples, len(number)), generator=torch.Generator().manual_seed(seed))
    of_patients = torch.zeros(drawn.shape, dtype=torch.float64)
    of_patients.scatter_add_(1, drawn, torch.ones_like(of_patients))
    batches = [_METRICS[task](scores.double(), targets, batch[:, owners]) for batch in of_patients.split(_BATCH)]
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    intervals = {}
    for name, value in values.items():
        resampled = torch.cat([batch[name] for batch in batches])
        low, high = resampled.nanquantile(ends).tolist()
        intervals[name] = Interval(value, low, high, int(resampled.isnan().sum()))
    return intervals


def why_undefined(task: Task, targets: Tensor, classes: Sequence[str]) -> str | None:
    """Why some metric of these targets is NaN, in a sentence; None if the targets define all of them."""
    if task == "classification":
        absent = [name for index, name in enumerate(classes) if not (targets == index).any()]
        return f"No case has the class {absent[0]}, so some metrics are not defined." if absent else None
    if task == "survival":
        lacks = not bool(_pairs(targets[:, 0], targets)[0].any())
        return "No two cases can be compared, so the C-index is not defined." if lacks else None
    constant = [
        name for name, values in zip(classes, targets.unbind(1), strict=True) if bool((values == values[0]).all())
    ]
    return f"All cases have the same value of {constant[0]}, so some metrics are not defined." if constant else None


def roc_curve(score: Tensor, is_positive: Tensor) -> tuple[Tensor, Tensor]:
    """Rates of false and of true positives ``[T + 1]``, from (0, 0) to (1, 1), at the T distinct scores."""
    once = torch.ones(1, len(score), dtype=torch.float64)
    true, false = (rates[0] / rates[0, -1] for rates in _positives(score, is_positive, once))
    return false, true


def c_index(risk: Tensor, targets: Tensor) -> float:
    r"""Harrell's index of concordance of risks ``[N]`` with times and events ``[N, 2]``.

    .. math:: \frac{\sum_{(i,j)} 1[r_i > r_j] + \tfrac12 1[r_i = r_j]}{\sum_{(i,j)} 1}

    over the pairs in which i has an event before time j, or at the time at which j is censored. Source: Harrell, Lee
    and Mark (1996), Statistics in Medicine 15, 361-387.
    """
    return metrics("survival", risk[:, None], targets)["c_index"]


def discordance(risk: Tensor, targets: Tensor) -> Tensor:
    """The share of each case's pairs ``[N]`` that :func:`c_index` counts as wrong; NaN for a case without pairs."""
    comparable, right = _pairs(risk, targets)
    wrong = comparable - right
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


def _pairs(risk: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """1 for the pairs ``[N, N]`` that are compared, and for those in the right order; 1/2 for equal risks."""
    time, event = targets[:, 0], targets[:, 1] > 0
    comparable = event[:, None] & ((time[:, None] < time) | ((time[:, None] == time) & ~event))
    right = (risk[:, None] > risk).double() + (risk[:, None] == risk).double() / 2
    return comparable.double(), right.where(comparable, 0)


# The functions below compute metrics [R] for R resamples, whose weights [R, N] are how often each case was drawn.


def _positives(score: Tensor, is_positive: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """True and false positives ``[R, T + 1]``: none, then the cases that reach each of the T distinct scores."""
    score, order = score.sort(descending=True)
    is_last = torch.cat([score[1:] != score[:-1], torch.ones(1, dtype=torch.bool)])
    drawn = weights[:, order]
    both = torch.stack([drawn * is_positive[order], drawn * ~is_positive[order]])
    true, false = pad(both.cumsum(2)[:, :, is_last], (1, 0))
    return true, false


def _auroc(score: Tensor, is_positive: Tensor, weights: Tensor) -> Tensor:
    """NaN without a positive or a negative case."""
    true, false = _positives(score, is_positive, weights)
    return torch.trapezoid(true, false) / (true[:, -1] * false[:, -1])


def _average_precision(score: Tensor, is_positive: Tensor, weights: Tensor) -> Tensor:
    """The sum over scores of the precision times the step of the recall; NaN without a positive case."""
    true, false = _positives(score, is_positive, weights)
    precision = true / (true + false).clamp(min=1)
    return (true.diff() * precision[:, 1:]).sum(1) / true[:, -1]


def _of_classes(scores: Tensor, targets: Tensor, weights: Tensor) -> dict[str, Tensor]:
    number = scores.shape[1]
    cells = one_hot(targets * number + scores.argmax(1), number**2).double()
    confusion = (weights @ cells).unflatten(1, (number, number))
    hits, actual, called = confusion.diagonal(dim1=1, dim2=2), confusion.sum(2), confusion.sum(1)
    f1 = 2 * hits / (actual + called)  # NaN for a class that no case has or gets
    grade = torch.arange(number)
    distance = grade[:, None] - grade
    odds = log_odds(scores)
    positive = range(1 if number == 2 else 0, number)
    found = {"auroc": _mean([_auroc(odds[:, k], targets == k, weights) for k in positive])}
    if number == 2:
        found["average_precision"] = _average_precision(odds[:, 1], targets == 1, weights)
    found["accuracy"] = hits.sum(1) / actual.sum(1)
    found["balanced_accuracy"] = (hits / actual).nanmean(1)
    found["f1"] = f1[:, 1] if number == 2 else f1.nanmean(1)
    found["kappa"] = _kappa(confusion, distance != 0)
    if number > 2:
        found["quadratic_kappa"] = _kappa(confusion, distance**2)
    has_two = (actual > 0).sum(1) > 1
    return {name: value if name == "accuracy" else value.where(has_two, math.nan) for name, value in found.items()}


def _kappa(confusion: Tensor, weight: Tensor) -> Tensor:
    """Cohen's kappa: 1 - weighted disagreement / the same expected of independent ratings."""
    actual, called = confusion.sum(2), confusion.sum(1)
    chance = actual[:, :, None] * called[:, None, :] / actual.sum(1)[:, None, None]
    return 1 - (weight * confusion).sum((1, 2)) / (weight * chance).sum((1, 2))


def _of_labels(scores: Tensor, targets: Tensor, weights: Tensor) -> dict[str, Tensor]:
    columns = list(zip(scores.unbind(1), (targets > 0).unbind(1), strict=True))
    return {
        "auroc": _mean([_auroc(*column, weights) for column in columns]),
        "average_precision": _mean([_average_precision(*column, weights) for column in columns]),
    }


def _of_values(scores: Tensor, targets: Tensor, weights: Tensor) -> dict[str, Tensor]:
    found = [_of_value(*column, weights) for column in zip(scores.unbind(1), targets.double().unbind(1), strict=True)]
    return {name: _mean([of_column[name] for of_column in found]) for name in found[0]}


def _of_value(score: Tensor, target: Tensor, weights: Tensor) -> dict[str, Tensor]:
    total = weights.sum(1)

    def centred(values: Tensor) -> Tensor:
        varies = values.where(weights > 0, -math.inf).amax(1) > values.where(weights > 0, math.inf).amin(1)
        return (values - (weights @ values / total)[:, None]).where(varies[:, None], math.nan)

    x, y = centred(target), centred(score)
    variation = (weights * x.square()).sum(1)
    correlation = (weights * x * y).sum(1) / (variation * (weights * y.square()).sum(1)).sqrt()
    error = score - target
    return {
        "pearson_r": correlation,
        "r2": 1 - weights @ error.square() / variation,
        "mae": weights @ error.abs() / total,
    }


def _of_survival(scores: Tensor, targets: Tensor, weights: Tensor) -> dict[str, Tensor]:
    comparable, right = _pairs(scores[:, 0], targets)
    return {"c_index": (weights @ right * weights).sum(1) / (weights @ comparable * weights).sum(1)}


def _mean(values: Sequence[Tensor]) -> Tensor:
    return torch.stack([*values]).mean(0)


_METRICS: Mapping[Task, Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]] = {
    "classification": _of_classes,
    "multilabel": _of_labels,
    "regression": _of_values,
    "survival": _of_survival,
}
