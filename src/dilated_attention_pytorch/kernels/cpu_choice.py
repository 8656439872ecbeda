"""The choice of ``impl="auto"`` on a CPU: the native kernels, or PyTorch's where a measurement found them faster."""

from __future__ import annotations

import functools
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from dilated_attention_pytorch.plan.geometry import Axis, Partial
from dilated_attention_pytorch.tracing import constant_of_graph

from . import compilation, fused, native
from .measured_choice import MeasuredChoice, Routine, measured_choice

VARIABLE = "DILATED_ATTENTION_CPU"
_SEGMENTS, _ROWS, _HEADS, _HEAD_DIM = 2, 512, 8, 64
"""Sizes of the measured call: segments without a mask."""
_SCALE = _HEAD_DIM**-0.5
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative to the largest number of a result: some units in the last place of the dtype."""


@constant_of_graph
def is_native_chosen(dtype: torch.dtype) -> bool:
    """Whether ``"auto"`` takes the native kernels, where they can run, for calls that PyTorch's compute, too."""
    return cpu_choice(dtype).name == "native"


@functools.cache
def cpu_choice(dtype: torch.dtype) -> MeasuredChoice:
    """The kernels of attention in ``dtype`` on this CPU, where the native ones can run: "native" or "aten".

    ``DILATED_ATTENTION_CPU`` names it; otherwise it is measured once, in a second, and kept, see
    :func:`measured_choice`. A process keeps its first answer. Random numbers are not drawn from PyTorch's state.

    Raises:
        ValueError: the variable names neither.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked in ("native", "aten"):
        return MeasuredChoice(asked, {})
    if asked:
        raise ValueError(f"{VARIABLE} must be native or aten, got {asked!r}; without it the faster one is used")
    # The calling thread may trace, transform, count or capture what it computes; a new one does not.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_measured, dtype, torch.get_num_threads()).result()


def _measured(dtype: torch.dtype, threads: int) -> MeasuredChoice:
    pairs = _SEGMENTS * _HEADS * _ROWS**2
    try:
        return measured_choice(
            # Other sources of the kernels are measured anew.
            f"attention-{str(dtype).removeprefix('torch.')}-{compilation.library_path().parent.name}",
            _routines(dtype),
            operations=14 * pairs * _HEAD_DIM,  # two products forward, five backward
            tolerance=_TOLERANCES[dtype],
            threads=threads,
        )
    except RuntimeError as error:  # of the native kernels: where PyTorch's fail, the others are taken
        reason = str(error).partition("\n")[0]
        print(
            f"dilated-attention: computing {dtype} without its CPU kernels, which failed: {reason}",
            file=sys.stderr,
            flush=True,
        )
        return MeasuredChoice("aten", {"native": 0.0, "aten": 0.0})


def _routines(dtype: torch.dtype) -> dict[str, Routine]:
    """Output, log-sum-exp and gradients of one call by both kernels."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, _SEGMENTS * _ROWS, _HEADS, _HEAD_DIM)
    query, key, value, grad_out = (
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype) for _ in range(4)
    )
    return {
        "native": functools.partial(_by_native, query, key, value, grad_out),
        "aten": functools.partial(_by_aten, query, key, value, grad_out),
    }


def _by_native(query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
    axes = (Axis(_SEGMENTS, _ROWS, 0), Axis(_HEADS, 0, 1))
    partial = Partial(0, 0, _ROWS, _ROWS, 1, 0, is_first=True, axes=axes)
    operands = native.Operands(query, key, value, 1, (None, None, 0.0, [0, 0, 0], _SCALE))
    out, lse = torch.empty_like(query), torch.full(query.shape[:3], -torch.inf, dtype=torch.float32, device="cpu")
    native.merge_partial(partial, operands, out, lse)
    grads = [torch.zeros_like(operand, dtype=torch.float32) for operand in (query, key, value)]
    native.add_gradients(partial, operands, native.Merged(out, lse, grad_out, None), grads)
    return out, lse, *(grad.to(query.dtype) for grad in grads)


def _by_aten(query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
    q, k, v, g = (x[0].unflatten(0, (_SEGMENTS, _ROWS)).transpose(1, 2) for x in (query, key, value, grad_out))
    out, lse = fused.forward(q, k, v, None, is_causal=False, scale=_SCALE)
    results = (out, lse, *fused.backward(g, q, k, v, out, lse, None, is_causal=False, scale=_SCALE))
    whole, whole_lse, *grads = (x.transpose(1, 2).flatten(0, 1).unsqueeze(0) for x in results)
    return whole.to(query.dtype), whole_lse, *(grad.to(query.dtype) for grad in grads)
