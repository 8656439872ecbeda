"""The GPU that the kernels are compiled for, by the compiler's name, and the compiler's version."""

from __future__ import annotations

import functools

import torch

AMD = ("gfx942", "gfx950")
"""The AMD GPUs (MI300, MI350) that the kernels are configured for: compiled, never run."""


def target_of(device: torch.device) -> str:
    """The compiler's name of a device: ``"sm_90"`` for compute capability 9.0, ``"gfx942"`` for AMD's MI300.

    Without a GPU, as in Triton's interpreter, ``"sm_90"``.
    """
    if device.type != "cuda":
        return "sm_90"
    if torch.version.hip is not None:  # "gfx942:sramecc+:xnack-" has two feature flags after the name
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        return name.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def triton_version() -> tuple[int, int]:
    """Major and minor version of Triton, e.g. (3, 9)."""
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


@functools.cache
def ptxas_version(target: str) -> tuple[int, int]:
    """Major and minor version of the assembler by which Triton compiles for an NVIDIA GPU, e.g. (13, 4).

    Triton brings two. ``TRITON_PTXAS_PATH`` and ``TRITON_PTXAS_BLACKWELL_PATH`` name others.
    """
    from triton.backends.nvidia.compiler import get_ptxas

    major, minor = get_ptxas(int(target.removeprefix("sm_"))).version.split(".")
    return int(major), int(minor)
