"""Selection of a call's implementation: a flat list of conditions with error messages."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.tracing import constant_of_graph

from . import compilation
from .cpu_choice import is_native_chosen
from .device_check import trusts_triton
from .triton.target import AMD, target_of

Impl = Literal["auto", "triton", "native", "aten", "reference"]
IMPLS: tuple[str, ...] = get_args(Impl)

_REMOVED = {
    "gluon": ("the warp-specialised forward for compute capability 9.0", 'impl="triton"'),
    "triton-fp8": ("the forward with products of e4m3 numbers", 'impl="triton"'),
    "cudnn": ("cuDNN's attention over strided views", 'impl="triton", or impl="aten" for PyTorch\'s flash kernels'),
}
"""Implementations of earlier versions, which no device had run: what each was, and what to use."""

MAX_HEAD_DIM = 256
"""Largest head dimension that fits into the Triton kernels' registers and the native kernels' caches."""

_default: Impl = "auto"
"""What ``impl="auto"`` stands for, see :func:`implementation`."""
_CHOSEN: dict[tuple[object, ...], str] = {}
"""Answers of :func:`select` that are constant per process: "triton" on a GPU, any on a CPU with its kernels loaded."""


@contextmanager
def implementation(impl: Impl) -> Iterator[None]:
    """Within the context, ``impl="auto"`` is ``impl`` in every call of this package, in all threads of the process.

    It applies to :func:`~dilated_attention_pytorch.attend`, to blocks chosen by content, and to what calls them:
    modules, models, caches and sharded calls. A call that names an implementation keeps it. A call that ``impl`` does
    not support raises, as if it named ``impl``. ``"auto"`` restores the automatic choice within another context.

    The implementation is chosen in the forward pass, and its backward pass follows that choice outside the context as
    well. What activation checkpointing recomputes is a new forward pass: run backward within the context too.
    ``torch.compile`` compiles anew where the choice changed; a graph of ``torch.export`` or of CUDA keeps the choice
    under which it was captured. Like :func:`torch.nn.attention.sdpa_kernel`, it sets a state of the process: contexts
    of different threads must not overlap.

    Raises:
        ValueError: ``impl`` is not a known name.

    >>> from dilated_attention_pytorch.ops import implementation
    >>> q = torch.randn(1, 100, 4, 8)
    >>> with implementation("aten"):
    ...     out = attend(q, q, q, DilatedPattern([16, 64], [1, 4]))
    """
    global _default
    check_impl(impl)
    before, _default = _default, impl
    try:
        yield
    finally:
        _default = before


def default_of(impl: str) -> str:
    """``impl``, and for ``"auto"`` what it stands for in this context."""
    return _default if impl == "auto" else impl


def is_interpreted() -> bool:
    """Whether Triton's interpreter is enabled: kernels then run on CPU tensors, slowly, for checking."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def refusal(
    impl: str, device: torch.device, dtype: torch.dtype, head_dim: int, *, is_segmented: bool = False
) -> str | None:
    """Why ``impl`` does not support this device, dtype and head dimension; None if it does.

    ``is_segmented``: the pattern has segments of unequal lengths.
    """
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return f"attention is computed in float16, bfloat16, float32 or float64, not {dtype}"
    if dtype == torch.float64 and device.type == "mps":
        return "Apple's GPUs have no float64: use float32, or tensors on the CPU"
    if impl == "reference":
        return None
    if impl == "triton":
        if is_segmented:
            return 'the Triton kernels count in segments of one length; impl="aten" computes a SegmentedPattern'
        return _triton_refusal(device, dtype, head_dim)
    if impl == "native":
        mismatch = _native_mismatch(device, dtype, head_dim)
        return compilation.refusal() if mismatch is None and not compilation.was_loaded() else mismatch
    return None


def _native_mismatch(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the native kernels do not support a call, on any machine."""
    if device.type != "cpu":
        return f"the native kernels are for CPUs, not for {device.type!r} tensors"
    if dtype == torch.float64:
        return 'the native kernels accumulate in float32; impl="aten" and impl="reference" compute in float64'
    if head_dim > MAX_HEAD_DIM:
        return f'the native kernels take heads up to {MAX_HEAD_DIM} wide, got {head_dim}; use impl="aten"'
    return None


def _triton_refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    if dtype == torch.float64:
        return 'the Triton kernels accumulate in float32; impl="aten" and impl="reference" compute in float64'
    if head_dim > MAX_HEAD_DIM:
        return (
            f"the Triton kernels keep whole rows of a head on chip, up to {MAX_HEAD_DIM} wide, got {head_dim}; use "
            'impl="aten"'
        )
    return _triton_refusal_of_device(device)


@constant_of_graph
def _triton_refusal_of_device(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (CUDA builds of PyTorch bring it; else: pip install triton)"
    if is_interpreted():
        return None
    if device.type != "cuda":
        return (
            f'the Triton kernels are for NVIDIA and AMD GPUs, not for {device.type!r} tensors; impl="aten" runs there '
            "(to check the kernels themselves on the CPU, start Python with TRITON_INTERPRET=1)"
        )
    if torch.version.hip is not None:
        target = target_of(device)
        if target not in AMD:
            return (
                f"the Triton kernels are configured for the AMD GPUs {' and '.join(AMD)}, this one is {target}; "
                'use impl="aten"'
            )
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return (
            "the Triton kernels are configured for compute capability 8.0 (Ampere) and newer, this GPU has "
            f'{capability[0]}.{capability[1]}; use impl="aten"'
        )
    return None


def _automatic(device: torch.device, dtype: torch.dtype, head_dim: int, *, is_segmented: bool, is_fused: bool) -> Impl:
    # On AMD GPUs the kernels were compiled but never run: there they are selected by name only.
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    can_run = is_nvidia and refusal("triton", device, dtype, head_dim, is_segmented=is_segmented) is None
    if can_run and (is_interpreted() or trusts_triton(device, dtype, head_dim)):  # the interpreter compiles nothing
        return "triton"
    if _native_mismatch(device, dtype, head_dim) is None and compilation.can_load():
        return "native" if not is_fused or is_native_chosen(dtype) else "aten"
    return "aten"


def removal(impl: str) -> str | None:
    """What an implementation of an earlier version was, and what to use; None for other names."""
    if impl not in _REMOVED:
        return None
    what, instead = _REMOVED[impl]
    return f"impl={impl!r}, {what}, was removed: no device had run it; use {instead}"


def check_impl(impl: str) -> None:
    """Raise :class:`ValueError` unless ``impl`` names an implementation, or ``"auto"``."""
    if impl not in IMPLS:
        sentence = removal(str(impl))
        raise ValueError(sentence or f"impl must be one of {', '.join(map(repr, IMPLS))}, got {impl!r}")


def select(
    impl: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    is_segmented: bool = False,
    is_fused: bool = False,
) -> str:
    """The name of the implementation for a call.

    ``"auto"`` is what :func:`implementation` says. Without it, it is ``"triton"`` on an NVIDIA GPU and ``"native"`` on
    a CPU where these can run, else ``"aten"``. The first call on such a CPU compiles the native kernels if necessary;
    the first on such a GPU checks the Triton kernels there (:mod:`.device_check`), and ``"aten"`` replaces wrong ones.
    With ``is_fused``, PyTorch's fused kernels compute the call: there ``"auto"`` is ``"aten"`` where they were measured
    to be faster, see :func:`.cpu_choice.cpu_choice`.

    Raises:
        ValueError: ``impl`` is not a known name.
        NotImplementedError: the named implementation (with ``"auto"``, every one that is not dense) does not support
            the call.
    """
    check_impl(impl)
    asked = default_of(impl)
    chosen = asked
    if asked == "auto":
        chosen = _automatic(device, dtype, head_dim, is_segmented=is_segmented, is_fused=is_fused)
    reason = refusal(chosen, device, dtype, head_dim, is_segmented=is_segmented)
    if reason is None and chosen == "native":
        reason = compilation.refusal_to_load()
    if reason is not None:
        raise NotImplementedError(f"impl={asked!r} cannot compute this call: {reason}")
    return chosen


@constant_of_graph
def _is_for_onnx() -> bool:
    return torch.onnx.is_in_onnx_export()


def implementation_of(impl: str, query: Tensor, value: Tensor, pattern: Pattern, *, is_fused: bool) -> str:
    """The name of the implementation that computes a call, cached where the answer is constant.

    It is chosen for the wider of keys and values. ``is_fused``: see :func:`select`.

    Raises:
        ValueError, NotImplementedError: as :func:`select`.
    """
    device, dtype, head_dim = query.device, query.dtype, max(query.shape[3], value.shape[3])
    is_segmented = False
    for group in pattern.groups:  # a loop: a generator takes longer than the test itself, and each call makes it
        is_segmented = is_segmented or group.boundaries is not None
    if torch.compiler.is_compiling():
        chosen = select(impl, device, dtype, head_dim, is_segmented=is_segmented, is_fused=is_fused)
        if chosen != "reference" and torch.compiler.is_exporting() and _is_for_onnx():
            raise NotImplementedError(
                "ONNX has no operator for attention under a pattern: export the dense one, in memory that grows with "
                'N * M, by impl="reference" or within dilated_attention_pytorch.ops.implementation("reference"); '
                "torch.export.save keeps the operator"
            )
        return chosen
    asked = (_default if impl == "auto" else impl, device, dtype, head_dim, is_segmented, is_fused)
    if asked in _CHOSEN:
        return _CHOSEN[asked]
    chosen = select(impl, device, dtype, head_dim, is_segmented=is_segmented, is_fused=is_fused)
    if chosen == "triton":
        is_constant = device.type == "cuda" and not is_interpreted()
    else:
        is_constant = device.type == "cpu" and compilation.was_loaded()
    if is_constant:
        _CHOSEN[asked] = chosen
    return chosen
