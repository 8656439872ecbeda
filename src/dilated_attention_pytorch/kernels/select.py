"""Which implementation a call gets: a flat list of refusals, each with its sentence."""

from __future__ import annotations

from typing import Literal, get_args

import torch

Impl = Literal["auto", "aten", "reference"]
IMPLS: tuple[str, ...] = get_args(Impl)


def refusal(impl: str, device_type: str, dtype: torch.dtype) -> str | None:
    """Why ``impl`` cannot compute on this device and dtype; None if it can."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return f"attention is computed in float16, bfloat16, float32 or float64, not {dtype}"
    if impl == "reference":
        return None
    if device_type == "cpu":
        return None
    if device_type != "cuda":
        return (
            f"PyTorch's kernels that return the log-sum-exp exist for cpu and cuda devices, not for {device_type!r}; "
            'impl="reference" runs on any device, in memory that grows with N * M'
        )
    return None


def select(impl: str, device_type: str, dtype: torch.dtype) -> str:
    """The name of the implementation that computes the call.

    Raises:
        ValueError: ``impl`` is no known name.
        NotImplementedError: the named implementation (or, for ``"auto"``, every one that is not dense) cannot run it.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, IMPLS))}, got {impl!r}")
    chosen = "aten" if impl == "auto" else impl
    reason = refusal(chosen, device_type, dtype)
    if reason is not None:
        raise NotImplementedError(f"impl={impl!r} cannot compute this call: {reason}")
    return chosen
