"""The trainer of runs: losses in bits per byte, and atomic, verified, finite checkpoints."""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sized
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from accelerate.utils import AutocastKwargs
from safetensors import SafetensorError
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PrinterCallback, TrainingArguments

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.estimate.memory import largest_file

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
from .finite_trainer import FiniteTrainer
from .going_back import GoBack
from .lease import check_exists
from .lifecycle import OpenRun
from .preflight import checkpoint_space, file_limit
from .publishing import clear, publish, remove_leftovers
from .settings import TrainSettings
from .spikes import SpikeWatch
from .stragglers import OWN_SECONDS, STEP_SECONDS, OwnTime, stragglers
from .together import from_first
from .verification import fitting

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_MAKE_ROOM = "make room and allow writing"
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class RunTrainer(FiniteTrainer):
    """Trains in a run folder, which always holds the last complete checkpoints.

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
            model=model,
            args=args,
            train_dataset=training,
            eval_dataset=evaluation,
            data_collator=data_collator,
            most_rows=place.most_rows,
        )
        self.accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)  # as :func:`.autocast.autocast`
        self.settings = settings
        self.place = place
        self.run, self.run_id, self.lease, self.staging = place.folder, place.run_id, place.lease, place.staging
        self.left: Collection[str] = place.start.left.keys()
        self.bytes_per_token = bytes_per_token
        self.writer = CheckpointWriter(settings.async_checkpoints)
        self._to_write: list[Callable[[], None]] = []
        self._is_saving = False
        self._logged = place.step
        self._spikes = SpikeWatch(settings.spike_deviations, settings.spike_window)
        self.add_callback(self._spikes)
        self.own_time = OwnTime(args)
        self.add_callback(self.own_time)
        self._own_times: list[dict[str, float]] = []
        self._slow_ranks: set[int] = set()
        self._num_weights = sum(weight.numel() for weight in model.parameters())
        self.remove_callback(PrinterCallback)

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
        """Log the resumption and remove what killed jobs left, after the loaded state was found to be finite."""
        super().begin_training()
        if self.args.should_save:
            remove_leftovers(
                self.run,
                start=self.place.start.checkpoint,
                keep=self.settings.keep_checkpoints,
                left=self.left,
                check=self.check_lease,
            )
        if self.place.before is not None and self.args.should_save:
            note_resumed(
                self.run,
                self.place.before,
                self.place.start.checkpoint,
                step=self.place.step,
                processes=self.args.world_size,
            )

    def training_step(self, *args: Any, **options: Any) -> Tensor:
        """Forward and backward pass of a batch; no-op for a step whose batch is skipped."""
        if self.state.global_step + 1 in self.place.skipped:
            return torch.zeros((), device=self.args.device)
        self.own_time.start()
        loss = super().training_step(*args, **options)
        if not self._is_exchanging:
            self.own_time.mark()
        self.own_time.stop()
        return loss

    def get_batch_samples(self, *args: Any) -> Any:
        """See :meth:`transformers.Trainer.get_batch_samples`: loads the batches of a step and counts their labels."""
        self.own_time.begin_step()
        return super().get_batch_samples(*args)

    def _get_num_items_in_batch(self, *args: Any) -> Any:
        # Counting labels is a collective: processes wait for each other here.
        self.own_time.mark()
        self.own_time.stop()
        return super()._get_num_items_in_batch(*args)

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        """See :meth:`transformers.Trainer.compute_loss`."""
        self.own_time.mark()
        if self.exchanges_in_forward():
            self.own_time.stop()
        return super().compute_loss(*args, **options)

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

    def check_loss(self, step: int, losses: list[Tensor]) -> None:
        """Call :meth:`break_off` if the loss of the batch is a spike."""
        if self.settings.spike_deviations == 0 or not losses:
            return
        loss = torch.stack(losses).sum().to(torch.float64)
        spike = self._spikes.spike(self.accelerator.gather(loss.reshape(1)).mean().item())
        if spike is not None:
            self.finish_writing()
            self._go_back(f"step {step} is not taken: {spike}", batch_of=step)

    def break_off(self, what: str, *, batch_of: int | None) -> NoReturn:
        """Go back to the newest checkpoint if the settings say so, else end the run."""
        self.finish_writing()
        if self.settings.on_nan == "skip":
            self._go_back(what, batch_of=batch_of)
        super().break_off(what, batch_of=batch_of)

    def _go_back(self, what: str, *, batch_of: int | None) -> NoReturn:
        """Log the skipped batch and raise :class:`GoBack`.

        Raises:
            RunError: the previous step was skipped too, or going back did not help before.
        """
        step = self.state.global_step if batch_of is None else batch_of
        in_vain = self.place.skipped if batch_of is not None else self.place.broken
        if in_vain & {step, step - (batch_of is not None)}:
            raise RunError(f"{what}, after the run has gone back for that once; {self.after_divergence()}")
        where = "its beginning" if latest_checkpoint(self.run) is None else "the newest checkpoint"
        if batch_of is None:
            self._note("broken", step=step, reason=what)
            raise GoBack(f"{what}; going back to {where}")
        assert isinstance(self.train_dataset, Sized)
        size = len(self.train_dataset) // self.args.max_steps
        first = (step - 1) * size
        self._note("skipped", step=step, batches=[first, first + size - 1], reason=what)
        raise GoBack(
            f"{what}; going back to {where}, and on without batches {first:,} to {first + size - 1:,} of step {step}"
        )

    def _note(self, kind: Kind, **values: Any) -> None:
        from_first(self.check_lease)
        if self.args.should_save:
            note_fault(self.run, kind, **values)

    def note_rows(self, rows: int, reason: str) -> None:
        """Log and print that batches are processed in parts of ``rows`` from now on."""
        step, rank = self.state.global_step + 1, self.args.process_index
        self.check_lease()
        note_fault(self.run, "out of memory", step=step, rows=rows, rank=rank, reason=reason)
        on = f"rank {rank}: " if self.args.world_size > 1 else ""
        self.place.say(f"{on}{reason}: windows are taken {rows} at once from now on, as many as before in every step")

    def note_overflow(self, step: int, scale: float) -> None:
        """Log that a step's batches are repeated with the loss scaled by ``scale``."""
        self._note("overflow", step=step, scale=scale)

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
