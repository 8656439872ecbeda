"""Ends or rewinds a run when a value is not finite or the loss is a spike."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from dilated_attention_pytorch.errors import RunError

from .checkpoint import fitting, latest_checkpoint
from .faults import Kind, note_fault
from .finite import is_finite_everywhere, what_is_not_finite
from .lifecycle import RewindRequested
from .process_group import from_first
from .run_checkpoints import RunCheckpoints


class SpikeWatch(TrainerCallback, ExportableState):
    """Compares each loss with the median of recent losses, in units of their median absolute deviation.

    The recent losses are stored in every checkpoint, so that a resumed run finds the same spikes.

    Args:
        deviations: threshold above the median, in these units.
        steps: number of recent losses; with fewer there is no spike.
    """

    def __init__(self, deviations: float, steps: int) -> None:
        self.deviations = deviations
        self.losses: deque[float] = deque(maxlen=steps)

    def state(self) -> dict[str, Any]:
        """State that :meth:`on_train_begin` restores."""
        return {"args": {}, "attributes": {"losses": list(self.losses)}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the losses from the checkpoint."""
        saved: Any = state.stateful_callbacks
        with fitting(f"the newest checkpoint of {args.output_dir}"):
            self.losses.extend(map(float, saved[type(self).__name__]["attributes"]["losses"]))

    def spike(self, loss: float) -> str | None:
        """Description of ``loss`` if it is a spike; otherwise records it and returns None."""
        if len(self.losses) == self.losses.maxlen:
            median = statistics.median(self.losses)
            deviation = statistics.median(abs(seen - median) for seen in self.losses)
            if loss > median + self.deviations * deviation > median:
                return (
                    f"its loss {loss:.4g} is {(loss - median) / deviation:.1f} deviations above {median:.4g}, the "
                    f"median of the last {len(self.losses)} steps"
                )
        self.losses.append(loss)
        return None


class Guard(TrainerCallback):
    """Ends or rewinds a run, in all processes alike, if a value is not finite in one of them or the loss is a spike.

    Losses and gradients are checked before each step; weights and optimizer states before the first step and before
    they are saved.

    Args:
        checkpoints: checkpoints of the run.
        tensors: by kind ("weights", "optimizer states"): names and this process's tensors, or its shards of them.
        accelerator: the trainer's.
        windows: number of training windows of the whole run.
    """

    def __init__(
        self,
        checkpoints: RunCheckpoints,
        tensors: Callable[[], Mapping[str, Iterable[tuple[str, Tensor]]]],
        accelerator: Accelerator,
        windows: int,
    ) -> None:
        self.checkpoints, self.tensors, self.accelerator, self.windows = checkpoints, tensors, accelerator, windows
        self.settings, self.run, self.args = checkpoints.settings, checkpoints.run, checkpoints.args
        self.spikes = SpikeWatch(self.settings.spike_deviations, self.settings.spike_window)
        self.state = TrainerState()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raise :class:`RunError` unless the loaded weights and optimizer states are finite."""
        self.state = state
        broken = what_is_not_finite(self.tensors())
        if broken is not None:
            step = state.global_step
            raise RunError(
                f"the checkpoint of step {step} cannot be resumed from: NaN or infinity is in {broken}; remove it to "
                "resume from the one before, or start a new run"
                if step
                else f"the model cannot be trained: NaN or infinity is in {broken}; start with another one"
            )

    def check_step(self, losses: list[Tensor], norm: Tensor) -> None:
        """Check the losses of the step's batches and the norm of their gradient. A collective, as all checks."""
        if is_finite_everywhere(*losses, norm):
            self.check_loss(losses)
            return
        weights = list(self.tensors()["weights"])
        broken = what_is_not_finite(
            {
                "losses": [(f"{loss.item()}", loss) for loss in losses],
                "gradients": [(name, weight.grad) for name, weight in weights if weight.grad is not None],
                "weights": weights,
            }
        )
        broken = broken or "the norm of the gradient, which is too large for its dtype"
        step = self.state.global_step + 1
        self.break_off(f"step {step} is not taken: NaN or infinity is in {broken}", batch_of=step)

    def check_loss(self, losses: list[Tensor]) -> None:
        """Rewind if the finite loss of the step's batches is a spike."""
        if self.settings.spike_deviations == 0 or not losses:
            return
        loss = torch.stack(losses).sum().to(torch.float64)
        spike = self.spikes.spike(self.accelerator.gather(loss.reshape(1)).mean().item())
        if spike is not None:
            self.checkpoints.finish()
            step = self.state.global_step + 1
            self._rewind(f"step {step} is not taken: {spike}", batch_of=step)

    def check_state(self, what: str) -> None:
        """Call :meth:`break_off` if a weight or optimizer state is not finite."""
        broken = what_is_not_finite(self.tensors())
        if broken is not None:
            self.break_off(f"{what}: NaN or infinity is in {broken}", batch_of=None)

    def break_off(self, what: str, *, batch_of: int | None) -> NoReturn:
        """Rewind to the newest checkpoint if the settings say so, else end the run.

        Args:
            what: reason, as text.
            batch_of: step whose batch caused it; None if unknown.
        """
        self.checkpoints.finish()
        if self.settings.on_nan == "skip":
            self._rewind(what, batch_of=batch_of)
        raise RunError(f"{what}; {self.after_divergence()}")

    def after_divergence(self) -> str:
        """Message after divergence: what is kept, how to resume, and what to change."""
        precision = " or --precision float32" if self.args.bf16 or self.args.fp16 else ""
        return (
            f"{self.checkpoints.how_to_resume()}. If the same step fails again, the run diverges: start a new run with "
            f"a lower --learning-rate (each of them, if several){precision}"
        )

    def _rewind(self, what: str, *, batch_of: int | None) -> NoReturn:
        """Log the skipped batch and raise :class:`RewindRequested`.

        Raises:
            RunError: the previous step was skipped too, or an earlier rewind did not help.
        """
        step = self.state.global_step if batch_of is None else batch_of
        in_vain = self.run.skipped if batch_of is not None else self.run.broken
        if in_vain & {step, step - (batch_of is not None)}:
            raise RunError(f"{what}, after a rewind for that reason; {self.after_divergence()}")
        where = "its beginning" if latest_checkpoint(self.run.folder) is None else "the newest checkpoint"
        if batch_of is None:
            self.note("broken", step=step, reason=what)
            raise RewindRequested(f"{what}; rewinding to {where}")
        size = self.windows // self.args.max_steps
        first = (step - 1) * size
        self.note("skipped", step=step, batches=[first, first + size - 1], reason=what)
        raise RewindRequested(
            f"{what}; rewinding to {where}, to skip batches {first:,} to {first + size - 1:,} of step {step}"
        )

    def note(self, kind: Kind, **values: Any) -> None:
        """Log a fault, if this job still holds the run folder."""
        from_first(self.run.check)
        if self.args.should_save:
            note_fault(self.run.folder, kind, **values)
