"""transformers' Trainer with the optimizer of the run, losses in bits, and checkpoints that are whole or not there."""

from __future__ import annotations

import errno
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, default_collate
from transformers import PrinterCallback, Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.models import LongNetForCausalLM

from .checkpoint import OPTIMIZER_NAME, SCHEDULER_NAME, STAGING_NAME, checkpoint_step, latest_checkpoint
from .distribution import Distribution
from .optimizer import build_optimizer
from .preflight import needed_space
from .settings import TrainSettings
from .windows import Window, WindowShare

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
        distribution: what this process does of it.
        training, evaluation: windows to train on, and of the evaluations on the way.
    """

    model: LongNetForCausalLM

    def __init__(
        self,
        *,
        model: LongNetForCausalLM,
        args: TrainingArguments,
        settings: TrainSettings,
        distribution: Distribution,
        training: Dataset[Window],
        evaluation: Dataset[Window],
    ) -> None:
        self.settings = settings
        self.distribution = distribution
        super().__init__(
            model=model, args=args, train_dataset=training, eval_dataset=evaluation, data_collator=default_collate
        )
        self.run = Path(str(args.output_dir))
        self._is_saving = False
        self.remove_callback(PrinterCallback)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """See :func:`build_optimizer`; weights are split over the processes before, as it steps this process's part."""
        if self.optimizer is None:
            self.distribution.apply(self.model)
            self.optimizer = build_optimizer(self.model, self.settings)
        return self.optimizer

    def _wrap_model(
        self, model: torch.nn.Module, training: bool = True, dataloader: DataLoader[Window] | None = None
    ) -> torch.nn.Module:
        if not training or self.distribution.mesh is None or self.model_wrapped is not self.model:
            return super()._wrap_model(model, training, dataloader)
        # accelerate gives the model its precision; it knows nothing of the mesh and is told to leave the rest alone.
        prepared = self.accelerator.prepare_model(self.model, evaluation_mode=True)
        prepared._is_accelerate_prepared = True
        return self.distribution.wrap(prepared)

    def _clip_grad_norm(self, model: torch.nn.Module) -> Tensor:
        norm: Tensor = super()._clip_grad_norm(model)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def get_train_dataloader(self) -> DataLoader[Window]:
        """The windows of this process and of those that share its sequences, in their order."""
        return self._share(self.train_dataset, self._train_batch_size)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Window]:
        """As :meth:`get_train_dataloader`; every process has as many batches."""
        return self._share(self.eval_dataset if eval_dataset is None else eval_dataset, self.args.eval_batch_size)

    def _share(self, windows: Any, batch_size: int) -> DataLoader[Window]:
        share = WindowShare(windows, len(windows), self.distribution.data_rank, self.distribution.data_size)
        return DataLoader(
            share, batch_size, collate_fn=self.data_collator, pin_memory=self.args.dataloader_pin_memory
        )  # fmt: skip

    # transformers counts the labels of all processes; these say how many of them hold the same ones.
    def get_cp_size(self) -> int:
        """Processes that share a sequence."""
        return self.distribution.context_size

    def get_tp_size(self) -> int:
        """Processes that hold the same rows."""
        return self.distribution.tensor_size

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of this process's rows over the labels of all: the mean over all processes is that of the batch."""
        return super().compute_loss(model, self.distribution.rows(inputs), return_outputs, num_items_in_batch)

    def evaluation_loop(
        self,
        dataloader: DataLoader[Window],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The mean loss over every label that counts, on all processes; nothing else is evaluated."""
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.args.device)
        count = torch.zeros_like(total)
        for batch in dataloader:
            inputs = self._prepare_inputs(batch)
            labels = self._get_num_items_in_batch([inputs], self.args.device)
            assert labels is not None
            with torch.no_grad():
                loss = self.compute_loss(self.model, inputs, num_items_in_batch=labels)
            total += loss * labels
            count += labels
        mean = (self.accelerator.gather(total.unsqueeze(0)).mean() / count).item()
        share = dataloader.dataset
        assert isinstance(share, WindowShare)
        # transformers too leaves out the predictions of an evaluation that needs none.
        return EvalLoopOutput(None, None, {f"{metric_key_prefix}_loss": mean}, share.num_windows)  # type: ignore[arg-type]

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
            raise RunError(
                f"{reason} while the checkpoint of step {self.state.global_step} was written to {self.run}; "
                f"make room and allow writing, {self.how_to_go_on()}"
            ) from error
        finally:
            self._is_saving = False

    def how_to_go_on(self) -> str:
        """What is left of a run that breaks off, and how to take it up."""
        kept = latest_checkpoint(self.run)
        if kept is None:
            return "no checkpoint was complete yet"
        return f"the checkpoint of step {checkpoint_step(kept)} is kept: go on from it with --resume {self.run}"

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model; every process takes part."""
        if not self.distribution.is_sharded:
            super().save_model(output_dir, _internal_call)
            return
        weights = self.distribution.weights(self.model, everywhere=False)
        if self.args.should_save:
            self._save(output_dir, weights)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.distribution.is_sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = self.distribution.optimizer_state(self.model, self._own_optimizer())
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
            torch.save(self._scheduler().state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self.distribution.is_sharded:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        state = torch.load(os.path.join(checkpoint, OPTIMIZER_NAME), map_location="cpu", weights_only=True)
        self.distribution.load_optimizer_state(self.model, self._own_optimizer(), state)
        self._scheduler().load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _own_optimizer(self) -> torch.optim.Optimizer:
        """What :func:`build_optimizer` made, without accelerate's wrapper."""
        assert isinstance(self.optimizer, AcceleratedOptimizer)
        return self.optimizer.optimizer

    def _scheduler(self) -> torch.optim.lr_scheduler.LRScheduler:
        assert isinstance(self.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
        return self.lr_scheduler

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
