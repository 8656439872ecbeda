"""From tensors to launches: forward 3 kernels (4 where keys are split), backward 5 (6 for slabs), whatever the pattern.

Nothing here reads a tensor's values, so nothing waits for the device, but for the first call with a pattern: it copies
a table of some integers there and may time configurations. What is launched says the plan of :mod:`.plan`; here are the
tensors.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns import DilationGroup

from .backward import key_gradient_kernel, query_gradient_kernel
from .configurations import Configuration
from .forward import forward_kernel, merge_splits_kernel
from .order import order_kernel
from .plan import KernelPlan, Walk, plan_of
from .problem import Problem
from .runs import runs_kernel
from .table import COVERING_LENGTH
from .tuning import fastest

_EVERYTHING = (DilationGroup(COVERING_LENGTH, 1),)


def forward(problem: Problem, num_splits: int | None = None) -> tuple[Tensor, Tensor]:
    """Output ``[B, N, H, D]`` in the query's dtype and log-sum-exp ``[B, N, H]`` in float32.

    ``num_splits`` cuts every run of keys into that many parts, computed side by side and merged; without it as many as
    the device needs to be busy.

    Raises:
        NotImplementedError: positions that do not fit 32 bits.
    """
    query = problem.query
    out = query.new_empty(query.shape)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    if out.numel() == 0:
        return out, lse
    kernel = plan_of(problem).forward
    splits = kernel.num_splits if num_splits is None else num_splits
    operands = (*_optional(problem), *_strides(problem))
    with _on_device(query):
        order = order_of(problem, kernel)
        parts = (out, lse)
        if splits > 1:
            parts = lse.new_empty((splits, *out.shape)), lse.new_empty((splits, *lse.shape))

        def launch(chosen: Configuration) -> None:
            walk = kernel.walk(chosen, splits)
            runs = runs_of(problem, kernel, walk, order)
            grid, numbers, constants = walk.computing
            forward_kernel[grid](*_tensors(problem), *parts, order, *runs, *operands, *numbers, **constants)

        launch(fastest(kernel.choice, launch))
        if splits > 1:
            _merge_splits(kernel, parts, out, lse)
    return out, lse


def backward(
    problem: Problem, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from the merged ``out`` and ``lse``, contiguous, in the inputs' dtypes.

    ``out`` and ``grad_out`` are ``[B, N, H, D]``, the first contiguous, the rows of the other; ``lse`` and
    ``grad_lse`` ``[B, N, H]`` in float32.

    Raises:
        NotImplementedError: positions that do not fit 32 bits.
    """
    tensors = _tensors(problem)
    grad_query, grad_key, grad_value = (tensor.new_empty(tensor.shape) for tensor in tensors)
    if grad_query.numel() == 0 or grad_key.numel() == 0:
        return grad_query.zero_(), grad_key.zero_(), grad_value.zero_()
    plan = plan_of(problem)
    of_queries, of_keys = plan.query_gradient, plan.key_gradient
    operands = (*_optional(problem), *_strides(problem), *grad_out.stride()[:3])
    with _on_device(problem.query):
        order = order_of(problem, of_queries)
        order_of_keys = order if of_keys.side is of_queries.side else order_of(problem, of_keys)
        delta = torch.empty_like(lse)
        given = delta if grad_lse is None else grad_lse.contiguous()

        def launch_queries(chosen: Configuration) -> None:
            walk = of_queries.walk(chosen)
            runs = runs_of(problem, of_queries, walk, order)
            grid, numbers, constants = walk.computing
            query_gradient_kernel[grid](
                *tensors, out, grad_out, lse, given, delta, grad_query, order, *runs, *operands, *numbers, **constants,
                HAS_GRAD_LSE=grad_lse is not None,
            )  # fmt: skip

        def launch_keys(chosen: Configuration) -> None:
            walk = of_keys.walk(chosen)
            runs = runs_of(problem, of_keys, walk, order_of_keys)
            grid, numbers, constants = walk.computing
            key_gradient_kernel[grid](
                *tensors, grad_out, lse, delta, grad_key, grad_value, order_of_keys, *runs, *operands, *numbers,
                **constants,
            )  # fmt: skip

        launch_queries(fastest(of_queries.choice, launch_queries))
        launch_keys(fastest(of_keys.choice, launch_keys))
    return grad_query, grad_key, grad_value


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, key_padding_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Every query sees every key: ``[B, N, H, D]`` and ``[B, M, G, D]`` to output and log-sum-exp."""
    return forward(Problem(query, key, value, _EVERYTHING, False, scale, key_padding_mask=key_padding_mask))


def attend_rows_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    *,
    scale: float,
    key_padding_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients where every query sees every key, under the merged ``out`` and ``lse``, all three contiguous."""
    problem = Problem(query, key, value, _EVERYTHING, False, scale, key_padding_mask=key_padding_mask)
    return backward(problem, out, lse, grad_out, None)


def order_of(problem: Problem, kernel: KernelPlan) -> Tensor:
    """int32 ``[key/value heads, windows, window]``: the rows of each window in order, see :mod:`.order`.

    Where rows are not ordered, a tensor that no kernel reads.
    """
    table, side = kernel.table, kernel.side
    if not side.is_ordered:
        return table
    grid, numbers, constants = kernel.order
    order = table.new_empty((kernel.kind.num_kv_heads, side.num_windows, side.window))
    order_kernel[grid](order, table, _documents(problem), *numbers, **constants)
    return order


def runs_of(problem: Problem, kernel: KernelPlan, walk: Walk, order: Tensor) -> tuple[Tensor, Tensor]:
    """The runs of all tiles, and each tile's first line and number of them.

    int32 ``[heads, lines, integers of a run]`` and ``[heads, tiles, 2]``.
    """
    table, rules = kernel.table, kernel.rules
    spans, lists = (table, table) if rules is None else (rules.spans, rules.lists)
    grid, numbers, constants = walk.planning
    runs, ranges = table.new_empty(walk.runs), table.new_empty(walk.ranges)
    runs_kernel[grid](runs, ranges, order, table, spans, lists, _documents(problem), *numbers, **constants)
    return runs, ranges


def _on_device(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _tensors(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    return problem.query, problem.key, problem.value


def _documents(problem: Problem) -> Tensor:
    """Where the kernels are compiled without a use of an operand, any tensor stands for it."""
    return problem.query if problem.cu_seqlens is None else problem.cu_seqlens


def _optional(problem: Problem) -> tuple[Tensor, Tensor]:
    mask, seed = problem.key_padding_mask, problem.dropout_seed
    return (
        problem.query if mask is None else mask.contiguous().view(torch.uint8),
        problem.query if seed is None else seed,
    )


def _strides(problem: Problem) -> tuple[int, ...]:
    return *problem.query.stride()[:3], *problem.key.stride()[:3], *problem.value.stride()[:3]


def _merge_splits(kernel: KernelPlan, parts: tuple[Tensor, Tensor], out: Tensor, lse: Tensor) -> None:
    block, lines = 4, lse.numel()
    merge_splits_kernel[(-(-lines // block),)](
        *parts, out, lse, lines, parts[0].shape[0], D=out.shape[3], BLOCK_D=kernel.kind.block_d, BLOCK=block,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
