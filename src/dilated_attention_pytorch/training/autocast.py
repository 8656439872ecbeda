"""The dtype of matrix products and attention that each precision of a run stands for."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_DTYPES: Mapping[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8": torch.bfloat16}


def computing_dtype(precision: str) -> torch.dtype:
    """The dtype of matrix products and attention: float32 for every precision that computes without autocast.

    >>> computing_dtype("float16"), computing_dtype("tf32")
    (torch.float16, torch.float32)
    """
    return _DTYPES.get(precision, torch.float32)


def autocast(precision: str, device: str) -> torch.autocast:
    """The context in which a model computes in ``precision`` on a kind of device, "cpu" or "cuda"."""
    dtype = computing_dtype(precision)
    return torch.autocast(device, dtype if dtype != torch.float32 else None, enabled=dtype != torch.float32)
