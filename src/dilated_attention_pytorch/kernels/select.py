"""Which implementation a call gets: a flat list of refusals, each with its sentence."""

from __future__ import annotations

import importlib.util
import os
from typing import Literal, get_args

import torch

from . import compilation

Impl = Literal["auto", "triton", "native", "aten", "reference"]
IMPLS: tuple[str, ...] = get_args(Impl)

MAX_HEAD_DIM = 256
"""The widest head that the Triton kernels keep in registers, and the native ones in caches."""


def is_interpreted() -> bool:
    """Whether Triton's interpreter is asked for: kernels then run on CPU tensors, slowly, for checking."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def refusal(
    impl: str, device: torch.device, dtype: torch.dtype, head_dim: int, *, is_segmented: bool = False
) -> str | None:
    """Why ``impl`` cannot compute on this device and dtype with heads this wide; None if it can.

    ``is_segmented``: the pattern has segments of unequal lengths.
    """
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return f"attention is computed in float16, bfloat16, float32 or float64, not {dtype}"
    if impl == "reference":
        return None
    if impl == "triton":
        if is_segmented:
            return 'the Triton kernels count in segments of one length; impl="aten" computes a SegmentedPattern'
        return _triton_refusal(device, dtype, head_dim)
    if impl == "native":
        mismatch = _native_mismatch(device, dtype, head_dim)
        return compilation.refusal() if mismatch is None and not compilation.was_loaded() else mismatch
    if device.type not in ("cpu", "cuda"):
        return (
            f"PyTorch's kernels that return the log-sum-exp exist for cpu and cuda devices, not for {device.type!r}; "
            'impl="reference" runs on any device, in memory that grows with N * M'
        )
    return None


def _native_mismatch(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the native kernels do not take such a call, on whatever machine."""
    if device.type != "cpu":
        return f"the native kernels are for CPUs, not for {device.type!r} tensors"
    if dtype == torch.float64:
        return 'the native kernels accumulate in float32; impl="aten" and impl="reference" compute in float64'
    if head_dim > MAX_HEAD_DIM:
        return f'the native kernels take heads up to {MAX_HEAD_DIM} wide, got {head_dim}; use impl="aten"'
    return None


def _triton_refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (CUDA builds of PyTorch bring it; else: pip install triton)"
    if dtype == torch.float64:
        return 'the Triton kernels accumulate in float32; impl="aten" and impl="reference" compute in float64'
    if head_dim > MAX_HEAD_DIM:
        return f'the Triton kernels keep whole rows of a head on chip, up to {MAX_HEAD_DIM} wide; use impl="aten"'
    if is_interpreted():
        return None
    if device.type != "cuda":
        return (
            f'the Triton kernels run on NVIDIA GPUs, not on {device.type!r} tensors; impl="aten" runs there '
            "(to check the kernels themselves on the CPU, start Python with TRITON_INTERPRET=1)"
        )
    if torch.version.hip is not None:
        return 'the Triton kernels are configured for NVIDIA GPUs, this PyTorch is for AMD; use impl="aten"'
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return (
            "the Triton kernels are configured for compute capability 8.0 (Ampere) and newer, this GPU has "
            f'{capability[0]}.{capability[1]}; use impl="aten"'
        )
    return None


def _automatic(device: torch.device, dtype: torch.dtype, head_dim: int, *, is_segmented: bool) -> str:
    if device.type == "cuda" and refusal("triton", device, dtype, head_dim, is_segmented=is_segmented) is None:
        return "triton"
    if _native_mismatch(device, dtype, head_dim) is None and compilation.can_load():
        return "native"
    return "aten"


def select(impl: str, device: torch.device, dtype: torch.dtype, head_dim: int, *, is_segmented: bool = False) -> str:
    """The name of the implementation that computes the call.

    ``"auto"`` is ``"triton"`` on a CUDA device where that can run, ``"native"`` on a CPU where that can, else
    ``"aten"``. The first call on such a CPU compiles the native kernels, if that was not done before.

    Raises:
        ValueError: ``impl`` is no known name.
        NotImplementedError: the named implementation (or, for ``"auto"``, every one that is not dense) cannot run it.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, IMPLS))}, got {impl!r}")
    chosen = impl
    if impl == "auto":
        chosen = _automatic(device, dtype, head_dim, is_segmented=is_segmented)
    reason = refusal(chosen, device, dtype, head_dim, is_segmented=is_segmented)
    if reason is None and chosen == "native":
        reason = compilation.refusal_to_load()
    if reason is not None:
        raise NotImplementedError(f"impl={impl!r} cannot compute this call: {reason}")
    return chosen
