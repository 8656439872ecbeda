"""The accumulation dtype of attention."""

from __future__ import annotations

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, log-sum-exps and sums for inputs of ``dtype``: float64 for float64, else float32.

    >>> accumulation_dtype(torch.bfloat16)
    torch.float32
    """
    return torch.float64 if dtype == torch.float64 else torch.float32
