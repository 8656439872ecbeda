"""A transformers Trainer that never steps with or saves non-finite values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dilated_attention_pytorch.errors import RunError

from .finite import is_finite_everywhere, what_is_not_finite
from .loss_scaling import LEAST_SCALE, LossScaler
from .micro_batch import MicroBatchTrainer


class FiniteTrainer(MicroBatchTrainer):
    """A trainer that stops, in all processes alike, when a value is not finite, before it does harm.

    Losses and gradients are checked before each step; weights and optimizer states before the
    first step and before they are saved (:meth:`check_state`).
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._step_losses: list[Tensor] = []
        self.scaler: LossScaler | None = None
        if self.args.fp16:
            # accelerate supports neither float16 autocast nor a loss scaler on CPUs.
            self.scaler = LossScaler(self.args.device.type)
            self.accelerator.scaler, self.accelerator.native_amp = self.scaler, True
        self.add_callback(_AtBeginning(self.begin_training))

    def after_divergence(self) -> str:
        """Message after divergence: what is kept, how to resume, and what to change."""
        precision = " or --precision float32" if self.args.bf16 or self.args.fp16 else ""
        return (
            f"{self.how_to_go_on()}. If the same step fails again, the run diverges: begin anew with a lower "
            f"--learning-rate (each of them, if several){precision}"
        )

    def break_off(self, what: str, *, batch_of: int | None) -> NoReturn:
        """Stop this training in every process by raising.

        Args:
            what: reason, as text.
            batch_of: step whose batch caused it; None if unknown.
        """
        raise RunError(f"{what}; {self.after_divergence()}")

    def note_overflow(self, step: int, scale: float) -> None:
        """Log that a step's batches are repeated with the loss scaled by ``scale``."""
        raise NotImplementedError

    def check_loss(self, step: int, losses: list[Tensor]) -> None:
        """Check the (finite) losses of a step's batches before the step is taken."""

    def check_state(self, what: str) -> None:
        """Call :meth:`break_off` if a weight or optimizer state is not finite."""
        broken = self._state_that_is_not_finite()
        if broken is not None:
            self.break_off(f"{what}: NaN or infinity is in {broken}", batch_of=None)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward pass of a batch; returns the loss."""
        loss: Tensor = super().training_step(*args, **kwargs)
        self._step_losses.append(loss)
        return loss

    def _clip_grad_norm(self, model: torch.nn.Module) -> Tensor:
        """Clip the gradient norm to its maximum; returns the norm before clipping.

        All processes stop if a loss or a gradient is not finite in any of them.
        """
        step = self.state.global_step + 1
        norm = self._norm(model)
        while self._overflows(step, norm):
            self._step_losses = self.take_batches_again(model)
            norm = self._norm(model)
        whole = self._whole(norm)
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
        self.check_loss(step, self._step_losses)
        self._step_losses.clear()
        clip_grads_with_norm_(_with_gradient(model), self.args.max_grad_norm, norm)
        return whole

    def _norm(self, model: torch.nn.Module) -> Tensor:
        """The gradient norm, after unscaling."""
        parameters = _with_gradient(model)
        if parameters and self.scaler is not None:
            self.accelerator.unscale_gradients(self.optimizer)
        return get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])

    def _whole(self, norm: Tensor) -> Tensor:
        # Without gradients (a skipped batch) the norm is on the CPU.
        return norm.full_tensor() if isinstance(norm, DTensor) else norm.to(self.args.device)

    def _overflows(self, step: int, norm: Tensor) -> bool:
        """Whether loss scaling made the gradients overflow in any process; if so, lowers the scale."""
        if self.scaler is None or is_finite_everywhere(self._whole(norm)):
            return False
        if self.scaler.get_scale() <= LEAST_SCALE or not is_finite_everywhere(*self._step_losses):
            return False
        self.scaler.lower()
        self.note_overflow(step, self.scaler.get_scale())
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

    def begin_training(self) -> None:
        """Raise :class:`RunError` unless the loaded state is finite."""
        broken = self._state_that_is_not_finite()
        if broken is not None:
            step = self.state.global_step
            found = f"the checkpoint of step {step} cannot be gone on with" if step else "the model cannot be trained"
            raise RunError(
                f"{found}: NaN or infinity is in {broken}; "
                + ("remove it to go on with the one before, or begin anew" if step else "begin with another one")
            )


def _with_gradient(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.grad is not None]


class _AtBeginning(TrainerCallback):
    """Calls ``begin`` after loading and before the first step."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self.begin = begin

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Call ``begin``."""
        self.begin()
