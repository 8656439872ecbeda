"""transformers' Trainer that takes its batches in smaller parts where memory runs out."""

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
    """Whether a device, or the CPU, had no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and (
        should_reduce_batch_size(error) or "can't allocate memory" in str(error)
    )


class MicroBatchTrainer(Trainer):
    """A trainer whose batches are taken in parts of at most so many rows; fewer when memory runs out.

    Gradients of the parts add up to those of the batch, so the optimizer takes the step that it would have taken, to
    rounding. accelerate's ``find_executable_batch_size`` calls a whole training loop anew with a smaller batch: in the
    middle of a run that would be another run. Here the step at hand begins anew, with the same rows.

    Where processes exchange anything in the forward pass (context and tensor parallelism, FSDP), or have begun to
    average their gradients, one alone cannot begin anew while others wait for it: the smaller number of rows is written
    down and the run ends, to go on with it from its newest checkpoint.
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
        """Whether other processes wait for this one in the forward pass."""
        raise NotImplementedError

    def averages_every_part(self) -> bool:
        """Whether the gradients of every part of a batch are averaged over the processes at once."""
        return False

    def how_to_go_on(self) -> str:
        """What is left of a run that breaks off, and how to take it up."""
        raise NotImplementedError

    def begin_step(self, *, is_again: bool) -> None:
        """Called before the first batch of a step, and where it begins again with all of its batches."""

    def note_rows(self, rows: int, reason: str) -> None:
        """Write down and say that batches are taken in parts of ``rows`` from now on."""
        raise NotImplementedError

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """The loss of a batch, after its backward pass.

        Raises:
            RunError: there is no memory for a single row, or the run has to go on from its checkpoint.
        """
        if self.state.global_step != self._step:
            self._step, self._batches = self.state.global_step, []
            self.begin_step(is_again=False)
        self._batches.append(inputs)
        self._num_items = num_items_in_batch
        return self.take_batches(model, [inputs])[-1]

    def take_batches_again(self, model: torch.nn.Module) -> list[Tensor]:
        """The losses of all batches of this step, taken anew as if nothing of it had been done."""
        model.zero_grad()
        self.begin_step(is_again=True)
        return self.take_batches(model, self._batches)

    def take_batches(self, model: torch.nn.Module, batches: list[dict[str, Any]]) -> list[Tensor]:
        """The losses of the last ``batches`` of this step, of all of them if it began anew for want of memory.

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
            # Here the frames that held activations are gone.
            self._take_fewer_rows(batches[-1], reason)
            model.zero_grad()
            gc.collect()
            clear_device_cache()
            self.begin_step(is_again=True)
            batches = self._batches

    def _take(self, model: torch.nn.Module, batch: dict[str, Any]) -> Tensor:
        """The loss of a batch; all but its last part, and batches before the last, leave gradients unsynchronized."""
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
        # What is exchanged in the forward pass is exchanged in the backward pass too.
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
                "one window is taken at once already" if at_once == 1
                else "a batch of packed documents is not taken in parts; take a smaller --batch-size or --max-tokens "
                "with more --gradient-accumulation" if at_once is None
                else "this model averages its loss itself, so its batch cannot be taken in parts"
            )  # fmt: skip
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
    """Windows in a batch; None where what it holds has no rows in common."""
    lengths = {len(values) if isinstance(values, Tensor) and values.dim() else None for values in batch.values()}
    return lengths.pop() if len(lengths) == 1 else None
