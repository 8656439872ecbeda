"""Losses in bits per byte of the very text that was predicted, where tokens stand for several bytes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dilated_attention_pytorch.models.token_loss import IGNORED


class ByteCount:
    """Adds up nats and bytes, on each process its own.

    Args:
        lengths: int64 ``[vocab_size]``, bytes that each token stands for.
        device: where losses are computed.
    """

    def __init__(self, lengths: Tensor, device: torch.device) -> None:
        self._lengths = lengths.to(device)
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)
        self._before_step = self._sums.clone()

    def begin_step(self, *, is_again: bool) -> None:
        """Before the first batch of a step; where it begins again, what was counted of its batches is taken back."""
        if is_again:
            self._sums = self._before_step.clone()
        else:
            self._before_step = self._sums.clone()

    def add(self, nats: Tensor, labels: Tensor) -> None:
        """Count a batch.

        Args:
            nats: a scalar whose mean over the processes is the sum of the losses of all their labels.
            labels: int64 ``[B, N]``; the first of every row, and -100, are predicted by nothing.
        """
        predicted = labels[..., 1:]
        self._sums[0] += nats.detach()
        self._sums[1] += self._lengths[predicted[predicted != IGNORED]].sum()

    def take(self) -> Tensor:
        """float64 ``[1, 2]``: nats and bytes since the last call."""
        taken, self._sums = self._sums, torch.zeros_like(self._sums)
        return taken[None]


def bits_per_byte(taken: Tensor, copies: int) -> float:
    """Bits per byte of what :meth:`ByteCount.take` gave.

    Args:
        taken: ``[processes, 2]``.
        copies: how many processes counted the same labels.
    """
    return float(taken[:, 0].mean() / taken[:, 1].sum()) * copies / math.log(2)
