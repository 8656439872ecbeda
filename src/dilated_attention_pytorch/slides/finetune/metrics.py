"""Metrics of predictions, with intervals by bootstrap over patients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.metrics import (
    average_precision_score,
    cohen_kappa_score,
    mean_absolute_error,
    precision_recall_fscore_support,
    r2_score,
    roc_auc_score,
)
from torch import Tensor

from .labels import Task

BEST: Mapping[Task, str] = {
    "classification": "auroc",
    "multilabel": "auroc",
    "regression": "r2",
    "survival": "c_index",
}
"""The validation metric by which the best epoch is chosen. Greater is better."""
RESAMPLES = 500
"""Of a bootstrap; for 500 cases of five classes, 500 calls of scikit-learn's functions take about 7 seconds."""


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
    return _values(task, scores.double(), targets, [torch.arange(len(scores))])[0]


def with_intervals(
    task: Task,
    scores: Tensor,
    targets: Tensor,
    patients: Sequence[str],
    *,
    resamples: int = RESAMPLES,
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
    of_all = metrics(task, scores, targets)
    cases: dict[str, list[int]] = {}
    for case, patient in enumerate(patients):
        cases.setdefault(patient, []).append(case)
    of_patient = [torch.tensor(own) for own in cases.values()]
    drawn = torch.randint(len(cases), (resamples, len(cases)), generator=torch.Generator().manual_seed(seed))
    sets = [torch.cat([of_patient[index] for index in row]) for row in drawn.tolist()]
    found = _values(task, scores.double(), targets, sets)
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    intervals = {}
    for name, value in of_all.items():
        resampled = torch.tensor([of_set[name] for of_set in found], dtype=torch.float64)
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


def discordance(risk: Tensor, targets: Tensor) -> Tensor:
    """The share of each case's pairs ``[N]`` that the C-index counts as wrong; NaN for a case without pairs."""
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


def _values(task: Task, scores: Tensor, targets: Tensor, sets: Sequence[Tensor]) -> list[dict[str, float]]:
    r"""The metrics of each set of cases, which lists a case as often as it was drawn.

    The C-index of Harrell is the share of right pairs,

    .. math:: \frac{\sum_{(i,j)} 1[r_i > r_j] + \tfrac12 1[r_i = r_j]}{\sum_{(i,j)} 1}

    over the pairs in which i has an event before time j, or at the time at which j is censored. Source: Harrell, Lee
    and Mark (1996), Statistics in Medicine 15, 361-387.
    """
    if task == "survival":
        comparable, right = _pairs(scores[:, 0], targets)
        drawn = torch.stack([cases.bincount(minlength=len(scores)) for cases in sets]).double()
        shares = (drawn @ right * drawn).sum(1) / (drawn @ comparable * drawn).sum(1)
        return [{"c_index": share} for share in shares.tolist()]
    values_of = {"classification": _of_classes, "multilabel": _of_labels, "regression": _of_columns}[task]
    found = (values_of(scores[cases], targets[cases]) for cases in sets)
    return [{name: float(value) for name, value in of_set.items()} for of_set in found]


def _of_classes(scores: Tensor, targets: Tensor) -> dict[str, float]:
    number, target, called = scores.shape[1], targets.numpy(), scores.argmax(1).numpy()
    present = np.unique(target)
    names = ["auroc", "average_precision", "accuracy", "balanced_accuracy", "f1", "kappa", "quadratic_kappa"]
    names.remove("quadratic_kappa" if number == 2 else "average_precision")
    found = dict.fromkeys(names, math.nan) | {"accuracy": (target == called).mean()}
    if len(present) < 2:
        return found
    odds = log_odds(scores)
    if number == 2:
        found |= _of_labels(odds[:, 1:], targets[:, None])
    else:
        if len(present) == number:
            found["auroc"] = roc_auc_score(target[:, None] == present, odds)
        found["quadratic_kappa"] = cohen_kappa_score(target, called, labels=range(number), weights="quadratic")
    # NaN for a class that no case has, or that no case has or gets.
    _, recall, f1, _ = precision_recall_fscore_support(target, called, labels=range(number), zero_division=math.nan)
    found["balanced_accuracy"] = np.nanmean(recall)
    found["f1"] = f1[1] if number == 2 else np.nanmean(f1)
    found["kappa"] = cohen_kappa_score(target, called)
    return found


def _of_labels(scores: Tensor, targets: Tensor) -> dict[str, float]:
    score, is_positive = scores.numpy(), targets.numpy() > 0
    has_positive, has_negative = is_positive.any(0).all(), (~is_positive).any(0).all()
    return {
        "auroc": roc_auc_score(is_positive, score) if has_positive and has_negative else math.nan,
        "average_precision": average_precision_score(is_positive, score) if has_positive else math.nan,
    }


def _of_columns(scores: Tensor, targets: Tensor) -> dict[str, float]:
    columns = [_of_column(*column) for column in zip(scores.T.numpy(), targets.double().T.numpy(), strict=True)]
    return {name: statistics.fmean(column[name] for column in columns) for name in columns[0]}


def _of_column(score: Any, target: Any) -> dict[str, float]:
    varies, score_varies = np.ptp(target) > 0, np.ptp(score) > 0
    return {
        "pearson_r": np.corrcoef(score, target)[0, 1] if varies and score_varies else math.nan,
        "r2": r2_score(target, score) if varies else math.nan,
        "mae": mean_absolute_error(target, score),
    }
