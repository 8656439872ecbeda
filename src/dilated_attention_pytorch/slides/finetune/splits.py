"""Division of the cases into parts for training, validation and test, by patient."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from dilated_attention_pytorch.errors import shortened

from .labels import Labels, Part

_QUANTILES = 5
"""Groups by size of a regression target."""


@dataclass(frozen=True)
class CaseSplit:
    """Indices of the cases of each part, in ascending order."""

    train: tuple[int, ...]
    validation: tuple[int, ...]
    test: tuple[int, ...]


def make_splits(labels: Labels, *, folds: int, validation: float, test: float, seed: int) -> list[CaseSplit]:
    """Divide the patients at random, stratified: each part gets its share of every stratum.

    A patient's stratum is the rarest of those of its cases: the class; the rarest of a case's labels; event or
    censored; the fifth of the cases by the mean of the standardised values. Patients are shuffled within their strata,
    and a part takes patients at equal distances of the strata in a row (systematic sampling), so its number of patients
    is exact, and in each stratum it is off by less than one. (StratifiedGroupKFold of scikit-learn can hold out no
    other share than one of k, and no class with fewer than k cases.)

    Args:
        labels: the cases. If they have splits of their own, these are returned as one split; without validation cases
            there, they are taken from those for training.
        folds: 1 holds the share ``test`` out; k > 1 makes k folds, each of them the test part of one split.
        validation: share of all patients for validation, taken from what the test leaves; 0 for none.
        test: share of all patients to hold out if there is one fold.
        seed: seed of the shuffle. The order of the cases has no influence.

    Raises:
        ValueError: the shares are none, a part is empty, or training has no case of some class.
    """
    if folds < 1 or not 0 <= validation < 1 or not 0 < test < 1:
        raise ValueError(
            f"expected folds of at least 1, 0 <= validation < 1 and 0 < test < 1, got folds {folds}, validation "
            f"{validation} and test {test}"
        )
    patients = _Patients(labels, random.Random(seed))
    everything = range(len(labels.cases))
    given = [[index for index in everything if labels.cases[index].split == part] for part in get_args(Part)]
    if any(given):
        divided = [tuple(given)]
    elif folds == 1:
        rest, held_out = patients.take(everything, test)
        divided = [(rest, [], held_out)]
    else:
        if folds > patients.number:
            raise ValueError(f"{folds} folds need as many patients, got {patients.number}; use fewer folds")
        row = patients.in_a_row(everything)
        divided = []
        for fold in range(folds):
            rest, held_out = patients.divide(everything, row[fold::folds])
            divided.append((rest, [], held_out))
    splits = []
    for number, (train, chosen, held_out) in enumerate(divided, 1):
        if not chosen:
            train, chosen = patients.take(train, validation)
        split = CaseSplit(tuple(train), tuple(chosen), tuple(held_out))
        of_fold = f"fold {number}: " if len(divided) > 1 else ""
        _check(labels, split, of_fold, needs_validation=validation > 0)
        splits.append(split)
    return splits


class _Patients:
    """The patients of the cases, and how they are drawn."""

    def __init__(self, labels: Labels, draw: random.Random) -> None:
        self._owners, self._draw = [case.patient for case in labels.cases], draw
        strata = _strata(labels)
        sizes = strata.bincount().tolist()
        self._stratum: dict[str, tuple[int, int]] = {}
        for patient, stratum in zip(self._owners, strata.tolist(), strict=True):
            rank = (sizes[stratum], stratum)
            self._stratum[patient] = min(rank, self._stratum.get(patient, rank))
        self.number = len(self._stratum)

    def in_a_row(self, cases: Sequence[int]) -> list[str]:
        """The patients of the cases by stratum, shuffled within it."""
        names = sorted({self._owners[index] for index in cases})
        return sorted(self._draw.sample(names, len(names)), key=self._stratum.__getitem__)

    def divide(self, cases: Sequence[int], names: Sequence[str]) -> tuple[list[int], list[int]]:
        """The cases of other patients, and of these."""
        chosen = set(names)
        return (
            [index for index in cases if self._owners[index] not in chosen],
            [index for index in cases if self._owners[index] in chosen],
        )

    def take(self, cases: Sequence[int], share: float) -> tuple[list[int], list[int]]:
        """What is left of the cases, and those of a share of all patients, drawn from the cases."""
        row, start = self.in_a_row(cases), self._draw.random()
        number = min(round(share * self.number), len(row))
        return self.divide(cases, [row[math.floor((index + start) * len(row) / number)] for index in range(number)])


def _strata(labels: Labels) -> Tensor:
    """The stratum of every case, int64 ``[N]``."""
    targets = labels.targets
    if labels.task == "classification":
        return targets
    if labels.task == "survival":
        return targets[:, 1].long()
    if labels.task == "multilabel":
        rarest_first = targets.sum(0).argsort(stable=True)
        has_any, first = targets[:, rarest_first].max(1)
        return torch.where(has_any > 0, first, targets.shape[1])
    targets = targets.double()
    value = ((targets - targets.mean(0)) / targets.std(0)).mean(1)
    inner = torch.arange(1, _QUANTILES, dtype=torch.float64) / _QUANTILES
    return torch.bucketize(value, value.quantile(inner))


def _check(labels: Labels, split: CaseSplit, of_fold: str, *, needs_validation: bool) -> None:
    """Refuse a split that cannot be trained or tested on, or that has a patient on two sides."""
    parts = {"training": split.train, "validation": split.validation, "the test": split.test}
    for name, part in parts.items():
        if not part and (name != "validation" or needs_validation):
            raise ValueError(
                f"{of_fold}no case is left for {name}, of {len(labels.cases)}; change the shares of validation and "
                "test or the number of folds, or the column of splits"
            )
    patients = [{labels.cases[index].patient for index in part} for part in parts.values()]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        for patient in sorted(patients[one] & patients[other])[:1]:
            raise ValueError(
                f"{of_fold}patient {shortened(patient)!r} is in two of training, validation and test; put all cases of "
                "a patient into one part"
            )
    missing = _not_learned(labels, labels.targets[list(split.train)])
    if missing:
        raise ValueError(
            f"{of_fold}training has no case with {shortened(missing[0])}; there are too few patients for these folds "
            "and shares: use fewer folds or smaller shares, or leave the class out"
        )


def _not_learned(labels: Labels, targets: Tensor) -> list[str]:
    """What the targets of the training part never have."""
    if labels.task == "regression":
        return []
    if labels.task == "survival":
        return [] if targets[:, 1].any() else ["an event"]
    if labels.task == "classification":
        return [name for index, name in enumerate(labels.classes) if not (targets == index).any()]
    return [
        f"{name} {value}"
        for name, values in zip(labels.classes, targets.unbind(1), strict=True)
        for value in (0, 1)
        if not (values == value).any()
    ]
