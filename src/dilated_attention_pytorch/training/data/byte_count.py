"""Losses in bits per byte of the predicted text, for tokens of several bytes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dilated_attention_pytorch.models.token_loss import IGNORED


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
