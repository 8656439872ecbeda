"""Measures of a run: bits per byte, throughput and memory."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from dilated_attention_pytorch.models.token_loss import IGNORED

_SIZES = (256, 512, 1024, 2048, 4096, 8192)
_LONG_ENOUGH = 0.01
"""Minimum duration in seconds of a product for measuring the machine's rate."""
_PRODUCTS = 3

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkDone:
    """Amount of work of the first optimizer steps, over all processes."""

    tokens_after: Callable[[int], int]
    """Maps a number of steps to tokens."""
    bytes_after: Callable[[int], float]
    """Maps a number of steps to bytes of text."""
    flops_after: Callable[[int], int]
    """Maps a number of steps to the model's operations, forward and backward."""

    def without(self, steps: Collection[int]) -> WorkDone:
        """The same with ``steps`` (from 1) taken without their batches."""

        def less(after: Callable[[int], _Number]) -> Callable[[int], _Number]:
            left_out = {step: after(step) - after(step - 1) for step in steps}
            return lambda done: after(done) - sum(amount for step, amount in left_out.items() if step <= done)

        return WorkDone(
            tokens_after=less(self.tokens_after), bytes_after=less(self.bytes_after), flops_after=less(self.flops_after)
        )

    def rates(self, first: int, last: int, seconds: float, matrix_product_flops: float) -> dict[str, float]:
        """Tokens, bytes and operations per second of the steps after ``first`` up to ``last``.

        Args:
            first, last: completed optimizer steps at both ends.
            seconds: duration of these steps.
            matrix_product_flops: the machine's operations per second; ``mfu``, the model FLOP utilisation, is the
                fraction of it that the model's own operations use.
        """
        seconds = max(seconds, 1e-9)
        flops = self.flops_after(last) - self.flops_after(first)
        return {
            "tokens_per_second": round((self.tokens_after(last) - self.tokens_after(first)) / seconds),
            "bytes_per_second": round((self.bytes_after(last) - self.bytes_after(first)) / seconds),
            "mfu": float(f"{flops / seconds / matrix_product_flops:.4g}"),
        }


def matrix_product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a square matrix product in ``dtype``: the fastest of a few, of sufficient duration.

    Takes some tenths of a second.
    """
    generator = torch.Generator(device).manual_seed(0)
    rate = 0.0
    for size in _SIZES:
        # Random numbers: a GPU that multiplies zeros draws less power and runs faster than on real data.
        left, right = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
        torch.mm(left, right)
        seconds = min(_seconds(left, right) for _ in range(_PRODUCTS))
        rate = max(rate, 2 * size**3 / seconds)
        if seconds > _LONG_ENOUGH:
            break
    return rate


def _seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    _wait(left.device)
    start = time.perf_counter()
    torch.mm(left, right)
    _wait(left.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process in bytes: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class ByteCount:
    """Sums of nats and bytes, per process.

    Args:
        lengths: int64 ``[vocab_size]``, bytes per token.
        device: device of the losses.
    """

    def __init__(self, lengths: Tensor, device: torch.device) -> None:
        self._lengths = lengths.to(device)
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)
        self._before_step = self._sums.clone()

    def begin_step(self, *, is_again: bool) -> None:
        """Start a step; when a step is repeated, discard what its batches added."""
        if is_again:
            self._sums = self._before_step.clone()
        else:
            self._before_step = self._sums.clone()

    def add(self, nats: Tensor, labels: Tensor) -> None:
        """Add a batch.

        Args:
            nats: a scalar whose mean over the processes is the sum of the losses of all their labels.
            labels: int64 ``[B, N]``; the first of every row, and -100, are not predicted.
        """
        predicted = labels[..., 1:]
        self._sums[0] += nats.detach()
        self._sums[1] += self._lengths[predicted[predicted != IGNORED]].sum()

    def take(self) -> Tensor:
        """float64 ``[1, 2]``: nats and bytes since the last call; resets them."""
        taken, self._sums = self._sums, torch.zeros_like(self._sums)
        return taken[None]


def bits_per_byte(taken: Tensor, copies: int) -> float:
    """Bits per byte from the gathered results of :meth:`ByteCount.take`.

    Args:
        taken: ``[processes, 2]``.
        copies: number of processes that counted the same labels.
    """
    return float(taken[:, 0].mean() / taken[:, 1].sum()) * copies / math.log(2)
