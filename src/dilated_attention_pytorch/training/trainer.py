"""transformers' Trainer with the optimizer of the run, losses in bits, and checkpoints that are whole or not there."""

from __future__ import annotations

import errno
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.utils.data import Dataset, default_collate
from transformers import PrinterCallback, Trainer, TrainingArguments

from dilated_attention_pytorch.errors import RunError

from .checkpoint import STAGING_NAME, checkpoint_step, latest_checkpoint
from .optimizer import build_optimizer
from .preflight import needed_space
from .settings import TrainSettings
from .windows import Window

_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def arguments(settings: TrainSettings, run: Path, device: str) -> TrainingArguments:
    """The run's settings in the words of transformers."""
    return TrainingArguments(
        output_dir=str(run),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=_SCHEDULES[settings.schedule],
        warmup_steps=round(settings.warmup_fraction * settings.steps),
        max_grad_norm=settings.max_grad_norm,
        bf16=settings.precision == "bfloat16",
        use_cpu=device == "cpu",
        torch_compile=settings.compile,
        seed=settings.seed,
        train_sampling_strategy="sequential",  # the windows are drawn at random already
        logging_steps=settings.log_steps,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=settings.eval_steps,
        prediction_loss_only=True,
        save_strategy="steps",
        save_steps=settings.save_steps,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=device == "cuda",
        report_to=[],
        disable_tqdm=True,
    )


class LongNetTrainer(Trainer):
    """A run of :class:`LongNetForCausalLM` in a run folder.

    Args:
        model: the model to train.
        args: see :func:`arguments`.
        settings: what the run is told.
        training, evaluation: windows to train on, and of the evaluations on the way.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        args: TrainingArguments,
        settings: TrainSettings,
        training: Dataset[Window],
        evaluation: Dataset[Window],
    ) -> None:
        super().__init__(
            model=model, args=args, train_dataset=training, eval_dataset=evaluation, data_collator=default_collate
        )
        self.settings = settings
        self.run = Path(str(args.output_dir))
        self._is_saving = False
        self.remove_callback(PrinterCallback)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """See :func:`build_optimizer`."""
        if self.optimizer is None:
            trained = self.model if model is None else model
            assert trained is not None
            self.optimizer = build_optimizer(trained, self.settings)
        return self.optimizer

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Hand ``logs`` to every callback, each loss in bits per byte too.

        Raises:
            RunError: the loss is no longer a number.
        """
        for name in ("loss", "eval_loss", "final_loss"):
            if name in logs:
                if not math.isfinite(logs[name]):
                    raise RunError(
                        f"the loss is {logs[name]} at step {self.state.global_step}: the run has diverged. The last "
                        "checkpoint is kept; train anew with a lower --learning-rate (and --muon-learning-rate)"
                    )
                logs[name.replace("loss", "bits_per_byte")] = logs[name] / math.log(2)
        super().log(logs, start_time)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.run / STAGING_NAME) if self._is_saving else str(self.run)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Write the checkpoint aside, give it its name when it is complete, and only then remove the one before."""
        staging = self.run / STAGING_NAME
        self._is_saving = True
        try:
            if self.args.should_save:
                shutil.rmtree(staging, ignore_errors=True)
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                complete = latest_checkpoint(staging)
                assert complete is not None
                _write_through(complete)
                self._replace_checkpoint(complete)
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(staging, ignore_errors=True)
            reason = self._disk_trouble(error)
            if reason is None:
                raise
            kept = latest_checkpoint(self.run)
            going_on = "no checkpoint was complete yet" if kept is None else (
                f"the checkpoint of step {checkpoint_step(kept)} is kept: go on from it with --resume {self.run}"
            )  # fmt: skip
            raise RunError(
                f"{reason} while the checkpoint of step {self.state.global_step} was written to {self.run}; "
                f"make room and allow writing, {going_on}"
            ) from error
        finally:
            self._is_saving = False

    def _replace_checkpoint(self, complete: Path) -> None:
        target = self.run / complete.name
        older = [path for path in self.run.glob("checkpoint-*") if path.name != complete.name]
        shutil.rmtree(target, ignore_errors=True)
        os.replace(complete, target)
        for path in older:
            shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(self.run / STAGING_NAME, ignore_errors=True)

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
            if shutil.disk_usage(self.run).free < needed_space(parameters):
                return "the disk is full"
        return None


def _write_through(folder: Path) -> None:
    """Have the files of ``folder`` on the disk before anything else is removed from it."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
