"""The trainer of runs: finite steps, losses in bits per byte, and atomic, verified checkpoints."""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from accelerate.utils import AutocastKwargs
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.memory import is_out_of_memory

from .checkpoint import (
    OPTIMIZER_NAME,
    SCHEDULER_NAME,
    checkpoint_step,
    checkpoints,
    latest_checkpoint,
)
from .checkpoint_writer import CheckpointWriter
from .extension_settings import ExtensionSettings
from .faults import Kind, note_fault, note_resumed
from .finite import LEAST_SCALE, LossScaler, is_finite_everywhere, what_is_not_finite
from .footprint import largest_file
from .lease import check_exists
from .lifecycle import OpenRun
from .preflight import checkpoint_space, file_limit
from .publishing import clear, publish, remove_leftovers
from .rewind import RewindRequested, SpikeWatch
from .settings import TrainSettings
from .stragglers import OWN_SECONDS, STEP_SECONDS, OwnTime, stragglers
from .together import from_first
from .verification import fitting

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_MAKE_ROOM = "make room and allow writing"
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class RunTrainer(Trainer):
    """Trains in a run folder, which always holds the last complete checkpoints.

    Losses and gradients are checked before each step; weights and optimizer states before the first step and before
    they are saved. If a value is not finite in one process, all of them stop or rewind.

    Args:
        model: the model to train.
        args: transformers' arguments; ``output_dir`` is the run folder.
        settings: settings of the run.
        place: the run folder with its lease. Damaged checkpoints are removed when the next one is complete.
        training, evaluation: training windows, and windows of the evaluations during training.
        data_collator: collate function.
        bytes_per_token: mean bytes of text per token.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        args: TrainingArguments,
        settings: TrainSettings | ExtensionSettings,
        place: OpenRun,
        training: Dataset[Any],
        evaluation: Dataset[Any],
        data_collator: Any,
        bytes_per_token: float = 1.0,
    ) -> None:
        super().__init__(
            model=model, args=args, train_dataset=training, eval_dataset=evaluation, data_collator=data_collator
        )
        self.accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)  # as :func:`.autocast.autocast`
        self.scaler: LossScaler | None = None
        if args.fp16:
            # accelerate supports neither float16 autocast nor a loss scaler on CPUs.
            self.scaler = LossScaler(args.device.type)
            self.accelerator.scaler, self.accelerator.native_amp = self.scaler, True
        self.settings = settings
        self.place = place
        self.run, self.run_id, self.lease, self.staging = place.folder, place.run_id, place.lease, place.staging
        self.left: Collection[str] = place.start.left.keys()
        self.bytes_per_token = bytes_per_token
        self.writer = CheckpointWriter(settings.async_checkpoints)
        self._to_write: list[Callable[[], None]] = []
        self._is_saving = False
        self._logged = place.step
        self._batches: list[dict[str, Any]] = []
        self._num_items: Tensor | int | None = None
        self._step_losses: list[Tensor] = []
        self._spikes = SpikeWatch(settings.spike_deviations, settings.spike_window)
        self.own_time = OwnTime(args)
        self._own_times: list[dict[str, float]] = []
        self._slow_ranks: set[int] = set()
        self._num_weights = sum(weight.numel() for weight in model.parameters())
        self.remove_callback(PrinterCallback)
        for callback in (_AtBeginning(self.begin_training), self._spikes, self.own_time):
            self.add_callback(callback)

    def exchanges_in_forward(self) -> bool:
        """Whether processes communicate in the forward pass."""
        return False

    def step_context(self) -> AbstractContextManager[None]:
        """Context of the forward and backward passes of the current step."""
        return nullcontext()

    def memory_remedy(self) -> str:
        """Advice for a run whose step needs more memory than there is."""
        raise NotImplementedError

    def begin_step(self, *, is_again: bool) -> None:
        """Called before the first batch of a step, also when the step is repeated."""

    def train(self, *args: Any, **options: Any) -> Any:
        """See :meth:`transformers.Trainer.train`.

        Raises:
            RunError: a callback cannot write to the disk.
        """
        try:
            with self.writer:
                result = super().train(*args, **options)
                self.finish_writing()
                return result
        except OSError as error:
            self.check_lease()
            reason, remedy = self._disk_trouble(error)
            if not reason:
                raise
            raise RunError(f"{reason} after step {self.state.global_step}; {remedy}, {self.how_to_go_on()}") from error

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with fitting(checkpoint or ""):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with fitting(checkpoint or ""):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with fitting(checkpoint or ""):
            super()._load_rng_state(checkpoint)

    def check_lease(self) -> None:
        """Raise :class:`RunError` if another job has taken the run folder, or the folder is gone."""
        check_exists(self.run)
        if self.lease is not None:
            self.lease.check()

    def begin_training(self) -> None:
        """Check that the loaded state is finite; then log the resumption and remove what killed jobs left."""
        broken = self._state_that_is_not_finite()
        if broken is not None:
            step = self.state.global_step
            raise RunError(
                f"the checkpoint of step {step} cannot be resumed from: NaN or infinity is in {broken}; remove it to "
                "resume from the one before, or start a new run"
                if step
                else f"the model cannot be trained: NaN or infinity is in {broken}; start with another one"
            )
        if not self.args.should_save:
            return
        remove_leftovers(
            self.run,
            start=self.place.start.checkpoint,
            keep=self.settings.keep_checkpoints,
            left=self.left,
            check=self.check_lease,
        )
        if self.place.before is not None:
            note_resumed(
                self.run,
                self.place.before,
                self.place.start.checkpoint,
                step=self.place.step,
                processes=self.args.world_size,
            )

    def get_batch_samples(self, *args: Any) -> Any:
        """See :meth:`transformers.Trainer.get_batch_samples`: loads the batches of a step and counts their labels."""
        self.own_time.begin_step()
        self.begin_step(is_again=False)
        self._batches, self._num_items = super().get_batch_samples(*args)
        self._step_losses = []
        return self._batches, self._num_items

    def _get_num_items_in_batch(self, *args: Any) -> Any:
        # Counting labels is a collective: processes wait for each other here.
        self.own_time.mark()
        self.own_time.stop()
        return super()._get_num_items_in_batch(*args)

    def training_step(self, *args: Any, **options: Any) -> Tensor:
        """Forward and backward pass of a batch; returns the loss. No-op for a step whose batch is skipped.

        Raises:
            RunError: memory ran out.
        """
        step = self.state.global_step + 1
        if step in self.place.skipped:
            return torch.zeros((), device=self.args.device)
        self.own_time.start()
        try:
            with self.step_context():
                loss: Tensor = super().training_step(*args, **options)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).strip().partition("\n")[0]
            raise RunError(
                f"memory ran out in step {step} ({reason}): {self.memory_remedy()}; {self.how_to_go_on()}"
            ) from error
        if not (self.exchanges_in_forward() or self.accelerator.sync_gradients):
            self.own_time.mark()
        self.own_time.stop()
        self._step_losses.append(loss)
        return loss

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        """See :meth:`transformers.Trainer.compute_loss`."""
        self.own_time.mark()
        if self.exchanges_in_forward():
            self.own_time.stop()
        return super().compute_loss(*args, **options)

    def _repeat_step(self, model: torch.nn.Module) -> None:
        """Take all batches of this step again, from zero gradients."""
        model.zero_grad()
        self.begin_step(is_again=True)
        self._step_losses = []
        for batch in self._batches:
            with nullcontext() if batch is self._batches[-1] else self.accelerator.no_sync(model):
                self.training_step(model, batch, self._num_items)

    def _clip_grad_norm(self, model: torch.nn.Module) -> Tensor:
        """Clip the gradient norm to its maximum; returns the norm before clipping.

        All processes stop if a loss or a gradient is not finite in any of them.
        """
        step = self.state.global_step + 1
        norm, whole = self._norm(model)
        while self._overflows(step, whole):
            self._repeat_step(model)
            norm, whole = self._norm(model)
        # Before clipping: a non-finite norm would turn all gradients into NaN or 0.
        if not is_finite_everywhere(*self._step_losses, whole):
            broken = what_is_not_finite(
                {
                    "losses": [(f"{loss.item()}", loss) for loss in self._step_losses],
                    "gradients": [(name, weight.grad) for name, weight in self._weights() if weight.grad is not None],
                    "weights": self._weights(),
                }
            )
            broken = broken or "the norm of the gradient, which is too large for its dtype"
            self.break_off(f"step {step} is not taken: NaN or infinity is in {broken}", batch_of=step)
        self.check_loss(step)
        clip_grads_with_norm_(_with_gradient(model), self.args.max_grad_norm, norm)
        return whole

    def _norm(self, model: torch.nn.Module) -> tuple[Tensor, Tensor]:
        """The unscaled gradients' norm, as this process's part of it and whole on the device."""
        parameters = _with_gradient(model)
        if parameters and self.scaler is not None:
            self.accelerator.unscale_gradients(self.optimizer)
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        # Without gradients (a skipped batch) the norm is on the CPU.
        return norm, norm.full_tensor() if isinstance(norm, DTensor) else norm.to(self.args.device)

    def _overflows(self, step: int, norm: Tensor) -> bool:
        """Whether loss scaling made the gradients overflow in any process; if so, lowers the scale."""
        if self.scaler is None or is_finite_everywhere(norm):
            return False
        if self.scaler.get_scale() <= LEAST_SCALE or not is_finite_everywhere(*self._step_losses):
            return False
        self.scaler.lower()
        self._note("overflow", step=step, scale=self.scaler.get_scale())
        return True

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        assert self.model is not None
        # During an evaluation FSDP exposes gathered weights; the state dict always has the sharded ones.
        names: dict[Tensor, str] = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if isinstance(value, torch.nn.Parameter):
                names.setdefault(value, name)  # tied weights once
        return ((name, weight) for weight, name in names.items())

    def _states(self) -> Iterator[tuple[str, Tensor]]:
        assert self.optimizer is not None
        names = {weight: name for name, weight in self._weights()}
        return (
            (f"{key} of {names[weight]}", value)
            for weight, state in self.optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        )

    def _state_that_is_not_finite(self) -> str | None:
        return what_is_not_finite({"weights": self._weights(), "optimizer states": self._states()})

    def check_state(self, what: str) -> None:
        """Call :meth:`break_off` if a weight or optimizer state is not finite."""
        broken = self._state_that_is_not_finite()
        if broken is not None:
            self.break_off(f"{what}: NaN or infinity is in {broken}", batch_of=None)

    def _own_time_of_ranks(self) -> dict[str, float]:
        """Each rank's own work since the last entry, for the log; names a rank that is slow for the second time."""
        own, step = self.own_time.take()
        everyones = self.accelerator.gather(torch.tensor([own], device=self.args.device)).tolist()
        figures = {f"{OWN_SECONDS}{rank}": round(seconds, 4) for rank, seconds in enumerate(everyones)}
        self._own_times = [*self._own_times[-1:], {**figures, STEP_SECONDS: round(step, 4)}]
        for straggler in stragglers(self._own_times):
            if straggler.rank not in self._slow_ranks and self.is_world_process_zero():
                self._slow_ranks.add(straggler.rank)
                self.place.say(f"slow rank: {straggler.in_words()}")
        return self._own_times[-1]

    def check_loss(self, step: int) -> None:
        """Rewind if the (finite) loss of the step's batch is a spike."""
        if self.settings.spike_deviations == 0 or not self._step_losses:
            return
        loss = torch.stack(self._step_losses).sum().to(torch.float64)
        spike = self._spikes.spike(self.accelerator.gather(loss.reshape(1)).mean().item())
        if spike is not None:
            self.finish_writing()
            self._rewind(f"step {step} is not taken: {spike}", batch_of=step)

    def break_off(self, what: str, *, batch_of: int | None) -> NoReturn:
        """Rewind to the newest checkpoint if the settings say so, else end the run; in every process.

        Args:
            what: reason, as text.
            batch_of: step whose batch caused it; None if unknown.
        """
        self.finish_writing()
        if self.settings.on_nan == "skip":
            self._rewind(what, batch_of=batch_of)
        raise RunError(f"{what}; {self.after_divergence()}")

    def after_divergence(self) -> str:
        """Message after divergence: what is kept, how to resume, and what to change."""
        precision = " or --precision float32" if self.args.bf16 or self.args.fp16 else ""
        return (
            f"{self.how_to_go_on()}. If the same step fails again, the run diverges: start a new run with a lower "
            f"--learning-rate (each of them, if several){precision}"
        )

    def _rewind(self, what: str, *, batch_of: int | None) -> NoReturn:
        """Log the skipped batch and raise :class:`RewindRequested`.

        Raises:
            RunError: the previous step was skipped too, or an earlier rewind did not help.
        """
        step = self.state.global_step if batch_of is None else batch_of
        in_vain = self.place.skipped if batch_of is not None else self.place.broken
        if in_vain & {step, step - (batch_of is not None)}:
            raise RunError(f"{what}, after the run has gone back for that once; {self.after_divergence()}")
        where = "its beginning" if latest_checkpoint(self.run) is None else "the newest checkpoint"
        if batch_of is None:
            self._note("broken", step=step, reason=what)
            raise RewindRequested(f"{what}; going back to {where}")
        assert isinstance(self.train_dataset, Sized)
        size = len(self.train_dataset) // self.args.max_steps
        first = (step - 1) * size
        self._note("skipped", step=step, batches=[first, first + size - 1], reason=what)
        raise RewindRequested(
            f"{what}; going back to {where}, and on without batches {first:,} to {first + size - 1:,} of step {step}"
        )

    def _note(self, kind: Kind, **values: Any) -> None:
        from_first(self.check_lease)
        if self.args.should_save:
            note_fault(self.run, kind, **values)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Pass ``logs`` to every callback, with each loss in bits per byte as well.

        Raises:
            RunError: the loss is not finite, or another job has taken the run folder.
        """
        self.check_lease()
        if "loss" in logs:
            self._leave_out_skipped(logs)
            if self.args.world_size > 1:
                logs |= self._own_time_of_ranks()
            if self.scaler is not None:
                logs["loss_scale"] = self.scaler.get_scale()
        for name, said in (("loss", "loss"), ("eval_loss", "held-out loss"), ("final_loss", "held-out loss")):
            if name in logs:
                if not math.isfinite(logs[name]):
                    self.finish_writing()
                    raise RunError(
                        f"the {said} is {logs[name]} after step {self.state.global_step}; {self.after_divergence()}"
                    )
                logs[name.replace("loss", "bits_per_byte")] = self.bits_per_byte(name, logs[name])
        super().log(logs, start_time)

    def _leave_out_skipped(self, logs: dict[str, float]) -> None:
        """Correct the mean loss since the last entry for steps without a batch."""
        steps = range(self._logged + 1, self.state.global_step + 1)
        taken = len(steps) - len(self.place.skipped.intersection(steps))
        self._logged = self.state.global_step
        if taken == 0:
            del logs["loss"]
        elif taken < len(steps):
            logs["loss"] *= len(steps) / taken

    def bits_per_byte(self, name: str, loss: float) -> float:
        """Convert the ``loss`` logged as ``name`` from nats per token to bits per byte."""
        return loss / math.log(2) / self.bytes_per_token

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.staging) if self._is_saving else str(self.run)

    def finish_writing(self) -> None:
        """Wait, in every process, for the checkpoint being written.

        Raises:
            RunError: it could not be written.
        """
        from_first(self.writer.finish)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Write the checkpoint to the staging area, rename it when complete, and only then remove old ones."""
        what = f"the checkpoint of step {self.state.global_step}"
        self.check_state(f"{what} is not written")
        self.finish_writing()
        self._is_saving = True
        try:
            with self.writing(what):
                self._stage_checkpoint(model, trial)
        finally:
            self._is_saving = False
        if self.args.should_save:
            self.writer.start(partial(self._complete_checkpoint, what, self._to_write))
        self._to_write = []

    def _stage_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Write the small files of every process; snapshot the large ones for a later write."""
        from_first(self.check_lease)
        if self.args.should_save:
            clear(self.staging)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()

    def _complete_checkpoint(self, what: str, to_write: list[Callable[[], None]]) -> None:
        with self.writing(what):
            for write in to_write:
                write()
            complete = latest_checkpoint(self.staging)
            assert complete is not None
            self.check_lease()
            publish(
                complete,
                self.run,
                run_id=self.run_id,
                processes=self.args.world_size,
                keep=self.settings.keep_checkpoints,
                left=self.left,
                check=self.check_lease,
            )
        self.left = ()

    def weights_to_save(self) -> dict[str, Tensor]:
        """The full weights by name, in the first process. A collective."""
        assert self.model is not None
        return self.model.state_dict()

    def optimizer_to_save(self) -> dict[str, Any]:
        """The full optimizer state, in the first process. A collective."""
        assert self.optimizer is not None
        return self.optimizer.state_dict()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the full model. A collective."""
        weights = self.weights_to_save()
        if self.args.should_save:
            self._to_write.append(partial(self._save, output_dir, self.writer.kept(weights)))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = self.optimizer_to_save()
        if self.args.should_save:
            os.makedirs(output_dir, exist_ok=True)
            path = os.path.join(output_dir, OPTIMIZER_NAME)
            self._to_write.append(partial(_save_state, self.writer.kept(state), path))
            torch.save(self.own_scheduler().state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def own_scheduler(self) -> torch.optim.lr_scheduler.LRScheduler:
        """The learning rate schedule."""
        assert isinstance(self.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
        return self.lr_scheduler

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Context that raises :class:`RunError` if the disk refuses ``what``, and removes what was written of it."""
        try:
            yield
        except (OSError, RuntimeError, SafetensorError, RunError) as error:
            if self.args.should_save:
                clear(self.staging)
            if isinstance(error, RunError):
                raise
            self.check_lease()
            reason, remedy = self._disk_trouble(error)
            if not reason:
                raise
            raise RunError(
                f"{reason} while {what} was written to {self.run}; {remedy}, {self.how_to_go_on()}"
            ) from error

    def how_to_go_on(self) -> str:
        """Message after a stop: what is kept of the run, and how to resume it."""
        self.writer.wait()
        kept = next((path for path in checkpoints(self.run) if path.name not in self.left), None)
        if kept is None:
            return "no checkpoint was complete yet"
        return f"the checkpoint of step {checkpoint_step(kept)} is kept: go on from it with --resume {self.run}"

    def _disk_trouble(self, error: Exception) -> tuple[str, str]:
        """Why the disk refused, "" if it did not, and a remedy. Torch and safetensors pass on no error number."""
        number = error.errno if isinstance(error, OSError) else None
        if number in _DISK_FULL:
            return "the disk is full", _MAKE_ROOM
        if number in _READ_ONLY:
            return "the run folder became read-only", _MAKE_ROOM
        optimizer, weights = self.settings.optimizer, self._num_weights
        if number == errno.EFBIG or (number is None and file_limit() < largest_file(optimizer, weights)):
            return "the limit on the size of a file is reached (ulimit -f)", "raise it"
        is_short = shutil.disk_usage(self.run).free < checkpoint_space(optimizer, weights)
        return ("the disk is full" if is_short and not isinstance(error, OSError) else "", _MAKE_ROOM)


def _save_state(state: dict[str, Any], path: str) -> None:
    torch.save(state, path)


def _with_gradient(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.grad is not None]


class _AtBeginning(TrainerCallback):
    """Calls ``begin`` after loading and before the first step."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self.begin = begin

    def on_train_begin(self, args: TrainingArguments, *given: Any, **others: Any) -> None:
        """Call ``begin``."""
        self.begin()
