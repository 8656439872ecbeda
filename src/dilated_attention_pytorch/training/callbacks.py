"""Trainer callbacks: interruption by signals, the metrics file, the progress bar."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dilated_attention_pytorch.output import write_text
from dilated_attention_pytorch.progress import Pace, Show
from dilated_attention_pytorch.readable import in_time

from .faults import cost_of_faults
from .lifecycle import RewindRequested
from .manifest import opened
from .measures import WorkDone, peak_memory
from .stragglers import OWN_SECONDS, STEP_SECONDS

if TYPE_CHECKING:
    from .run_checkpoints import RunCheckpoints

METRICS_NAME = "metrics.jsonl"

# transformers hands callbacks more than they read, which is the **kwargs of their methods.


class Interruption(TrainerCallback):
    """Stop the run with a checkpoint after the current step on SIGINT or SIGTERM; a second signal stops it at once.

    A failed checkpoint write also stops all processes, without waiting for the next checkpoint.

    Args:
        accelerator: the trainer's; a signal to one process stops all of them.
        checkpoints: checkpoints of the run.
    """

    def __init__(self, accelerator: Accelerator, checkpoints: RunCheckpoints) -> None:
        self.accelerator = accelerator
        self.checkpoints = checkpoints
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        # Python delivers signals to the main thread only.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.signal is not None and kind is not None and issubclass(kind, RewindRequested):
            signal.raise_signal(self.signal)  # the checkpoint to rewind to is complete: nothing is lost

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        if sys.stderr.isatty():
            # Write to the file descriptor directly: the signal may have interrupted another print.
            os.write(2, b"\nsaving a checkpoint after this step; once more stops at once\n")
        for received, handler in self._before.items():
            signal.signal(received, handler)
        self._before = {}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Request a checkpoint and the end of training on every process if one received a signal."""
        has_failed = self.checkpoints.writer.has_failed()
        if self.accelerator.num_processes > 1:
            mine = torch.tensor([[self.signal or 0, has_failed]], device=self.accelerator.device)
            number, has_failed = self.accelerator.gather(mine).amax(0).tolist()
            self.signal = number or None
        if has_failed:
            self.checkpoints.finish()
        if self.signal is not None and state.global_step < state.max_steps:
            control.should_save = control.should_log = control.should_training_stop = True
        return control


class Metrics(TrainerCallback):
    """Writes ``metrics.jsonl``: one JSON object per line for every entry of the training loss and every evaluation.

    At the start and at every resumption, a line records the machine's speed (``matrix_product_flops``) and the number
    of steps that the run is to have (``steps``).
    Entries are passed on to the receivers.

    Args:
        run: run folder.
        step: step at which the run resumes; later entries are dropped, since they are written again.
        steps: number of steps of the run.
        work: amount of work of the steps.
        device: device of the run.
        matrix_product_flops: operations per second of all processes together (:func:`matrix_product_rate`).
        receivers: called with the step and the figures of every entry.
    """

    def __init__(
        self,
        run: Path,
        step: int,
        *,
        steps: int,
        work: WorkDone,
        device: torch.device,
        matrix_product_flops: float,
        receivers: Sequence[Callable[[int, Mapping[str, float]], None]],
    ) -> None:
        self.path = run / METRICS_NAME
        self.work = work
        self.device = device
        self.matrix_product_flops = matrix_product_flops
        self.receivers = receivers
        kept = [entry for entry in read_metrics(run) if entry["step"] <= step]
        self._seconds = max((entry["seconds"] for entry in kept), default=0.0)
        begun = {"step": step, "seconds": self._seconds, "matrix_product_flops": matrix_product_flops, "steps": steps}
        # When resumed at the same step again, the earlier speed line is obsolete.
        kept = [entry for entry in kept if "matrix_product_flops" not in entry or entry["step"] < step]
        write_text(self.path, "".join(json.dumps(entry) + "\n" for entry in [*kept, begun]))
        self._start = time.perf_counter()
        self._pace = (step, self._start)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Append an entry, including the rates since the last one."""
        names = (
            "loss",
            "bits_per_byte",
            "eval_bits_per_byte",
            "learning_rate",
            "grad_norm",
            "loss_scale",
            STEP_SECONDS,
        )
        logs = logs or {}
        values = {name: logs[name] for name in names if name in logs}
        values |= {name: seconds for name, seconds in logs.items() if name.startswith(OWN_SECONDS)}
        if not values or not state.is_world_process_zero:
            return
        now, (step, then) = time.perf_counter(), self._pace
        if "bits_per_byte" in values:
            values |= self.work.rates(step, state.global_step, now - then, self.matrix_product_flops)
            cost = cost_of_faults(self.path.parent)
            values |= {
                "peak_memory_bytes": peak_memory(self.device),
                "restarts": cost.restarts,
                "seconds_lost": cost.seconds_lost,
            }
        self._pace = (state.global_step, now)
        entry = {"step": state.global_step, "seconds": round(self._seconds + now - self._start, 2), **values}
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        for receive in self.receivers:
            receive(state.global_step, values)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The entries of ``metrics.jsonl``, up to the first truncated or invalid line.

    Raises:
        RunError: the file cannot be read.
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
    """Progress bar with losses, tokens per second and remaining time.

    Without a terminal: a line per evaluation, and lines in between (:class:`Pace`). The line of an evaluation before
    the first training loss has no training loss.

    Args:
        console: console to draw on.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[held_out]}"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("training", total=None, loss="", held_out="", rate="")
        self._last: Mapping[str, float] = {}
        self._pace = Pace()
        self._begun = (0, 0.0)
        self._evaluated = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Draw the bar."""
        self.progress.update(self.task, total=state.max_steps, completed=state.global_step)
        self.progress.start()
        self._begun = (state.global_step, time.monotonic())

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Advance the bar."""
        self.progress.update(self.task, completed=state.global_step)
        if not self.console.is_terminal and self._pace.is_due():
            first, since = self._begun
            left = (state.max_steps - state.global_step) * (time.monotonic() - since) / (state.global_step - first)
            self._print(f"{self._figures()}about {in_time(left)} left")

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count the batches of an evaluation."""
        self._evaluated += 1
        total = len(kwargs["eval_dataloader"])
        words = f"evaluating, {self._evaluated:,} of {total:,} batches"
        self.progress.update(self.task, held_out=words)
        if not self.console.is_terminal and self._pace.is_due():
            self._print(words)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the next evaluation from its beginning."""
        self._evaluated = 0

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the bar as it is: what follows draws its own."""
        self.close()

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Show the figures of a step."""
        if "bits_per_byte" in figures:
            self._last = figures
            rate = f"{figures['tokens_per_second']:,.0f} tokens/s"
            self.progress.update(self.task, loss=f"{figures['bits_per_byte']:.3f} bits/byte", rate=rate)
        if "eval_bits_per_byte" in figures:
            held_out = f"held-out {figures['eval_bits_per_byte']:.3f}"
            self.progress.update(self.task, held_out=held_out)
            last = self._last
            training = f"training {last['bits_per_byte']:.3f}, " if last else ""
            rate = f", {last['tokens_per_second']:,.0f} tokens/s" if last else ""
            total = self.progress.tasks[self.task].total
            self.console.print(f"step {step}/{total}: {training}{held_out} bits per byte{rate}", highlight=False)

    def _figures(self) -> str:
        last = self._last
        if not last:
            return ""
        return f"training {last['bits_per_byte']:.3f} bits per byte, {last['tokens_per_second']:,.0f} tokens/s, "

    def _print(self, words: str) -> None:
        task = self.progress.tasks[self.task]
        self.console.print(f"step {task.completed:.0f}/{task.total}: {words}", highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Restore the terminal's cursor, so that later output starts below the bar."""
        if self.progress.live.is_started:
            self.progress.stop()


class Evaluating(TrainerCallback):
    """Counts the batches of an evaluation after the training.

    Args:
        show: see :mod:`dilated_attention_pytorch.progress`.
    """

    def __init__(self, show: Show) -> None:
        self._show, self._done = show, 0

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count a batch."""
        self._done += 1
        self._show("evaluating on the held-out text", self._done, len(kwargs["eval_dataloader"]))
