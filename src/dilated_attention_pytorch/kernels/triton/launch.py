"""From tensors to launches: forward 3 kernels (4 if keys are split), backward 5 (6 for slabs), whatever the pattern.

Nothing here reads a tensor's values, so nothing waits for the device, except the first call with a pattern: it copies
a table of some integers there and may time configurations. The plan of :mod:`.plan` determines what is launched; this
module adds the tensors.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns.dilated import DilationGroup

from .configurations import BlockSizes
from .forward import forward_kernel, merge_splits_kernel
from .key_gradients import key_gradient_kernel
from .order import order_kernel
from .plan import KernelPlan, Walk, plan_of
from .problem import Kind, Problem
from .query_gradients import query_gradient_kernel
from .runs import Tables, runs_kernel
from .table import COVERING_LENGTH
from .tiles import CallOperands, CallOutputs, TileRuns
from .tuning import fastest

Strided = tuple[Tensor, int, int, int]
"""A tensor, and the strides of its sequences, rows and heads."""
_EVERYTHING = (DilationGroup(COVERING_LENGTH, 1),)


class Gradients(NamedTuple):
    """The gradients of a call's operands; None for a bias that the call has not."""

    query: Tensor
    key: Tensor
    value: Tensor
    distance_bias: Tensor | None
    key_bias: Tensor | None


def forward(problem: Problem, num_splits: int | None = None) -> tuple[Tensor, Tensor]:
    """Output ``[B, N, H, Dv]`` in the query's dtype, and log-sum-exp ``[B, N, H]`` in float32.

    ``num_splits`` splits every run of keys into that many parts, which are computed in parallel and merged; by default
    as many as the device needs to be busy.

    Raises:
        NotImplementedError: positions that do not fit 32 bits.
    """
    query = problem.query
    out = query.new_empty((*query.shape[:3], problem.value.shape[3]))
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    if out.numel() == 0:
        return out, lse
    kernel = plan_of(problem).forward
    splits = kernel.num_splits if num_splits is None else num_splits
    operands = _operands(problem, kernel.kind)
    with _on_device(query):
        order = _order_of(problem, kernel)
        parts = (out, lse)
        if splits > 1:
            parts = lse.new_empty((splits, *out.shape)), lse.new_empty((splits, *lse.shape))

        def launch(chosen: BlockSizes) -> None:
            walk = kernel.walk(chosen, splits)
            tiles = _runs_of(problem, kernel, walk, order)
            walk.computing.run(forward_kernel, operands, *parts, tiles, offset=problem.query_offset)

        launch(fastest(kernel.choice, launch))
        if splits > 1:
            _merge_splits(kernel, parts, out, lse)
    return out, lse


def backward(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    *,
    needs_distance_bias: bool = True,
) -> Gradients:
    """Gradients from the merged ``out`` and ``lse``, contiguous, in the operands' dtypes.

    ``out`` and ``grad_out`` are ``[B, N, H, Dv]``, where ``out`` is contiguous and ``grad_out`` has contiguous rows;
    ``lse`` and ``grad_lse`` are ``[B, N, H]`` in float32. The gradient of the bias by distance is zeros unless
    ``needs_distance_bias``. Without coordinates, it is added up by atomic additions, so that its last bits vary from
    run to run on a GPU; those of the others do not.

    Raises:
        NotImplementedError: positions that do not fit 32 bits, or that only the device knows.
        RuntimeError: a gradient of a bias by distance without coordinates, under
            ``torch.use_deterministic_algorithms(True)``.
    """
    if isinstance(problem.query_offset, Tensor):
        raise NotImplementedError(
            "the gradient is planned with the position of the queries, and got one that lies on the device: pass "
            "query_offset as an integer"
        )
    distance_bias, key_bias = problem.distance_bias, problem.key_bias
    grads = Gradients(
        _empty_like(problem.query),
        _empty_like(problem.key),
        _empty_like(problem.value),
        None if distance_bias is None else torch.zeros(distance_bias.shape, device=out.device),
        None if key_bias is None else torch.zeros(key_bias.shape, device=out.device),
    )
    added_to = grads.distance_bias if needs_distance_bias else None
    if added_to is not None and problem.coordinates is not None:
        added_to = torch.empty_like(lse)  # by rows, each of which has one owner
    elif added_to is not None:
        _check_determinism(added_to.device)
    if grads.query.numel() == 0 or grads.value.numel() == 0:
        for grad in grads[:3]:
            grad.zero_()
        return grads
    plan = plan_of(problem)
    operands = _operands(problem, plan.kind)
    outputs = CallOutputs(out, _strided(grad_out), lse, torch.empty_like(lse))
    given = None if grad_lse is None else grad_lse.contiguous()

    with _on_device(problem.query):
        order = _order_of(problem, plan.query_gradient)
        is_shared = plan.key_gradient.side is plan.query_gradient.side
        order_of_keys = order if is_shared else _order_of(problem, plan.key_gradient)

        def launch_queries(chosen: BlockSizes) -> None:
            walk = plan.query_gradient.walk(chosen)
            tiles = _runs_of(problem, plan.query_gradient, walk, order)
            rows = given, grads.query, added_to
            if added_to is not None and problem.coordinates is None:
                added_to.zero_()  # a launch that was timed has added to it
            walk.computing.run(query_gradient_kernel, operands, outputs, *rows, tiles, offset=problem.query_offset)

        def launch_keys(chosen: BlockSizes) -> None:
            walk = plan.key_gradient.walk(chosen)
            tiles = _runs_of(problem, plan.key_gradient, walk, order_of_keys)
            results = grads.key, grads.value, grads.key_bias
            walk.computing.run(key_gradient_kernel, operands, outputs, *results, tiles, offset=problem.query_offset)

        launch_queries(fastest(plan.query_gradient.choice, launch_queries))
        launch_keys(fastest(plan.key_gradient.choice, launch_keys))
    if added_to is not None and problem.coordinates is not None:
        grads = grads._replace(distance_bias=added_to.sum((0, 1)).unsqueeze(1))
    return grads


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, key_padding_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of every query to every key: ``[B, N, H, D]`` and ``[B, M, G, D]`` to output and log-sum-exp."""
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
    """Gradients if every query sees every key, under merged ``out`` and ``lse``; both and ``grad_out`` contiguous."""
    problem = Problem(query, key, value, _EVERYTHING, False, scale, key_padding_mask=key_padding_mask)
    return backward(problem, out, lse, grad_out, None)[:3]


def _order_of(problem: Problem, kernel: KernelPlan) -> Tensor:
    """int32 ``[key/value heads, windows, window]``: the rows of each window in order, see :mod:`.order`.

    If rows are not ordered, a placeholder that no kernel reads.
    """
    table = kernel.table
    if not kernel.side.is_ordered:
        return table
    order = table.new_empty(*kernel.order_shape)
    kernel.order.run(order_kernel, order, table, _documents(problem), offset=_offset(problem, kernel))
    return order


def _runs_of(problem: Problem, kernel: KernelPlan, walk: Walk, order: Tensor) -> TileRuns:
    """The order, the runs of all tiles, and each tile's first line and number of lines.

    The last two are int32 ``[heads, lines, integers of a run]`` and ``[heads, tiles, 2]``.
    """
    table, rules = kernel.table, kernel.rules
    spans, lists = (table, table) if rules is None else (rules.spans, rules.lists)
    tiles = TileRuns(order, table.new_empty(*walk.runs), table.new_empty(*walk.ranges))
    tables = Tables(table, spans, lists, _documents(problem))
    walk.planning.run(runs_kernel, tiles, tables, offset=_offset(problem, kernel))
    return tiles


def _on_device(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Context in which launches are on the tensor's device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _strided(tensor: Tensor) -> Strided:
    stride_b, stride_n, stride_h, _ = tensor.stride()
    return tensor, stride_b, stride_n, stride_h


def _offset(problem: Problem, kernel: KernelPlan) -> int | Tensor:
    """Position of the first row that tiles hold."""
    return problem.key_offset if kernel.of_queries else problem.query_offset


def _documents(problem: Problem) -> Tensor:
    """The documents' boundaries; without documents, any tensor, since the kernels are compiled without this operand."""
    return problem.query if problem.cu_seqlens is None else problem.cu_seqlens


def _operands(problem: Problem, kind: Kind) -> CallOperands:
    """The operands; any tensor stands for a mask and a seed that are not given."""
    mask, seed = problem.key_padding_mask, problem.dropout_seed
    key_bias = problem.key_bias
    terms = (
        *(None if x is None else x.contiguous() for x in (problem.distance_bias, problem.coordinates)),
        None if key_bias is None else (key_bias, *key_bias.stride()),
        *kind.cap,
    )
    return CallOperands(
        _strided(problem.query),
        _strided(problem.key),
        _strided(problem.value),
        problem.query if mask is None else mask.contiguous().view(torch.uint8),
        (problem.query if seed is None else seed, *kind.dropout),
        terms if kind.has_terms else None,
    )


def _check_determinism(device: torch.device) -> None:
    """Refuse atomic additions on a GPU under deterministic algorithms, as PyTorch's operators do.

    Raises:
        RuntimeError: the mode is on; with ``warn_only=True`` it is a warning.
    """
    if device.type != "cuda" or not torch.are_deterministic_algorithms_enabled():
        return
    sentence = (
        "the Triton kernels add up the gradient of a bias by distance in an order that varies from run to run, and "
        "torch.use_deterministic_algorithms(True) is set: set warn_only=True, detach the bias if it is not trained, or "
        'use impl="aten"'
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(sentence)
    warnings.warn(sentence, stacklevel=2)


def _merge_splits(kernel: KernelPlan, parts: tuple[Tensor, Tensor], out: Tensor, lse: Tensor) -> None:
    block, lines = 4, lse.numel()
    merge_splits_kernel[(-(-lines // block),)](
        *parts,
        out,
        lse,
        lines,
        parts[0].shape[0],
        WIDTH=kernel.kind.widths[1],
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=True,
    )
