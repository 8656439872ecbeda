"""Autocast: it chooses the dtype of the operands, and nothing inside the engine."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from dilated_attention_pytorch.tracing import constant_of_graph


@constant_of_graph
def _has_autocast(device_type: str) -> bool:
    # It never changes, and torch.compile of PyTorch 2.11 does not trace the question.
    return torch.amp.is_autocast_available(device_type)


def is_autocast(device_type: str) -> bool:
    """Whether autocast is on for this kind of device; kinds that it does not know have none."""
    return _has_autocast(device_type) and torch.is_autocast_enabled(device_type)


def is_cast(*tensors: Tensor) -> bool:
    """Whether autocast brings these tensors to one dtype."""
    return is_autocast(tensors[0].device.type) and all(tensor.dtype != torch.float64 for tensor in tensors)


def cast_by_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype, as for PyTorch's own attention; as they are without it, and for float64."""
    if not is_cast(*tensors):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(tensor.to(dtype) for tensor in tensors)


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """The engine's own products and sums are in the dtypes that it chose: autocast would round them once more."""
    return torch.autocast(device_type, enabled=False) if is_autocast(device_type) else contextlib.nullcontext()
