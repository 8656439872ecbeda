"""The trainer of runs: finite steps, losses in bits per byte, checkpoints in the run folder."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sized
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import AutocastKwargs
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainingArguments

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.memory import is_out_of_memory
from dilated_attention_pytorch.progress import spinner

from .checkpoint import OPTIMIZER_NAME, SCHEDULER_NAME, fitting
from .extension_settings import ExtensionSettings
from .finite import is_finite_everywhere
from .guard import Guard
from .lifecycle import OpenRun
from .process_group import from_first
from .run_checkpoints import RunCheckpoints
from .settings import TrainSettings
from .stragglers import OwnTime

_SCALE = 2.0**16
"""First loss scale of float16: gradients underflow without one, and overflow if it is too large."""
_LEAST_SCALE = 1.0
"""Gradients that overflow at this scale overflow without scaling: then scaling is not the cause."""
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "wsd": "warmup_stable_decay", "constant": "constant_with_warmup"}


class RunTrainer(Trainer):
    """Trains in a run folder, which always holds the last complete checkpoints.

    If a value is not finite in one process, all of them end or rewind (:class:`.guard.Guard`).

    Args:
        model: the model to train.
        args: transformers' arguments; ``output_dir`` is the run folder.
        settings: settings of the run.
        run: the run.
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
        run: OpenRun,
        training: Dataset[Any],
        evaluation: Dataset[Any],
        data_collator: Any,
        bytes_per_token: float = 1.0,
    ) -> None:
        super().__init__(
            model=model, args=args, train_dataset=training, eval_dataset=evaluation, data_collator=data_collator
        )
        self.accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)  # as :func:`.autocast.autocast`
        self.scaler: GradScaler | None = None
        if args.fp16:
            # accelerate supports neither float16 autocast nor a loss scaler on CPUs.
            self.scaler = GradScaler(args.device.type, init_scale=_SCALE)
            self.accelerator.scaler, self.accelerator.native_amp = self.scaler, True
        self.settings = settings
        self.run = run
        self.bytes_per_token = bytes_per_token
        self._logged = run.step
        self._batches: list[dict[str, Any]] = []
        self._num_items: Tensor | int | None = None
        self._step_losses: list[Tensor] = []
        num_weights = sum(weight.numel() for weight in model.parameters())
        self.checkpoints = RunCheckpoints(run, settings, args, num_weights)
        assert isinstance(training, Sized)
        self.guard = Guard(self.checkpoints, self._tensors, self.accelerator, len(training))
        self.own_time = OwnTime(args)
        self.remove_callback(PrinterCallback)
        # The loaded state is found to be finite before anything is removed.
        for callback in (self.guard, self.guard.spikes, self.checkpoints, self.own_time):
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
            with closing(self.checkpoints.writer):
                result = super().train(*args, **options)
                from_first(self._finish_last_checkpoint)
                return result
        except OSError as error:
            self.checkpoints.raise_disk_error(error, f"after step {self.state.global_step}")
            raise

    def _finish_last_checkpoint(self) -> None:
        with spinner("writing the last checkpoint", self.run.console):
            self.checkpoints.writer.finish()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with fitting(checkpoint or ""):
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.set_learning_rates()

    def set_learning_rates(self) -> None:
        """Set the learning rates of the next step: a checkpoint has those of the number of steps it was written for."""
        schedule = self.own_scheduler()
        assert isinstance(schedule, LambdaLR)
        factors = [factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
        schedule._last_lr = [rate * factor for rate, factor in zip(schedule.base_lrs, factors, strict=True)]
        for group, rate in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
            group["lr"] = rate

    def _load_scaler(self, checkpoint: str | None) -> None:
        with fitting(checkpoint or ""):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with fitting(checkpoint or ""):
            super()._load_rng_state(checkpoint)

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
        if step in self.run.skipped:
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
                f"memory ran out in step {step} ({reason}): {self.memory_remedy()}; {self.checkpoints.how_to_resume()}"
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

        If the loss scale made gradients overflow, the step's batches are taken again with a lower one:
        :class:`torch.amp.GradScaler` alone would leave them out.
        """
        local_norm, norm = self._norm(model)
        while self._overflows(norm):
            self._repeat_step(model)
            local_norm, norm = self._norm(model)
        # Before clipping: a non-finite norm would turn all gradients into NaN or 0.
        self.guard.check_step(self._step_losses, norm)
        clip_grads_with_norm_(_with_gradient(model), self.args.max_grad_norm, local_norm)
        return norm

    def _norm(self, model: torch.nn.Module) -> tuple[Tensor, Tensor]:
        """The unscaled gradients' norm, as this process's part of it, and in full on the device."""
        parameters = _with_gradient(model)
        if self.scaler is not None:
            assert isinstance(self.optimizer, AcceleratedOptimizer)
            # A skipped batch leaves no gradients, which the scaler refuses to step with.
            self.optimizer.scaler = self.scaler if parameters else None
            if parameters:
                self.accelerator.unscale_gradients(self.optimizer)
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        # Without gradients the norm is on the CPU.
        return norm, norm.full_tensor() if isinstance(norm, DTensor) else norm.to(self.args.device)

    def _overflows(self, norm: Tensor) -> bool:
        """Whether loss scaling made the gradients overflow in any process; if so, lowers the scale."""
        if self.scaler is None or is_finite_everywhere(norm):
            return False
        if self.scaler.get_scale() <= _LEAST_SCALE or not is_finite_everywhere(*self._step_losses):
            return False
        scale = self.scaler.get_scale() * self.scaler.get_backoff_factor()
        self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": scale, "_growth_tracker": 0})
        self.scaler.update(scale)  # the gradients will be unscaled again
        self.guard.note("overflow", step=self.state.global_step + 1, scale=scale)
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

    def _tensors(self) -> dict[str, Iterator[tuple[str, Tensor]]]:
        return {"weights": self._weights(), "optimizer states": self._states()}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Pass ``logs`` to every callback, with each loss in bits per byte as well.

        Raises:
            RunError: the loss is not finite, or another job has taken the run folder.
        """
        self.run.check()
        if "loss" in logs:
            self._leave_out_skipped(logs)
            if self.args.world_size > 1:
                logs |= self.own_time.entry(self.accelerator, self.run.say)
            if self.scaler is not None:
                logs["loss_scale"] = self.scaler.get_scale()
        for name, words in (("loss", "loss"), ("eval_loss", "held-out loss"), ("final_loss", "held-out loss")):
            if name in logs:
                if not math.isfinite(logs[name]):
                    self.checkpoints.finish()
                    step, advice = self.state.global_step, self.guard.after_divergence()
                    raise RunError(f"the {words} is {logs[name]} after step {step}; {advice}")
                logs[name.replace("loss", "bits_per_byte")] = self.bits_per_byte(name, logs[name])
        super().log(logs, start_time)

    def _leave_out_skipped(self, logs: dict[str, float]) -> None:
        """Correct the mean loss since the last entry for steps without a batch."""
        steps = range(self._logged + 1, self.state.global_step + 1)
        taken = len(steps) - len(self.run.skipped.intersection(steps))
        self._logged = self.state.global_step
        if taken == 0:
            del logs["loss"]
        elif taken < len(steps):
            logs["loss"] *= len(steps) / taken

    def bits_per_byte(self, name: str, loss: float) -> float:
        """Convert the ``loss`` logged as ``name`` from nats per token to bits per byte."""
        return loss / math.log(2) / self.bytes_per_token

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.checkpoints.output)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Check the state and write it as a checkpoint, which is complete some steps later. A collective."""
        what = f"the checkpoint of step {self.state.global_step}"
        self.guard.check_state(f"{what} is not written")
        with self.checkpoints.staging(what):
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()

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
            self.checkpoints.write_later(partial(self._save, output_dir), weights)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = self.optimizer_to_save()
        if self.args.should_save:
            os.makedirs(output_dir, exist_ok=True)
            path = os.path.join(output_dir, OPTIMIZER_NAME)
            self.checkpoints.write_later(lambda copied: torch.save(copied, path), state)
            torch.save(self.own_scheduler().state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def own_scheduler(self) -> torch.optim.lr_scheduler.LRScheduler:
        """The learning rate schedule."""
        assert isinstance(self.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
        return self.lr_scheduler


def _with_gradient(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.grad is not None]


def training_arguments(
    settings: TrainSettings | ExtensionSettings, run: Path, device: str, **own: Any
) -> TrainingArguments:
    """A run's settings as ``TrainingArguments``; ``own`` overrides single arguments."""
    if device == "cpu":
        # accelerate imports DeepSpeed if installed, which warns on machines without a GPU unless told.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    falling: dict[str, Any] = {}
    if settings.schedule == "wsd":
        falling = {"num_decay_steps": max(1, round(settings.decay_fraction * settings.steps)), "decay_type": "linear"}
    args = TrainingArguments(
        output_dir=str(run),
        max_steps=settings.steps,
        gradient_accumulation_steps=settings.gradient_accumulation,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=_SCHEDULES[settings.schedule],
        lr_scheduler_kwargs=falling,
        warmup_steps=round(settings.warmup_fraction * settings.steps),
        max_grad_norm=settings.max_grad_norm,
        bf16=settings.precision in ("bfloat16", "float8"),
        fp16=settings.precision == "float16",
        tf32=settings.precision == "tf32" if device == "cuda" else None,
        use_cpu=device == "cpu",
        seed=settings.seed,
        train_sampling_strategy="sequential",  # the windows are already drawn at random
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
    # A process uses one device; transformers would spread batches over all visible ones.
    args._n_gpu = min(1, args.n_gpu)
    return args
