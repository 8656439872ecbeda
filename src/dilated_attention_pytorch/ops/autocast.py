"""Autocast: it chooses the dtype of the operands, and nothing inside the engine."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def is_autocast(device_type: str) -> bool:
    """Whether autocast is on for this kind of device; kinds that it does not know have none."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def cast_by_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype, as for PyTorch's own attention; as they are without it, and for float64."""
    device_type = tensors[0].device.type
    if not is_autocast(device_type) or tensors[0].dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(tensor.to(dtype) for tensor in tensors)


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """The engine's own products and sums are in the dtypes that it chose: autocast would round them once more."""
    return torch.autocast(device_type, enabled=False) if is_autocast(device_type) else contextlib.nullcontext()
