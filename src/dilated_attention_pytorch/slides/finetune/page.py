"""One HTML page of a fine-tuning: metrics, curves, and the cases that were predicted worst."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from .labels import Task


@dataclass(frozen=True)
class RunRecord:
    """One run: a fold with a seed."""

    fold: int
    """From 1."""
    seed: int
    epochs: Sequence[Mapping[str, float]]
    """Of every epoch ``"epoch"`` (from 1), ``"loss"`` of training, and the validation metrics by their names."""
    best_epoch: int
    """The epoch whose weights made the test scores."""
    names: Sequence[str]
    """Names of the test cases."""
    patients: Sequence[str]
    scores: Tensor
    """Of the test cases, as :func:`.metrics.metrics` takes them."""
    targets: Tensor
    maps: Mapping[str, str] = field(default_factory=dict)
    """Links, relative to the page, to the heat maps of test cases by name."""


@dataclass(frozen=True)
class Record:
    """What the page shows."""

    task: Task
    classes: Sequence[str]
    settings: Mapping[str, Any]
    runs: Sequence[RunRecord]


def write_page(folder: Path, record: Record) -> Path:
    """Write ``report.html`` into ``folder`` atomically; returns its path."""
    raise NotImplementedError
