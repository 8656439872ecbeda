"""Cost of checkpoints: written asynchronously, and with steps that wait for them.

    python -m benchmarks.checkpoints [--steps N]

The demo's run (the preset "cpu") saves a checkpoint every second step. Measured are the time that a step waits for its
checkpoint, the processor time of the thread that writes it, and the time of a step's forward and backward pass. The
cost at the preset's own --save-steps is the sum of waiting and processor time, as if the step lost every core that the
thread uses. The results contain all samples. The weights of both runs must be bitwise equal.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import TrainerCallback

from dilated_attention_pytorch.training import PRESETS, TrainSettings, train
from dilated_attention_pytorch.training.run_checkpoints import CheckpointWriter
from dilated_attention_pytorch.training.trainer import LongNetTrainer

from .study import Study, run


@dataclass(frozen=True, kw_only=True)
class Checkpoints(Study):
    """Settings."""

    steps: int = 13
    """Steps of a run; every second one saves a checkpoint."""


class _Watch(TrainerCallback):
    """Record the time that each step waits for its checkpoint, and the time of the thread that writes it."""

    def __init__(self, writer: CheckpointWriter, seconds: dict[str, list[float]]) -> None:
        self.writer, self.seconds, self.begun = writer, seconds, 0.0
        start = writer.start

        def timed_start(write: Callable[[], None]) -> None:
            def timed() -> None:
                wall, processor = time.perf_counter(), time.thread_time()
                write()
                seconds["writing"].append(time.perf_counter() - wall)
                seconds["writing_processor"].append(time.thread_time() - processor)

            start(timed)

        writer.start = timed_start  # type: ignore[method-assign]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.writer.finish()  # exclude the time that the previous checkpoint takes
        self.begun = time.perf_counter()

    def on_save(self, *_: Any, **__: Any) -> None:
        self.seconds["waiting"].append(time.perf_counter() - self.begun)


@contextmanager
def measured(seconds: dict[str, list[float]]) -> Iterator[None]:
    """Record times of training in this process in ``seconds``."""
    take = LongNetTrainer.training_step

    def timed_step(self: LongNetTrainer, *args: Any, **options: Any) -> torch.Tensor:
        if not seconds["step"]:
            self.add_callback(_Watch(self.checkpoints.writer, seconds))
        start = time.perf_counter()
        loss = take(self, *args, **options)
        seconds["step"].append(time.perf_counter() - start)
        return loss

    LongNetTrainer.training_step = timed_step  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        LongNetTrainer.training_step = take  # type: ignore[method-assign]


def timed(settings: TrainSettings, folder: Path, save_steps: int, is_beside: bool) -> dict[str, Any]:
    """Run once; the cost is that of a checkpoint every ``save_steps`` steps, relative to the time of these steps."""
    seconds: dict[str, list[float]] = {"step": [], "waiting": [], "writing": [], "writing_processor": []}
    with measured(seconds):
        train(replace(settings, async_checkpoints=is_beside), folder, Console(quiet=True))
    middle = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    taken = middle["waiting"] + (middle["writing_processor"] if is_beside else 0.0)
    cost = taken / (save_steps * middle["step"])
    print(f"asynchronous: {is_beside}: {middle}, {cost:.3%} of the time every {save_steps} steps", flush=True)
    return {"async_checkpoints": is_beside, "medians": middle, "cost": cost, "seconds": seconds}


def measure(given: Checkpoints) -> dict[str, Any]:
    """Both runs.

    Raises:
        SystemExit: their weights differ.
    """
    preset = PRESETS["cpu"]()
    settings = replace(
        preset,
        steps=given.steps,
        save_steps=2,
        eval_steps=10_000,
        eval_windows=1,
        final_eval_windows=1,
        quarter_files=1,
        sample_length=1,
        device="cpu",
    )
    if given.tiny:
        settings = replace(settings, context_length=128, model=PRESETS["tiny"]().model)
    with tempfile.TemporaryDirectory(dir=None if given.tiny else ".") as name:
        folder = Path(name)
        results = [timed(settings, folder / str(choice), preset.save_steps, choice) for choice in (True, False)]
        beside, between = (load_file(folder / str(choice) / "model.safetensors") for choice in (True, False))
        if not all(torch.equal(beside[key], between[key]) for key in between):
            raise SystemExit("not published, because the weights of the two runs differ")
        written = sum(path.stat().st_size for path in (folder / "True" / f"checkpoint-{settings.steps}").iterdir())
    return {
        "preset": "cpu",
        "settings": settings.to_dict(),
        "save_steps": preset.save_steps,
        "checkpoint_bytes": written,
        "results": results,
    }


if __name__ == "__main__":
    run(Checkpoints, measure, text=__doc__, name="checkpoints", group="training", tiny={"steps": 5})
