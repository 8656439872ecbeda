"""A transformers Trainer that identifies slow ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .finite_trainer import FiniteTrainer
from .stragglers import OwnTime, Straggler, StragglerWatch


class TimedTrainer(FiniteTrainer):
    """A trainer whose processes time their own work and report the slow one."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.own_time = OwnTime(self.args.device)
        self.stragglers = StragglerWatch(self.own_time, self.args.device, self.name_straggler)
        if self.args.world_size > 1:
            self.add_callback(self.stragglers)

    def name_straggler(self, step: int, straggler: Straggler) -> None:
        """Log and print a slow rank, in the first process."""
        raise NotImplementedError

    def get_batch_samples(self, *args: Any) -> Any:
        """See :meth:`transformers.Trainer.get_batch_samples`: loads the batches of a step and counts their labels."""
        self.own_time.start()
        return super().get_batch_samples(*args)

    def _get_num_items_in_batch(self, *args: Any) -> Any:
        # Counting labels is a collective: processes wait for each other here.
        self.own_time.mark()
        self.own_time.stop()
        return super()._get_num_items_in_batch(*args)

    def training_step(self, *args: Any, **options: Any) -> Tensor:
        """Forward and backward pass of a batch; returns the loss."""
        self.own_time.start()
        loss = super().training_step(*args, **options)
        if not self._is_exchanging:
            self.own_time.mark()
        self.own_time.stop()
        return loss

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        """See :meth:`transformers.Trainer.compute_loss`."""
        self.own_time.mark()
        if self.exchanges_in_forward():
            self.own_time.stop()
        return super().compute_loss(*args, **options)
