"""Twelve made slides of two kinds, with labels for every task."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.slides.finetune.run import Finetuner
from dilated_attention_pytorch.slides.finetune.settings import FinetuneSettings
from slides.made_slides import SIZE, checkpoint, tiles_of, write_hdf5

SLIDES = 12


@dataclass(frozen=True)
class Cohort:
    """Files of a fine-tuning."""

    folder: Path
    weights: Path

    @property
    def features(self) -> Path:
        return self.folder / "features"

    @property
    def labels(self) -> Path:
        return self.folder / "labels.csv"

    def tuner(self, output: Path, **changes: Any) -> Finetuner:
        """With settings of a second."""
        return Finetuner([self.features], self.labels, self.weights, output, small_settings(**changes))


def small_settings(**changes: Any) -> FinetuneSettings:
    """Three epochs of two steps, with dropout, so that the state of the random numbers matters."""
    given = {
        "layers": (1, 2),
        "epochs": 3,
        "cases_per_step": 4,
        "learning_rate": 3e-3,
        "validation": 0.25,
        "test": 0.25,
        "dropout": 0.2,
        "drop_path": 0.2,
        "device": "cpu",
        **changes,
    }
    return FinetuneSettings(**given)


def make_cohort(folder: Path) -> Cohort:
    """Slides whose first feature tells the class; two slides for each of six patients."""
    with (_made(folder) / "labels.csv").open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(["slide", "patient", "alone", "label", "other", "size", "time", "event"])
        for index in range(SLIDES):
            kind = index // 2 % 2
            features, corners = tiles_of(20 + 3 * index, index)
            features[:15, 0] += 6.0 * kind
            write_hdf5(folder / "features" / f"slide{index}.h5", features, corners, patch_size_level0=SIZE)
            time, event = 10.0 - 3 * kind + index / 10, int(index % 3 > 0)
            names = [f"slide{index}", f"p{index // 2}", f"q{index}"]
            table.writerow([*names, kind, index % 2, 100 + 50.0 * kind + index, time, event])
    return Cohort(folder, checkpoint(folder))


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
