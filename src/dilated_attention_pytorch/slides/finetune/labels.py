"""Labels of slides or patients, read from a CSV or TSV file and checked."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from dilated_attention_pytorch.errors import shortened
from dilated_attention_pytorch.slides.table import TableRow, read_rows

Task = Literal["classification", "multilabel", "regression", "survival"]
Part = Literal["train", "validation", "test"]

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_MISSING = ("", "nan", "na", "n/a", "#n/a", "null")
_SHOWN_LINES = 20


@dataclass(frozen=True)
class LabelledCase:
    """What gets one prediction: a slide, or the slides of a patient."""

    name: str
    patient: str
    """The patient; without a column of patients the slide itself."""
    slides: tuple[str, ...]
    split: str | None
    """``"train"``, ``"validation"`` or ``"test"``, if the file says it."""


@dataclass(frozen=True)
class Labels:
    """Cases with their targets.

    The targets are int64 ``[N]`` for classification, float32 ``[N, K]`` with 0 and 1 for K labels, float32 ``[N, K]``
    for regression of K columns, and float32 ``[N, 2]`` for survival: time, and 1 for an event or 0 for a censored case.
    """

    task: Task
    cases: tuple[LabelledCase, ...]
    targets: Tensor
    classes: tuple[str, ...]
    """Names of the classes, or of the label columns."""

    @property
    def num_outputs(self) -> int:
        """Values that a model computes for a case: a logit a class or label, a value a column, or one log-risk."""
        return len(self.outputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the scores."""
        return ("risk",) if self.task == "survival" else self.classes


def read_labels(
    path: Path,
    *,
    task: Task | None,
    label_columns: Sequence[str] = ("label",),
    patient_column: str = "patient",
    slide_column: str = "slide",
    time_column: str = "time",
    event_column: str = "event",
    split_column: str = "split",
    by_patient: bool = False,
) -> Labels:
    """Read the labels of a CSV file (or TSV, by its ending), one slide a line below a header, in UTF-8.

    Args:
        path: the file.
        task: what the labels are; None takes several label columns as multilabel and one as classification.
        label_columns: columns of the labels; unused for survival.
        patient_column: column of the patient, optional under its usual name. Cases of a patient are never divided.
        slide_column: column of the slide's name, the name of its file of tiles without its ending.
        time_column: time to the event or to the end of the observation, for survival.
        event_column: 1 for an event, 0 for a censored case, for survival.
        split_column: train, validation or test, optional under its usual name.
        by_patient: take the slides of a patient as one case; their labels must agree.

    Returns:
        The cases in the order of the file. Classes are in numerical order if all are numbers, else in alphabetical
        order.

    Raises:
        ValueError: the file cannot be read, or holds something else; the message names file and line.
    """
    if task is not None and task not in get_args(Task):
        raise ValueError(f"task must be one of {', '.join(get_args(Task))}, got {task!r}")
    columns = (time_column, event_column) if task == "survival" else tuple(label_columns)
    optional = {patient_column: by_patient or patient_column != "patient", split_column: split_column != "split"}
    needed = (slide_column, *columns, *(name for name, is_needed in optional.items() if is_needed))
    if not columns or len({slide_column, *columns, *optional}) < 1 + len(columns) + len(optional):
        raise ValueError(
            f"slides, labels, patients and splits must each have a column of their own, got {slide_column!r}, "
            f"{list(columns)}, {patient_column!r} and {split_column!r}"
        )
    is_text = (slide_column, patient_column, split_column)
    rows = read_rows(path, needed, tuple(optional), filled=is_text, unique=slide_column)
    if task is None:
        task = _guess_task(path, rows, columns)
    if task == "classification":
        targets, classes = _read_classes(path, rows, columns)
    else:
        targets, classes = _read_numbers(rows, columns, task), columns
    cases = _read_cases(rows, slide_column, patient_column, split_column)
    if by_patient:
        cases, targets = _merge_patients(rows, cases, targets)
    _check_targets(path, task, targets, classes)
    return Labels(task, tuple(cases), targets, classes)


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None


def _guess_task(path: Path, rows: Sequence[TableRow], columns: Sequence[str]) -> Task:
    if len(columns) > 1:
        return "multilabel"
    texts = {row.cells[columns[0]] for row in rows}
    if all(map(_is_number, texts)) and not all(float(text).is_integer() for text in texts):
        raise ValueError(
            f"{path}: column {columns[0]!r} holds numbers with decimals, so classes or values may be meant; "
            "name the task, regression or classification"
        )
    return "classification"


def _read_classes(path: Path, rows: Sequence[TableRow], columns: Sequence[str]) -> tuple[Tensor, tuple[str, ...]]:
    """Class indices ``[N]`` and the classes' names."""
    if len(columns) > 1:
        raise ValueError(
            f"classification takes one label column, got {list(columns)}; name one, or the task multilabel"
        )
    (column,) = columns
    _refuse(_missing(rows, columns))
    first: dict[str | float, tuple[str, str]] = {}
    otherwise = []
    for row in rows:
        text = row.cells[column]
        key = float(text) if _is_number(text) else unicodedata.normalize("NFKC", text).casefold()
        before, where = first.setdefault(key, (text, row.where))
        if before != text:
            problem = f"{column} {shortened(text)!r} is written {shortened(before)!r} in {where}"
            otherwise.append((row, f"{row.where}: {problem}; write a class the same in all lines"))
    _refuse(otherwise)
    is_numeric = all(isinstance(key, float) for key in first)
    names = [text for text, _ in first.values()]
    classes = tuple(sorted(names, key=float) if is_numeric else sorted(names))
    index = {name: number for number, name in enumerate(classes)}
    return torch.tensor([index[row.cells[column]] for row in rows]), classes


def _refuse(problems: Iterable[tuple[TableRow, str]]) -> None:
    """Raise for the first problem, if there is one; the message ends with the lines of the others."""
    found = list(problems)
    if found:
        others = sorted({row.line for row, _ in found} - {found[0][0].line})
        shown = ", ".join(map(str, others[:_SHOWN_LINES]))
        more = f" and {len(others) - _SHOWN_LINES} more" if len(others) > _SHOWN_LINES else ""
        raise ValueError(found[0][1] + (f"; also wrong: line {shown}{more}" if others else ""))


def _missing(rows: Sequence[TableRow], columns: Sequence[str]) -> Iterator[tuple[TableRow, str]]:
    for row in rows:
        for column in columns:
            text = row.cells[column]
            if text.casefold() in _MISSING:
                yield row, f"{row.where} has no {column} (got {text!r}); fill it in, or remove the line"


def _read_numbers(rows: Sequence[TableRow], columns: Sequence[str], task: Task) -> Tensor:
    """The columns as float32 ``[N, K]``."""
    _refuse(_missing(rows, columns))
    _refuse(_wrong_numbers(rows, columns, task))
    values = [float(row.cells[column]) for row in rows for column in columns]
    return torch.tensor(values, dtype=torch.float32).view(len(rows), len(columns))


def _wrong_numbers(rows: Sequence[TableRow], columns: Sequence[str], task: Task) -> Iterator[tuple[TableRow, str]]:
    is_binary = {name: task == "multilabel" or (task == "survival" and name == columns[1]) for name in columns}
    for row in rows:
        for column in columns:
            text = row.cells[column]
            value = float(text) if _is_number(text) else math.nan
            got = f"{row.where}: {column} must be"
            if is_binary[column] and value not in (0, 1):
                meant = "; name the task regression if the columns hold numbers" if task == "multilabel" else ""
                yield row, f"{got} 0 or 1, got {shortened(text)!r}{meant}"
            elif not abs(value) <= torch.finfo(torch.float32).max:  # NaN too
                yield row, f"{got} a number such as 12.5, within float32, got {shortened(text)!r}"
            elif task == "survival" and value < 0:
                yield row, f"{got} a time of at least 0, got {shortened(text)!r}"


def _read_cases(
    rows: Sequence[TableRow], slide_column: str, patient_column: str, split_column: str
) -> list[LabelledCase]:
    """One case a slide."""
    parts = get_args(Part)
    given = [(row, row.cells[split_column]) for row in rows if split_column in row.cells]
    _refuse(
        (row, f"{row.where}: {split_column} must be {', '.join(parts)}, got {split!r}")
        for row, split in given
        if split not in parts
    )
    cases, splits = [], dict[str, tuple[str, str]]()
    for row in rows:
        slide, split = row.cells[slide_column], row.cells.get(split_column)
        patient = row.cells.get(patient_column, slide)
        if split is not None:
            before, where = splits.setdefault(patient, (split, row.where))
            if before != split:
                raise ValueError(
                    f"{row.where}: patient {patient!r} is in {split}, and in {before} by {where}; a model would be "
                    "tested on a patient it has seen: put all slides of a patient into one part"
                )
        cases.append(LabelledCase(slide, patient, (slide,), split))
    return cases


def _merge_patients(
    rows: Sequence[TableRow], cases: Sequence[LabelledCase], targets: Tensor
) -> tuple[list[LabelledCase], Tensor]:
    """One case a patient, in the order of their first slides."""
    merged: dict[str, LabelledCase] = {}
    first: dict[str, int] = {}
    for index, (row, case) in enumerate(zip(rows, cases, strict=True)):
        at = first.setdefault(case.patient, index)
        if not targets[index].equal(targets[at]):
            raise ValueError(
                f"{row.where}: the label of patient {case.patient!r} differs from that in {rows[at].where}; "
                "correct it, or take each slide as a case of its own"
            )
        before = merged.setdefault(case.patient, replace(case, name=case.patient, slides=()))
        merged[case.patient] = replace(before, slides=(*before.slides, *case.slides))
    return list(merged.values()), targets[list(first.values())]


def _check_targets(path: Path, task: Task, targets: Tensor, classes: Sequence[str]) -> None:
    """Refuse labels from which nothing can be learned."""
    if task == "classification":
        if len(classes) < 2:
            raise ValueError(f"{path} has one class, {shortened(classes[0])!r}; a classification needs two or more")
    elif task == "survival":
        if not targets[:, 1].any():
            raise ValueError(f"{path} has no event: all {len(targets)} cases are censored; a model needs events")
    else:
        for column, values in zip(classes, targets.unbind(1), strict=True):
            if bool((values == values[0]).all()):
                raise ValueError(
                    f"{path}: column {column!r} is {values[0].item():g} in all {len(targets)} cases; leave it out"
                )
