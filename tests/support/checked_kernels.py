"""The check of the Triton kernels with stand-ins for them: the dense definition, right or spoiled.

python -m support.checked_kernels right cpu bfloat16 64
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch.kernels.reference import reference_attention
from dilated_attention_pytorch.kernels.triton import check, launch
from dilated_attention_pytorch.kernels.triton.problem import Problem
from dilated_attention_pytorch.patterns import Pattern

Spoil = Callable[[int, Tensor], Tensor]
"""Changes result 0 to 3 of a call: output, gradients of query, key and value."""


def dense(problem: Problem, pattern: Pattern) -> tuple[list[Tensor], Tensor, Tensor]:
    """The operands in float64, the output and the log-sum-exp."""
    operands = [x.detach().double().requires_grad_() for x in (problem.query, problem.key, problem.value)]
    assert isinstance(problem.query_offset, int)
    out, lse = reference_attention(
        *operands,
        pattern,
        is_causal=problem.is_causal,
        scale=problem.scale,
        query_offset=problem.query_offset,
        key_offset=problem.key_offset,
        cu_seqlens=problem.cu_seqlens,
        key_padding_mask=problem.key_padding_mask,
        keep_probability=None,
        distance_bias=problem.distance_bias,
        key_bias=problem.key_bias,
    )
    return operands, out, lse


@contextmanager
def stand_ins(spoil: Spoil) -> Iterator[None]:
    """Within it, the kernels are the definition, with results that ``spoil`` changes."""
    patterns = {(call.pattern.groups, call.pattern.rules): call.pattern for call in check.CALLS}

    def forward(problem: Problem, num_splits: int | None = None) -> tuple[Tensor, Tensor]:
        _, out, lse = dense(problem, patterns[problem.groups, problem.rules])
        return spoil(0, out.detach().to(problem.query.dtype)), lse.detach()

    def backward(
        problem: Problem,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        *,
        needs_distance_bias: bool,
    ) -> launch.Gradients:
        operands, exact, _ = dense(problem, patterns[problem.groups, problem.rules])
        grads = torch.autograd.grad(exact, operands, grad_out.double())
        query, key, value = (spoil(index + 1, grad.to(problem.query.dtype)) for index, grad in enumerate(grads))
        return launch.Gradients(query, key, value, None, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "forward", forward)
        patch.setattr(launch, "backward", backward)
        yield


def _right(index: int, result: Tensor) -> Tensor:
    return result


def _wrong(index: int, result: Tensor) -> Tensor:
    return result * 1.05 if index == 2 else result


def _raising(index: int, result: Tensor) -> Tensor:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`.")


SPOILERS: dict[str, Spoil] = {"right": _right, "wrong": _wrong, "raising": _raising}


if __name__ == "__main__":
    with stand_ins(SPOILERS[sys.argv[1]]):
        check.main(sys.argv[2:])
