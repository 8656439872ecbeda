"""transformers' Trainer with losses in bits per byte, and checkpoints that are whole and finite or not there."""

from __future__ import annotations

import errno
import math
import shutil
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.utils.data import Dataset
from transformers import PrinterCallback, TrainingArguments

from dilated_attention_pytorch.errors import RunError

from .checkpoint import STAGING_NAME, checkpoint_step, checkpoints, clear, fitting, latest_checkpoint, publish
from .extension_settings import ExtensionSettings
from .finite_trainer import FiniteTrainer
from .lease import Lease
from .preflight import checkpoint_space
from .settings import TrainSettings

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


def arguments(settings: TrainSettings | ExtensionSettings, run: Path, device: str, **own: Any) -> TrainingArguments:
    """A run's settings in the words of transformers, and what is its ``own``."""
    args = TrainingArguments(
        output_dir=str(run),
        max_steps=settings.steps,
        gradient_accumulation_steps=settings.gradient_accumulation,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=_SCHEDULES[settings.schedule],
        warmup_steps=round(settings.warmup_fraction * settings.steps),
        max_grad_norm=settings.max_grad_norm,
        bf16=settings.precision == "bfloat16",
        use_cpu=device == "cpu",
        seed=settings.seed,
        train_sampling_strategy="sequential",  # the windows are drawn at random already
        logging_steps=settings.log_steps,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=settings.eval_steps,
        prediction_loss_only=True,
        save_strategy="steps",
        save_steps=settings.save_steps,
        dataloader_pin_memory=device == "cuda",
        report_to=[],
        disable_tqdm=True,
        **own,
    )
    # A process uses one device; transformers would spread batches over all that it sees.
    args._n_gpu = min(1, args.n_gpu)
    return args


class RunTrainer(FiniteTrainer):
    """A run in a run folder, whose last complete checkpoints are always there.

    Args:
        model: the model to train.
        args: what transformers is told; ``output_dir`` is the run folder.
        run_id: the run's name for itself, which its checkpoints bear.
        keep: checkpoints to keep.
        lease: the right to write to the run folder; None in the processes that write nothing of their own.
        left: names of checkpoints that are damaged, which go when the next one is complete.
        training, evaluation: windows to train on, and of the evaluations on the way.
        data_collator: makes a batch of them.
        bytes_per_token: bytes of text that a token stands for, on average.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        args: TrainingArguments,
        run_id: str,
        keep: int,
        lease: Lease | None,
        left: Collection[str],
        training: Dataset[Any],
        evaluation: Dataset[Any],
        data_collator: Any,
        bytes_per_token: float = 1.0,
    ) -> None:
        super().__init__(
            model=model, args=args, train_dataset=training, eval_dataset=evaluation, data_collator=data_collator
        )
        self.run = Path(str(args.output_dir))
        self.run_id = run_id
        self.keep = keep
        self.lease = lease
        self.left = left
        self.bytes_per_token = bytes_per_token
        self._is_saving = False
        self.remove_callback(PrinterCallback)

    def train(self, *args: Any, **options: Any) -> Any:
        """See :meth:`transformers.Trainer.train`.

        Raises:
            RunError: the disk refuses what callbacks write.
        """
        try:
            with _said_once():
                return super().train(*args, **options)
        except OSError as error:
            reason = self._disk_trouble(error)
            if reason is None:
                raise
            raise RunError(
                f"{reason} after step {self.state.global_step}; make room and allow writing, {self.how_to_go_on()}"
            ) from error

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with fitting(checkpoint or ""):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with fitting(checkpoint or ""):
            super()._load_rng_state(checkpoint)

    def check_lease(self) -> None:
        """Raise :class:`RunError` if another job has taken the run folder."""
        if self.lease is not None:
            self.lease.check()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Hand ``logs`` to every callback, each loss in bits per byte too.

        Raises:
            RunError: the loss is no longer a number, or another job has taken the run folder.
        """
        self.check_lease()
        for name, said in (("loss", "loss"), ("eval_loss", "held-out loss"), ("final_loss", "held-out loss")):
            if name in logs:
                if not math.isfinite(logs[name]):
                    raise RunError(
                        f"the {said} is {logs[name]} after step {self.state.global_step}; {self.after_divergence()}"
                    )
                logs[name.replace("loss", "bits_per_byte")] = logs[name] / math.log(2) / self.bytes_per_token
        super().log(logs, start_time)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.run / STAGING_NAME) if self._is_saving else str(self.run)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Write the checkpoint aside, give it its name when it is complete, and only then remove the one before."""
        self.check_state(f"the checkpoint of step {self.state.global_step} is not written")
        self._is_saving = True
        try:
            with self.writing(f"the checkpoint of step {self.state.global_step}"):
                self._write_checkpoint(model, trial)
        finally:
            self._is_saving = False

    def _write_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        staging = self.run / STAGING_NAME
        if self.args.should_save:
            self.check_lease()
            clear(staging)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            complete = latest_checkpoint(staging)
            assert complete is not None
            self.check_lease()
            publish(
                complete, self.run, run_id=self.run_id, processes=self.args.world_size, keep=self.keep,
                left=self.left,
            )  # fmt: skip
        self.left = ()

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Raise :class:`RunError` where the disk refuses ``what``, and clear away what was written of it."""
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as error:
            # Of a job that has taken the folder meanwhile nothing is cleared away.
            if self.args.should_save and (self.lease is None or self.lease.is_held()):
                clear(self.run / STAGING_NAME)
            reason = self._disk_trouble(error)
            if reason is None:
                raise
            raise RunError(
                f"{reason} while {what} was written to {self.run}; make room and allow writing, {self.how_to_go_on()}"
            ) from error

    def how_to_go_on(self) -> str:
        """What is left of a run that breaks off, and how to take it up."""
        kept = next((path for path in checkpoints(self.run) if path.name not in self.left), None)
        if kept is None:
            return "no checkpoint was complete yet"
        return f"the checkpoint of step {checkpoint_step(kept)} is kept: go on from it with --resume {self.run}"

    def _disk_trouble(self, error: Exception) -> str | None:
        """Why the disk refused, if it was the disk; torch and safetensors do not hand the error number on."""
        number = error.errno if isinstance(error, OSError) else None
        if number in _DISK_FULL:
            return "the disk is full"
        if number in _READ_ONLY:
            return "the run folder became read-only"
        if not isinstance(error, OSError):
            assert self.model is not None
            parameters = sum(parameter.numel() for parameter in self.model.parameters())
            if shutil.disk_usage(self.run).free < checkpoint_space(parameters):
                return "the disk is full"
        return None


@contextmanager
def _said_once() -> Iterator[None]:
    """A disk that refuses is said once: TensorBoard's thread prints what it hands on to the main thread."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs, /) -> None:
        error = args.exc_value
        if not (isinstance(error, OSError) and error.errno in (*_DISK_FULL, *_READ_ONLY)):
            before(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before
