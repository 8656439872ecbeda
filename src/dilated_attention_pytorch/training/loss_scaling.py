"""Loss scaling for float16, whose gradients underflow without it and overflow if the scale is too large."""

from __future__ import annotations

from typing import Any

import torch

LEAST_SCALE = 1.0
"""Gradients that overflow at this scale overflow without scaling: then scaling is not the cause."""


class LossScaler(torch.amp.GradScaler):
    """torch's GradScaler, lowered by the trainer, and with support for steps without a batch.

    :class:`torch.amp.GradScaler` skips a step whose gradients overflow, and its batch is lost. Here the trainer
    lowers the scale and repeats the same batches (:class:`.finite_trainer.FiniteTrainer`), so the gradients in
    :meth:`step` are finite. A step whose batch is skipped has no gradients, which torch's scaler rejects.
    """

    def __init__(self, device: str, init_scale: float = 2.0**16) -> None:
        super().__init__(device, init_scale=init_scale)
        self._is_empty = False

    def lower(self) -> None:
        """Lower the scale by its factor, and reset the count of steps without overflow."""
        scale = self.get_scale() * self.get_backoff_factor()
        self.load_state_dict({**self.state_dict(), "scale": scale, "_growth_tracker": 0})
        self.update(scale)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """See :meth:`torch.amp.GradScaler.step`; without gradients, the optimizer's own step."""
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        self._is_empty = all(weight.grad is None for weight in weights)
        return optimizer.step(*args, **kwargs) if self._is_empty else super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """See :meth:`torch.amp.GradScaler.update`; a no-op after a step without gradients."""
        if self._is_empty and new_scale is None:
            self._is_empty = False
            return
        super().update(new_scale)
