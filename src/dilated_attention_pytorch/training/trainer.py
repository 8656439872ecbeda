"""The trainer of a LongNet: the optimizer of the run, and its share of the processes."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from transformers import TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from dilated_attention_pytorch.models import LongNetForCausalLM

from .checkpoint import OPTIMIZER_NAME, SCHEDULER_NAME, fitting
from .distribution import Distribution
from .lease import Lease
from .optimizer import build_optimizer
from .run_trainer import RunTrainer
from .settings import TrainSettings
from .windows import Window, WindowShare


class LongNetTrainer(RunTrainer):
    """A run of :class:`LongNetForCausalLM` in a run folder.

    Args:
        model: the model to train.
        args: see :func:`run_trainer.arguments`.
        settings: what the run is told.
        distribution: what this process does of it.
        run_id, lease, left: see :class:`RunTrainer`.
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
        run_id: str,
        lease: Lease | None,
        left: Collection[str],
        training: Dataset[Window],
        evaluation: Dataset[Window],
    ) -> None:
        self.settings = settings
        self.distribution = distribution
        super().__init__(
            model=model, args=args, run_id=run_id, keep=settings.keep_checkpoints, lease=lease, left=left,
            training=training, evaluation=evaluation, data_collator=default_collate,
        )  # fmt: skip

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
        with fitting(checkpoint):
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
