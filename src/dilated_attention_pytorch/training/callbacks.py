"""What watches a run: the bar, the metrics file, and the wish to stop."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dilated_attention_pytorch.output import write_text

from .manifest import opened

METRICS_NAME = "metrics.jsonl"


class Interruption(TrainerCallback):
    """Ctrl-C (SIGINT) and SIGTERM end the run after the step at hand, with a checkpoint; a second one ends it at once.

    Args:
        accelerator: of the trainer; a signal to one of its processes stops them all.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        # Python hands signals to the main thread only.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        if sys.stderr.isatty():
            # Straight to the terminal: the signal may have come in the middle of another print.
            os.write(2, b"\nsaving a checkpoint after this step; once more stops at once\n")
        for received, handler in self._before.items():
            signal.signal(received, handler)
        self._before = {}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Ask for a checkpoint and the end, on every process if one was signalled."""
        if self.accelerator.num_processes > 1:
            import torch

            number = torch.tensor(self.signal or 0, device=self.accelerator.device)
            self.signal = int(self.accelerator.gather(number.unsqueeze(0)).max()) or None
        if self.signal is not None and state.global_step < state.max_steps:
            control.should_save = control.should_log = control.should_training_stop = True
        return control


class Metrics(TrainerCallback):
    """One JSON object a line in ``metrics.jsonl``: every entry of the training loss and every evaluation.

    Args:
        run: the run folder.
        step: the step that the run is taken up at; entries after it are dropped, they are written again.
        bytes_after: bytes of text in so many optimizer steps.
    """

    def __init__(self, run: Path, step: int, bytes_after: Callable[[int], float]) -> None:
        self.path = run / METRICS_NAME
        self.bytes_after = bytes_after
        kept = [entry for entry in read_metrics(run) if entry["step"] <= step]
        self._seconds = max((entry["seconds"] for entry in kept), default=0.0)
        self._start = time.perf_counter()
        self._pace = (step, self._start)
        write_text(self.path, "".join(json.dumps(entry) + "\n" for entry in kept))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Append an entry, its rate since the last one included."""
        names = ("bits_per_byte", "eval_bits_per_byte", "learning_rate", "grad_norm")
        values = {name: logs[name] for name in names if logs and name in logs}
        if not values or not state.is_world_process_zero:
            return
        now = time.perf_counter()
        if "bits_per_byte" in values:
            step, then = self._pace
            num_bytes = self.bytes_after(state.global_step) - self.bytes_after(step)
            values["bytes_per_second"] = round(num_bytes / max(now - then, 1e-9))
        self._pace = (state.global_step, now)
        entry = {"step": state.global_step, "seconds": round(self._seconds + now - self._start, 2), **values}
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The entries of ``metrics.jsonl``, up to the first line that was cut off or is none.

    Raises:
        RunError: it cannot be read.
    """
    path = run / METRICS_NAME
    if not path.exists():
        return []
    with opened(path, str(path), "remove it: it only tells how the losses went") as file:
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    entries = []
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(entry, dict) or not all(
            isinstance(value, (int, float)) for value in (entry.get("step"), entry.get("seconds"), *entry.values())
        ):
            break
        entries.append(entry)
    return entries


class Bar(TrainerCallback):
    """A bar with the loss, tokens a second and the time left; on no terminal a line for every evaluation.

    Where an evaluation comes before the first entry of the training loss, its line has none.

    Args:
        console: where to draw.
        tokens_after: tokens in so many optimizer steps.
    """

    def __init__(self, console: Console, tokens_after: Callable[[int], int]) -> None:
        self.console = console
        self.tokens_after = tokens_after
        self.progress = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[held_out]}"), TextColumn("{task.fields[rate]}"), TimeElapsedColumn(),
            TimeRemainingColumn(elapsed_when_finished=True), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self.task = self.progress.add_task("training", total=None, loss="", held_out="", rate="")
        self._pace = (0, 0.0)
        self._rate = 0.0
        self._loss: float | None = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # However the run ends: what is printed next stands below the bar, and the terminal gets its cursor back.
        if self.progress.live.is_started:
            self.progress.stop()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Draw the bar."""
        if not state.is_world_process_zero:
            return
        self.progress.update(self.task, total=state.max_steps, completed=state.global_step)
        self.progress.start()
        self._pace = (state.global_step, time.perf_counter())

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the bar on."""
        step, then = self._pace
        now = time.perf_counter()
        if now - then > 2.0:
            self._rate = (self.tokens_after(state.global_step) - self.tokens_after(step)) / (now - then)
            self._pace = (state.global_step, now)
            self.progress.update(self.task, rate=f"{self._rate:,.0f} tokens/s")
        self.progress.update(self.task, completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show the losses."""
        logs = logs or {}
        if "bits_per_byte" in logs:
            self._loss = logs["bits_per_byte"]
            self.progress.update(self.task, loss=f"{self._loss:.3f} bits/byte")
        if "eval_bits_per_byte" in logs and state.is_world_process_zero:
            held_out = logs["eval_bits_per_byte"]
            self.progress.update(self.task, held_out=f"held-out {held_out:.3f}")
            rate = f", {self._rate:,.0f} tokens/s" if self._rate else ""
            training = "" if self._loss is None else f"training {self._loss:.3f}, "
            self.console.print(
                f"step {state.global_step}/{state.max_steps}: {training}held-out {held_out:.3f} bits per byte{rate}",
                highlight=False,
            )
        # An evaluation is no step: its time is left out of the rate.
        self._pace = (state.global_step, time.perf_counter()) if "eval_loss" in logs else self._pace
