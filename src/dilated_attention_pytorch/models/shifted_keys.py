"""Shifted keys: each row uses the key of the previous row."""

from __future__ import annotations

import torch
from torch import Tensor


def shift_keys(key: Tensor, positions: Tensor, before: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
    """The key of the previous row for each row; 0 for the first row of a document.

    Args:
        key: ``[B, N, G, D]``.
        positions: of the rows, ``[N]`` or ``[B, N]``; 0 is the first row of a text.
        before: ``[B, G, D]``, key of the row before each sequence's first row, for rows that continue a sequence.
        starts: int64 ``[B]``, column of each sequence's first row, which gets the key ``before``; None = 0.

    Returns:
        ``[B, N, G, D]``.
    """
    shifted = torch.cat([torch.zeros_like(key[:, :1]), key[:, :-1]], dim=1)
    if before is not None:
        sequences = torch.arange(key.shape[0], device=key.device)
        shifted[sequences, torch.zeros_like(sequences) if starts is None else starts] = before
    return shifted * (positions > 0).to(key.dtype)[..., None, None]
