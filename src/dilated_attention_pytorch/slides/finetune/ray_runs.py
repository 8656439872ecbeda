"""Folds and seeds of a fine-tuning side by side on a Ray cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from dilated_attention_pytorch.errors import RunError, first_line
from dilated_attention_pytorch.slides.ray_engine import cluster, workers_of_cluster

from .settings import FinetuneSettings

_RETRIES = 3
"""How often Ray starts a worker again that was killed; it goes on after the last complete epochs."""


def train_on_ray(
    slides: Sequence[Path],
    labels: Path,
    checkpoint: Path | None,
    output: Path,
    settings: FinetuneSettings,
    runs: int,
    say: Callable[[str], None],
) -> None:
    """Train the runs of a folder by workers of a Ray cluster, which share them as commands do.

    Args:
        slides, labels, checkpoint, output, settings: as for :class:`.run.Finetuner`; all machines see the files.
        runs: number of runs that are not finished.
        say: called with messages.

    Raises:
        RunError: no cluster answers, or a run cannot be trained.
    """
    with cluster(settings.ray_address):
        workers = workers_of_cluster(settings.device, settings.threads)
        number = min(workers.number, runs)
        say(f"{number:,} workers of the Ray cluster share {runs:,} runs")
        of_worker = dataclasses.replace(
            settings, engine="local", ray_address=None, device=workers.device, threads=workers.threads
        )
        files = (
            [path.absolute() for path in slides],
            labels.absolute(),
            None if checkpoint is None else checkpoint.absolute(),
            output.absolute(),
        )
        task: Any = ray.remote(_train).options(max_retries=_RETRIES, **workers.resources)
        try:
            ray.get([task.remote(*files, of_worker) for _ in range(number)])
        except RunError as error:  # of a task: Ray adds its traceback
            raise RunError(str(getattr(error, "cause", error))) from error
        except ray.exceptions.RayError as error:
            raise RunError(
                f"a worker of the Ray cluster ended ({first_line(error)}); the same command goes on after the last "
                "complete epochs"
            ) from error


def _train(
    slides: Sequence[Path], labels: Path, checkpoint: Path | None, output: Path, settings: FinetuneSettings
) -> None:
    from .run import Finetuner

    Finetuner(slides, labels, checkpoint, output, settings).run()
