"""The scale of the loss in float16, whose gradients underflow without one and overflow with one that is too large."""

from __future__ import annotations

from typing import Any

import torch

LEAST_SCALE = 1.0
"""Gradients that overflow with this scale overflow without any: that is no matter of the scale."""


class LossScaler(torch.amp.GradScaler):
    """torch's scaler of the loss, lowered by the trainer, and with steps without a batch.

    :class:`torch.amp.GradScaler` leaves out the step whose gradients overflow, and its batch is lost. Here the trainer
    lowers the scale and takes the same batches again (:class:`.finite_trainer.FiniteTrainer`): what reaches
    :meth:`step` is finite. A step whose batch is left out has no gradients, which torch's scaler refuses.
    """

    def __init__(self, device: str, init_scale: float = 2.0**16) -> None:
        super().__init__(device, init_scale=init_scale)
        self._is_empty = False

    def lower(self) -> None:
        """Lower the scale by its factor, and count steps without an overflow anew."""
        scale = self.get_scale() * self.get_backoff_factor()
        self.load_state_dict({**self.state_dict(), "scale": scale, "_growth_tracker": 0})
        self.update(scale)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """See :meth:`torch.amp.GradScaler.step`; without any gradient the optimizer's own step."""
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        self._is_empty = all(weight.grad is None for weight in weights)
        return optimizer.step(*args, **kwargs) if self._is_empty else super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """See :meth:`torch.amp.GradScaler.update`; after a step without any gradient nothing."""
        if self._is_empty and new_scale is None:
            self._is_empty = False
            return
        super().update(new_scale)
