"""Splits divide patients, keep the share of every stratum, and do not depend on the order of the file."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from dilated_attention_pytorch.slides.finetune.labels import LabelledCase, Labels, Task
from dilated_attention_pytorch.slides.finetune.splits import CaseSplit, make_splits

TASKS: list[Task] = ["classification", "multilabel", "regression", "survival"]


def made_labels(task: Task, patients: int, seed: int, *, slides: int = 3) -> Labels:
    """Patients of 1 to ``slides`` slides, their targets drawn for each patient."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    cases, owners = [], []
    for patient in range(patients):
        for slide in range(draw.randint(1, slides)):
            cases.append(LabelledCase(f"s{patient}-{slide}", f"p{patient}", (f"s{patient}-{slide}",), None))
            owners.append(patient)
    targets = {
        "classification": torch.arange(patients) % 7 % 3,
        "multilabel": (torch.rand(patients, 3, generator=generator) < torch.tensor([0.5, 0.4, 0.3])).float(),
        "regression": torch.randn(patients, 2, generator=generator),
        "survival": torch.stack([torch.rand(patients, generator=generator), torch.arange(patients) % 3 % 2], 1),
    }[task][owners]
    names = {"classification": ("a", "b", "c"), "multilabel": ("a", "b", "c"), "regression": ("x", "y")}
    return Labels(task, tuple(cases), targets, names.get(task, ("time", "event")))


def patients_of(labels: Labels, part: tuple[int, ...]) -> set[str]:
    return {labels.cases[index].patient for index in part}


def in_words(labels: Labels, splits: list[CaseSplit]) -> list[list[list[str]]]:
    return [
        [sorted(labels.cases[index].name for index in part) for part in (split.train, split.validation, split.test)]
        for split in splits
    ]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("seed", range(5))
def test_every_case_is_in_one_part_and_every_patient_too(task: Task, seed: int) -> None:
    labels = made_labels(task, 61, seed)
    for folds in (1, 2, 5):
        splits = make_splits(labels, folds=folds, validation=0.15, test=0.3, seed=seed)
        assert len(splits) == folds
        for split in splits:
            assert sorted((*split.train, *split.validation, *split.test)) == list(range(len(labels.cases)))
            train, validation, test = (
                patients_of(labels, part) for part in (split.train, split.validation, split.test)
            )
            assert len(train) + len(validation) + len(test) == 61
            assert len(validation) == round(0.15 * 61)
            assert len(test) == round(0.3 * 61) if folds == 1 else len(test) in (61 // folds, 61 // folds + 1)
        if folds > 1:
            tested = Counter(index for split in splits for index in split.test)
            assert tested == Counter(range(len(labels.cases)))


@pytest.mark.parametrize("folds", [1, 4])
def test_every_part_has_its_share_of_each_class(folds: int) -> None:
    labels = made_labels("classification", 60, 0, slides=1)
    whole = Counter(labels.targets.tolist())
    for seed in range(10):
        for split in make_splits(labels, folds=folds, validation=0.2, test=0.25, seed=seed):
            for part, share in ((split.test, 0.25), (split.validation, 0.2), (split.train, 0.55)):
                number = Counter(labels.targets[list(part)].tolist())
                assert all(abs(number[name] - share * whole[name]) < 2 for name in whole), (seed, number)


def test_a_patient_belongs_to_the_rarest_stratum_of_its_cases() -> None:
    """Ten of 40 patients have one slide of the rare class beside two of the common one."""
    cases = tuple(LabelledCase(f"s{n}", f"p{n // 3}", (f"s{n}",), None) for n in range(120))
    targets = torch.tensor([int(n % 12 == 0) for n in range(120)])
    for split in make_splits(
        Labels("classification", cases, targets, ("a", "b")), folds=5, validation=0, test=0.2, seed=1
    ):
        assert targets[list(split.test)].sum() == 2


def test_values_and_events_are_spread_over_the_folds() -> None:
    values = torch.arange(50.0)[:, None]
    cases = tuple(LabelledCase(f"s{n}", f"p{n}", (f"s{n}",), None) for n in range(50))
    for split in make_splits(Labels("regression", cases, values, ("x",)), folds=5, validation=0, test=0.2, seed=0):
        assert Counter((values[list(split.test), 0] // 10).tolist()) == dict.fromkeys(range(5), 2)
    events = torch.stack([values[:, 0], (values[:, 0] < 10).float()], 1)
    for split in make_splits(Labels("survival", cases, events, ("t", "e")), folds=5, validation=0, test=0.2, seed=0):
        assert events[list(split.test), 1].sum() == 2


def test_the_rarest_label_is_spread_over_the_folds() -> None:
    number = torch.arange(50)
    targets = torch.stack([number % 2 == 0, number % 5 == 0, number % 3 > 0], 1).float()
    cases = tuple(LabelledCase(f"s{n}", f"p{n}", (f"s{n}",), None) for n in range(50))
    labels = Labels("multilabel", cases, targets, ("a", "b", "c"))
    for seed in range(3):
        for split in make_splits(labels, folds=5, validation=0, test=0.2, seed=seed):
            assert targets[list(split.test), 1].sum() == 2


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_gives_one_split_whatever_the_order_of_the_lines(task: Task) -> None:
    labels = made_labels(task, 41, 0)
    order = random.Random(0).sample(range(len(labels.cases)), len(labels.cases))
    shuffled = replace(labels, cases=tuple(labels.cases[index] for index in order), targets=labels.targets[order])
    options: dict[str, Any] = {"folds": 3, "validation": 0.1, "test": 0.2}
    splits = in_words(labels, make_splits(labels, **options, seed=0))
    assert splits == in_words(shuffled, make_splits(shuffled, **options, seed=0))
    assert splits != in_words(labels, make_splits(labels, **options, seed=1))


def test_the_splits_of_the_file_win() -> None:
    labels = made_labels("classification", 12, 0, slides=1)
    parts = ["train"] * 6 + ["validation"] * 3 + ["test"] * 3
    given = replace(labels, cases=tuple(replace(c, split=part) for c, part in zip(labels.cases, parts, strict=True)))
    (split,) = make_splits(given, folds=5, validation=0.5, test=0.5, seed=0)
    assert split == CaseSplit((0, 1, 2, 3, 4, 5), (6, 7, 8), (9, 10, 11))
    parts[6:9] = ["train"] * 3
    given = replace(labels, cases=tuple(replace(c, split=part) for c, part in zip(labels.cases, parts, strict=True)))
    (split,) = make_splits(given, folds=1, validation=0.25, test=0.5, seed=0)
    assert (len(split.train), len(split.validation), split.test) == (6, 3, (9, 10, 11))


def of_classes(classes: list[int], **changes: Any) -> Labels:
    cases = tuple(LabelledCase(f"s{n}", f"p{n}", (f"s{n}",), None) for n in range(len(classes)))
    names = tuple(f"class {n}" for n in range(max(classes) + 1))
    return replace(Labels("classification", cases, torch.tensor(classes), names), **changes)


def test_what_cannot_be_split_is_refused() -> None:
    labels = of_classes([0, 1] * 5)
    options: dict[str, Any] = {"folds": 1, "validation": 0.1, "test": 0.2, "seed": 0}
    for changes, sentence in (
        ({"folds": 0}, "expected folds of at least 1, .* got folds 0"),
        ({"validation": 1}, "got folds 1, validation 1 and"),
        ({"test": 0}, "and test 0"),
        ({"folds": 11}, "11 folds need as many patients, got 10; use fewer folds"),
        ({"test": 0.01}, "no case is left for the test, of 10; change the shares"),
        ({"validation": 0.01}, "no case is left for validation"),
        ({"validation": 0.5, "test": 0.5}, "no case is left for training"),
    ):
        with pytest.raises(ValueError, match=sentence):
            make_splits(labels, **{**options, **changes})
    with pytest.raises(ValueError, match=r"fold \d: training has no case with class 1; there are too few patients"):
        make_splits(of_classes([0] * 9 + [1]), **{**options, "folds": 5})
    survival = Labels("survival", labels.cases, torch.tensor([[1.0, 0.0]] * 9 + [[1.0, 1.0]]), ("time", "event"))
    with pytest.raises(ValueError, match=r"fold \d: training has no case with an event"):
        make_splits(survival, **{**options, "folds": 5})
    many = Labels("multilabel", labels.cases, torch.tensor([[1.0, 0.0]] * 9 + [[0.0, 1.0]]), ("er", "pr"))
    with pytest.raises(ValueError, match=r"fold \d: training has no case with er 0"):
        make_splits(many, **{**options, "folds": 5})


def test_a_patient_on_two_sides_is_refused() -> None:
    cases = tuple(
        LabelledCase(f"s{n}", "p", (f"s{n}",), part) for n, part in enumerate(["train", "train", "test", "test"])
    )
    with pytest.raises(ValueError, match="patient 'p' is in two of training, validation and test"):
        make_splits(of_classes([0, 1, 0, 1], cases=cases), folds=1, validation=0, test=0.2, seed=0)
