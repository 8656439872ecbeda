"""The dtypes of attention: what autocast makes of the operands, and the dtype of scores and sums."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from dilated_attention_pytorch.tracing import constant_of_graph


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, log-sum-exps and sums for inputs of ``dtype``: float64 for float64, else float32.

    >>> accumulation_dtype(torch.bfloat16)
    torch.float32
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def float64_device(device: torch.device) -> torch.device:
    """A device that computes in float64 for ``device``: the CPU for GPUs of Apple and Intel, which may have none."""
    return device if device.type in ("cpu", "cuda", "meta") else torch.device("cpu")


@constant_of_graph
def _has_autocast(device_type: str) -> bool:
    # Constant per process. A function because torch.compile of PyTorch 2.11 cannot trace the call.
    return torch.amp.is_autocast_available(device_type)


def is_autocast(device_type: str) -> bool:
    """Whether autocast is on for a device type; False for types without autocast."""
    return (device_type in ("cpu", "cuda") or _has_autocast(device_type)) and torch.is_autocast_enabled(device_type)


def is_cast(*tensors: Tensor) -> bool:
    """Whether autocast would cast these tensors to one dtype."""
    return is_autocast(tensors[0].device.type) and all(tensor.dtype != torch.float64 for tensor in tensors)


def cast_by_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype, as for PyTorch's SDPA; unchanged without autocast and for float64."""
    if not is_autocast(tensors[0].device.type) or not is_cast(*tensors):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(tensor.to(dtype) for tensor in tensors)


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Disable autocast: the executor chooses the dtypes of its products and sums, and a second cast would lose bits."""
    return torch.autocast(device_type, enabled=False) if is_autocast(device_type) else contextlib.nullcontext()
