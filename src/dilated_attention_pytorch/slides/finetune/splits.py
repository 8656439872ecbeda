"""Division of the cases into parts for training, validation and test, by patient."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention_pytorch.errors import shortened

from .labels import Labels

_QUANTILES = 5
"""Groups by size of a regression target."""


@dataclass(frozen=True)
class Split:
    """Indices of the cases of each part, in ascending order."""

    train: tuple[int, ...]
    validation: tuple[int, ...]
    test: tuple[int, ...]


def make_splits(labels: Labels, *, folds: int, validation: float, test: float, seed: int) -> list[Split]:
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
    draw = random.Random(seed)
    patients = _Patients(labels)
    if any(case.split is not None for case in labels.cases):
        tests = [[case.patient for case in labels.cases if case.split == "test"]]
        validations = [{case.patient for case in labels.cases if case.split == "validation"}]
    elif folds == 1:
        tests, validations = [patients.draw(patients.names, test, draw)], [set()]
    else:
        if folds > len(patients.names):
            raise ValueError(f"{folds} folds need as many patients, got {len(patients.names)}; use fewer folds")
        tests, validations = patients.deal(folds, draw), [set()] * folds
    splits = []
    for number, (held_out, given) in enumerate(zip(map(set, tests), validations, strict=True), 1):
        rest = [name for name in patients.names if name not in held_out]
        share = validation * len(patients.names) / max(len(rest), 1)
        chosen = given or set(patients.draw(rest, min(share, 1.0), draw))
        left = {name for name in rest if name not in chosen}
        split = Split(*(patients.cases_of(part) for part in (left, chosen, held_out)))
        of_fold = f"fold {number}: " if folds > 1 else ""
        _check(labels, split, of_fold, needs_validation=validation > 0)
        splits.append(split)
    return splits


class _Patients:
    """The patients of the cases, and how they are drawn."""

    def __init__(self, labels: Labels) -> None:
        self._cases: defaultdict[str, list[int]] = defaultdict(list)
        for index, case in enumerate(labels.cases):
            self._cases[case.patient].append(index)
        self.names = sorted(self._cases)
        strata = _strata(labels)
        sizes = strata.bincount().tolist()
        self._stratum = {
            name: min((sizes[stratum], stratum) for stratum in strata[indices].tolist())
            for name, indices in self._cases.items()
        }

    def cases_of(self, names: set[str]) -> tuple[int, ...]:
        return tuple(sorted(index for name in names for index in self._cases[name]))

    def _in_a_row(self, names: Sequence[str], draw: random.Random) -> list[str]:
        """The patients by stratum, shuffled within it."""
        shuffled = draw.sample(names, len(names))
        return sorted(shuffled, key=self._stratum.__getitem__)

    def draw(self, names: Sequence[str], share: float, draw: random.Random) -> list[str]:
        """A share of the patients, rounded."""
        number = round(share * len(names))
        start = draw.random()
        chosen = {math.floor((index + start) * len(names) / number) for index in range(number)}
        return [name for index, name in enumerate(self._in_a_row(names, draw)) if index in chosen]

    def deal(self, folds: int, draw: random.Random) -> list[list[str]]:
        """All patients, dealt to folds by turns."""
        row = self._in_a_row(self.names, draw)
        return [row[fold::folds] for fold in range(folds)]


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


def _check(labels: Labels, split: Split, of_fold: str, *, needs_validation: bool) -> None:
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
