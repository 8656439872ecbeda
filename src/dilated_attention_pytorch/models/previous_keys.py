"""Keys that are made of the rows before them: the convolution, and the rows that it reads."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class KeyConvolution(nn.Module):
    """``sum_j w[g, d, j] k[t - j, g, d]`` over j < width: a causal convolution of each channel of the keys.

    ``weight`` is ``[G, D, width]``, drawn as that of ``torch.nn.Conv1d``.
    """

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        width: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_kv_heads, head_dim, width, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights uniformly from ``-1 / sqrt(width)`` to ``1 / sqrt(width)``."""
        bound = 1.0 / math.sqrt(self.weight.shape[2])
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, key: Tensor, *previous: Tensor) -> Tensor:
        """``[B, N, G, D]`` from the keys and those of the 1, 2, ... rows before, of the same shape."""
        mixed = key * self.weight[..., 0]
        for distance, rows in enumerate(previous, start=1):
            mixed = mixed + rows * self.weight[..., distance]
        return mixed.to(key.dtype)


def rows_before(rows: Tensor, count: int) -> tuple[Tensor, ...]:
    """The rows 1 to ``count`` before each of ``rows [B, N, G, D]``; 0 where there are none."""
    padded = functional.pad(rows, (0, 0, 0, 0, count, 0))
    return tuple(padded[:, count - distance :][:, : rows.shape[1]] for distance in range(1, count + 1))


def within_document(previous: tuple[Tensor, ...], positions: Tensor) -> tuple[Tensor, ...]:
    """``previous`` with 0 in place of rows of another document; ``positions`` of the rows are ``[N]`` or ``[B, N]``."""
    return tuple(
        rows * (positions >= distance).to(rows.dtype)[..., None, None] for distance, rows in enumerate(previous, 1)
    )
