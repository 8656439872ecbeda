"""Which preset of `train` for a CPU predicts better after equal operations, and which of them uses far text.

    python -m benchmarks.presets [--steps N] [--folder FOLDER]

Both presets are trained on the source of Python's standard library, as `make demo` does it, with as many operations
(:mod:`.estimate.flops`) as the preset `cpu` takes in N steps. `dilated-attention eval` evaluates them. The same command
goes on where it was stopped.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dilated_attention_pytorch.training import TrainSettings
from dilated_attention_pytorch.training.presets import PRESETS

from .hybrids import Hybrids, flops_of, result_of
from .measured_code import digest
from .study import Study, run

NAMES = ("cpu", "hybrid")


@dataclass(frozen=True, kw_only=True)
class Presets(Study):
    """Settings."""

    steps: int = 900
    """Steps of the preset `cpu`; the other takes its operations."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the trainings."""
    folder: Path = Path("runs/presets")
    """Where the runs are kept, in a folder for each state of the code."""
    windows: int = 32
    """Held-out windows of 8,192 bytes."""


def settings_of(name: str, seed: int, given: Presets) -> TrainSettings:
    """Settings of a preset with as many steps as match the operations of ``cpu``."""
    budget = flops_of(replace(PRESETS["cpu"](), steps=given.steps))
    a_thousand = replace(PRESETS[name](), steps=1000)
    steps = given.steps if name == "cpu" else max(3, round(1000 * budget / flops_of(a_thousand)))
    return replace(
        PRESETS[name](), steps=steps, seed=seed, device="cpu", precision="float32", threads=torch.get_num_threads()
    )


def measure(given: Presets) -> dict[str, Any]:
    """Train and evaluate the presets."""
    as_hybrids = Hybrids(windows=given.windows, recall_texts=0)
    results = []
    for seed in given.seeds:
        for name in NAMES:
            settings = settings_of(name, seed, given)
            found = result_of("code", given.folder / digest("training") / f"{name}-{seed}", settings, as_hybrids)
            results.append({"preset": name, "seed": seed, **found})
    return {"results": results}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        tiny = {"steps": 6, "folder": Path(scratch), "windows": 1}
        run(Presets, measure, text=__doc__, name="presets", group="training", tiny=tiny)
