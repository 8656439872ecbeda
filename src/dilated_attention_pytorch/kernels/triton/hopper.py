"""``impl="gluon"``: the calls that the kernel of :mod:`.warp_specialized` supports, and its launch."""

from __future__ import annotations

import contextvars

import torch
from torch import Tensor

from .launch import on_device, order_of, runs_of, strides_of
from .plan import plan_of
from .problem import Problem

_ALIGNMENT = 16
"""Alignment in bytes of addresses and strides from which the device copies blocks."""
_FEW_LINES = 16


def refusal(problem: Problem) -> str | None:
    """Why the kernel cannot compute a call on a device that supports it; None if it can."""
    plan = plan_of(problem)
    if problem.key_padding_mask is not None:
        return "it copies keys without asking a key_padding_mask"
    if problem.dropout_p > 0.0:
        return "it has no dropout"
    if plan.kind.has_zero_pad_keys:
        return 'it has no keys of a tail="zero_padded"'
    if problem.query.shape[1] * plan.kind.packed_heads <= _FEW_LINES:
        return f"up to {_FEW_LINES} lines of queries, as in decoding, leave its tiles of 128 empty"
    for name, tensor in (("key", problem.key), ("value", problem.value)):
        strides = tuple(tensor.stride()[:3])
        if tensor.data_ptr() % _ALIGNMENT or any(step * tensor.element_size() % _ALIGNMENT for step in strides):
            return (
                f"the address of {name} and its strides must be multiples of {_ALIGNMENT} bytes, got strides of "
                f"{strides} numbers; {name}.contiguous() has such"
            )
    return None


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """:func:`.launch.forward` by the warp-specialised kernel.

    Raises:
        NotImplementedError: :func:`refusal` rejects the call, or its positions do not fit 32 bits.
    """
    from . import warp_specialized

    query = problem.query
    out = query.new_empty(query.shape)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    if out.numel() == 0:
        return out, lse
    reason = refusal(problem)
    if reason is not None:
        raise NotImplementedError(f'impl="gluon" cannot compute this call: {reason}; impl="triton" can')
    kernel = plan_of(problem).warp_specialized
    walk = kernel.walk(kernel.choice.candidates[0])
    before, after, keywords = walk.computing
    numbers = (*before, problem.query_offset, *after)

    def launch() -> None:
        import triton

        # Descriptors of keys lie in memory of the launch. The allocator is set in a context that ends with it.
        triton.set_allocator(lambda size, alignment, stream: query.new_empty(size, dtype=torch.int8))
        order = order_of(problem, kernel)
        runs = runs_of(problem, kernel, walk, order)
        warp_specialized.warp_specialized_kernel.run(
            query, problem.key, problem.value, out, lse, order, *runs, *strides_of(problem), *numbers, **keywords
        )

    with on_device(query):
        contextvars.copy_context().run(launch)
    return out, lse
