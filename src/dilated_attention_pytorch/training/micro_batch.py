"""A transformers Trainer that splits batches when memory runs out."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor
from transformers import Trainer

from dilated_attention_pytorch.errors import RunError


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a device or the CPU ran out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and (
        should_reduce_batch_size(error) or "can't allocate memory" in str(error)
    )


class MicroBatchTrainer(Trainer):
    """A trainer that processes batches in parts of a maximum number of rows, which it lowers when memory runs out.

    Gradients of the parts add up to those of the batch, so optimizer steps are the same up to
    rounding. accelerate's ``find_executable_batch_size`` restarts the whole training loop with a smaller batch, which
    in the middle of a run would be a different run. Here only the current step is repeated, with the same rows.

    If processes communicate in the forward pass (context and tensor parallelism, FSDP), or have started to
    average gradients, one process cannot repeat the step alone: the smaller number of rows is logged
    and the run ends, to be resumed with it from the newest checkpoint.
    """

    def __init__(self, *, most_rows: int | None, **given: Any) -> None:
        super().__init__(**given)
        self.most_rows = most_rows
        self._batches: list[dict[str, Tensor]] = []
        self._num_items: Tensor | int | None = None
        self._step = -1
        self._averages = False
        self._is_exchanging = False

    def exchanges_in_forward(self) -> bool:
        """Whether processes communicate in the forward pass."""
        raise NotImplementedError

    def averages_every_part(self) -> bool:
        """Whether gradients are averaged over processes after every part of a batch."""
        return False

    def how_to_go_on(self) -> str:
        """Message after a stop: what is kept of the run, and how to resume it."""
        raise NotImplementedError

    def begin_step(self, *, is_again: bool) -> None:
        """Called before the first batch of a step, also when the step is repeated."""

    def note_rows(self, rows: int, reason: str) -> None:
        """Log and print that batches are processed in parts of ``rows`` from now on."""
        raise NotImplementedError

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward pass of a batch; returns the loss.

        Raises:
            RunError: memory does not suffice for a single row, or the run must be resumed from its checkpoint.
        """
        if self.state.global_step != self._step:
            self._step, self._batches = self.state.global_step, []
            self.begin_step(is_again=False)
        self._batches.append(inputs)
        self._num_items = num_items_in_batch
        return self.take_batches(model, [inputs])[-1]

    def take_batches_again(self, model: torch.nn.Module) -> list[Tensor]:
        """Repeat all batches of this step from the start; returns their losses."""
        model.zero_grad()
        self.begin_step(is_again=True)
        return self.take_batches(model, self._batches)

    def take_batches(self, model: torch.nn.Module, batches: list[dict[str, Any]]) -> list[Tensor]:
        """Losses of the last ``batches`` of this step; of all of them if the step was repeated for lack of memory.

        Raises:
            RunError: see :meth:`training_step`.
        """
        while True:
            try:
                return [self._take(model, batch) for batch in batches]
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).strip().partition("\n")[0]
            # Outside the except block, so that the frames that hold activations are freed.
            self._take_fewer_rows(batches[-1], reason)
            model.zero_grad()
            gc.collect()
            clear_device_cache()
            self.begin_step(is_again=True)
            batches = self._batches

    def _take(self, model: torch.nn.Module, batch: dict[str, Any]) -> Tensor:
        """The loss of a batch; gradients are synchronised only in the last part of the last batch."""
        parts = self._parts(batch)
        losses = []
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1 and batch is self._batches[-1]
            self._is_exchanging, self._averages = False, is_last and self.accelerator.sync_gradients
            at_once = is_last or self.averages_every_part()
            with contextlib.nullcontext() if at_once else self.accelerator.no_sync(model):
                losses.append(super().training_step(model, part, self._num_items))
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        """See :meth:`transformers.Trainer.compute_loss`."""
        self._is_exchanging = self.exchanges_in_forward()
        loss = super().compute_loss(*args, **options)
        # A forward pass that communicates implies a backward pass that does.
        self._is_exchanging |= self.args.world_size > 1 and self._averages
        return loss

    def _parts(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        rows = _num_rows(batch)
        if self.most_rows is None or rows is None or rows <= self.most_rows:
            return [batch]
        return [
            {name: values[first : first + self.most_rows] for name, values in batch.items()}
            for first in range(0, rows, self.most_rows)
        ]

    def _take_fewer_rows(self, batch: dict[str, Any], reason: str) -> None:
        before = f"memory ran out in step {self.state.global_step + 1} ({reason})"
        rows = _num_rows(batch)
        at_once = None if rows is None else min(rows, self.most_rows or rows)
        if at_once is None or at_once == 1 or self._num_items is None:
            why = (
                "one window is taken at once already"
                if at_once == 1
                else "a batch of packed documents is not taken in parts; take a smaller --batch-size or --max-tokens "
                "with more --gradient-accumulation"
                if at_once is None
                else "this model averages its loss itself, so its batch cannot be taken in parts"
            )
            raise RunError(
                f"{before}, and {why}; begin anew with shorter windows or with gradient checkpointing. "
                f"{self.how_to_go_on()}"
            )
        self.most_rows = (at_once + 1) // 2
        self.note_rows(self.most_rows, before)
        if self._is_exchanging:
            raise RunError(
                f"{before} while other processes waited for this one; it goes on with {self.most_rows} windows at once "
                f"instead of {at_once}: {self.how_to_go_on()}"
            )


def _num_rows(batch: dict[str, Any]) -> int | None:
    """Number of windows in a batch; None if its tensors have no common row dimension."""
    lengths = {len(values) if isinstance(values, Tensor) and values.dim() else None for values in batch.values()}
    return lengths.pop() if len(lengths) == 1 else None
