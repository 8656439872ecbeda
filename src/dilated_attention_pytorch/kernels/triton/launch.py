"""From tensors to launches: forward 3 kernels (4 where keys are split), backward 5 (6 for slabs), whatever the pattern.

Nothing here reads a tensor's values, so nothing waits for the device, but for the first call with a pattern: it copies
a table of some integers there and may time configurations.
"""

from __future__ import annotations

import contextlib
import functools
import math

import torch
import triton
from torch import Tensor

from dilated_attention_pytorch.patterns import DilationGroup

from .backward import key_gradient_kernel, query_gradient_kernel
from .configurations import Configuration, candidates
from .forward import forward_kernel, merge_splits_kernel
from .sides import Problem, Runs, Side, layout_of, rules_of, runs_of, side_of, table_of
from .table import COVERING_LENGTH
from .tuning import fastest

# Keys are split where there are fewer tiles than this for each multiprocessor.
_TILES_PER_MULTIPROCESSOR = 2
_MAX_SPLITS = 64


def forward(problem: Problem, num_splits: int | None = None) -> tuple[Tensor, Tensor]:
    """Output ``[B, N, H, D]`` in the query's dtype and log-sum-exp ``[B, N, H]`` in float32.

    ``num_splits`` cuts every run of keys into that many parts, computed side by side and merged; without it as many as
    the device needs to be busy.
    """
    query = problem.query
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    if out.numel() == 0:
        return out, lse
    pack = _packed_heads(problem)
    choices = _candidates("few_queries", problem)
    if query.shape[1] * pack > choices[0].block_rows:
        choices = _candidates("forward", problem)
    with _on_device(query):
        table = table_of(problem)
        side = side_of(problem, table, _tile_rows(choices, pack), is_query=True)
        if num_splits is None:
            num_splits = _num_splits(problem, side, choices[0], pack)
        parts = (out, lse)
        if num_splits > 1:
            parts = (
                out.new_empty((num_splits, *out.shape), dtype=torch.float32),
                lse.new_empty(num_splits, *lse.shape),
            )

        def launch(chosen: Configuration) -> None:
            runs = runs_of(problem, table, side, chosen.block_rows // pack, of_queries=False)
            programs, layout = layout_of(problem, side, runs, problem.query.shape[2] // problem.key.shape[2] // pack)
            forward_kernel[(programs * num_splits,)](
                *_tensors(problem), *parts, side.order, runs.lines, runs.numbers, *_optional(problem),
                *_strides(problem), *_sizes(problem), *layout, num_splits, *_numbers(problem)[1:],
                **_constants(problem, side, runs, chosen), PACK=pack, PHANTOMS=problem.has_phantoms,
                ROTATED=num_splits > 1 and bool(problem.rules),
            )  # fmt: skip

        launch(fastest("forward", _tuning_key(problem, pack), choices, launch))
        if num_splits > 1:
            _merge_splits(parts, out, lse)
    return out, lse


def backward(
    problem: Problem, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from the merged ``out`` and ``lse``, contiguous, in the inputs' dtypes."""
    query, key = problem.query, problem.key
    grads = tuple(
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (problem.query, problem.key, problem.value)
    )
    if query.numel() == 0 or key.numel() == 0:
        for grad in grads:
            grad.zero_()
        return grads[0], grads[1], grads[2]
    pack = _packed_heads(problem)
    with _on_device(query):
        table = table_of(problem)
        delta = torch.empty_like(lse)
        query_choices, key_choices = _candidates("query_gradient", problem), _candidates("key_gradient", problem)
        query_rows, key_rows = _tile_rows(query_choices, pack), _tile_rows(key_choices, 1)
        if (query.shape[1], problem.query_offset) == (key.shape[1], problem.key_offset):
            query_side = key_side = side_of(problem, table, query_rows + key_rows, is_query=True)
        else:
            query_side = side_of(problem, table, query_rows, is_query=True)
            key_side = side_of(problem, table, key_rows, is_query=False)
        strides = (*_strides(problem), *grad_out.stride()[:3])

        def launch_queries(chosen: Configuration) -> None:
            runs = runs_of(problem, table, query_side, chosen.block_rows // pack, of_queries=False)
            programs, layout = layout_of(problem, query_side, runs, query.shape[2] // key.shape[2] // pack)
            query_gradient_kernel[(programs,)](
                *_tensors(problem), out, grad_out, lse, delta if grad_lse is None else grad_lse.contiguous(), delta,
                grads[0], query_side.order, runs.lines, runs.numbers, *_optional(problem), *strides,
                *_sizes(problem), *layout, *_numbers(problem), **_constants(problem, query_side, runs, chosen),
                PACK=pack, HAS_GRAD_LSE=grad_lse is not None,
            )  # fmt: skip

        def launch_keys(chosen: Configuration) -> None:
            runs = runs_of(problem, table, key_side, chosen.block_rows, of_queries=True)
            programs, layout = layout_of(problem, key_side, runs, 1)
            key_gradient_kernel[(programs,)](
                *_tensors(problem), grad_out, lse, delta, grads[1], grads[2], key_side.order, runs.lines, runs.numbers,
                *_optional(problem), *strides, *_sizes(problem), *layout, *_numbers(problem),
                **_constants(problem, key_side, runs, chosen),
            )  # fmt: skip

        tuning_key = _tuning_key(problem, pack)
        launch_queries(fastest("query_gradient", tuning_key, query_choices, launch_queries))
        launch_keys(fastest("key_gradient", tuning_key, key_choices, launch_keys))
    return grads[0], grads[1], grads[2]


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, key_padding_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Every query sees every key: ``[B, N, H, D]`` and ``[B, M, G, D]`` to output and log-sum-exp."""
    return forward(_dense_problem(query, key, value, scale, key_padding_mask))


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
    return backward(_dense_problem(query, key, value, scale, key_padding_mask), out, lse, grad_out, None)


def _dense_problem(query: Tensor, key: Tensor, value: Tensor, scale: float, key_padding_mask: Tensor | None) -> Problem:
    everything = (DilationGroup(COVERING_LENGTH, 1),)
    return Problem(query, key, value, everything, False, scale, key_padding_mask=key_padding_mask)


def _on_device(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _candidates(kernel: str, problem: Problem) -> tuple[Configuration, ...]:
    query = problem.query
    capability = torch.cuda.get_device_capability(query.device) if query.is_cuda else (9, 0)
    return candidates(kernel, _block_d(query), query.element_size(), capability, problem.is_banded)


def _block_d(query: Tensor) -> int:
    return max(16, triton.next_power_of_2(query.shape[3]))


def _packed_heads(problem: Problem) -> int:
    """Query heads of one key/value head that share a tile: their rows see the same keys."""
    ratio = problem.query.shape[2] // problem.key.shape[2]
    return max(heads for heads in range(1, min(ratio, 16) + 1) if ratio % heads == 0)


def _tile_rows(choices: tuple[Configuration, ...], pack: int) -> tuple[int, ...]:
    return tuple(chosen.block_rows // pack for chosen in choices)


def _num_splits(problem: Problem, side: Side, chosen: Configuration, pack: int) -> int:
    """As many parts of every run of keys as keep the device busy where tiles are few, as in decoding."""
    batch, num_keys, _, _ = problem.key.shape
    tiles = batch * problem.query.shape[2] // pack * -(-side.num_rows // (chosen.block_rows // pack))
    wanted = _TILES_PER_MULTIPROCESSOR * _num_multiprocessors(problem.query.device)
    if 2 * tiles > wanted:
        return 1
    longest = max(
        (-(-min(group.segment_length, num_keys) // group.dilation_rate) for group in problem.groups), default=0
    )
    rules = rules_of(problem, of_queries=False)
    if rules is not None:
        longest = max(longest, int(max(rules.others_per_row)))
    return max(1, min(wanted // tiles, longest // (2 * chosen.block_run), _MAX_SPLITS))


@functools.lru_cache(maxsize=64)
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # Triton's interpreter: enough that decoding splits its keys there too
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tensors(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    return problem.query, problem.key, problem.value


def _optional(problem: Problem) -> tuple[Tensor, Tensor]:
    mask, seed = problem.key_padding_mask, problem.dropout_seed
    return (
        problem.query if mask is None else mask.contiguous().view(torch.uint8),
        problem.query if seed is None else seed,
    )


def _strides(problem: Problem) -> tuple[int, ...]:
    return tuple(stride for tensor in _tensors(problem) for stride in tensor.stride()[:3])


def _sizes(problem: Problem) -> tuple[int, ...]:
    batch, num_queries = problem.query.shape[:2]
    num_keys, num_kv_heads = problem.key.shape[1:3]
    return batch, num_queries, num_keys, num_kv_heads, problem.query_offset, problem.key_offset


def _numbers(problem: Problem) -> tuple[float, float, int, float]:
    """Scale of the gradients, of the scores in base 2, and what dropout compares with and multiplies by."""
    scale_log2 = problem.scale * math.log2(math.e)
    threshold = min(round(problem.dropout_p * 2**32) - 2**31, 2**31 - 1)
    return problem.scale, scale_log2, threshold, 1.0 / (1.0 - problem.dropout_p)


def _constants(problem: Problem, side: Side, runs: Runs, chosen: Configuration) -> dict[str, object]:
    return {
        "RATIO": problem.query.shape[2] // problem.key.shape[2],
        "D": problem.query.shape[3],
        "BLOCK_D": _block_d(problem.query),
        "BLOCK_ROWS": chosen.block_rows,
        "BLOCK_RUN": chosen.block_run,
        "LINE": runs.lines.shape[3],
        "WINDOW": side.window,
        "ORDERED": side.is_ordered,
        "CAUSAL": problem.is_causal,
        "BANDED": problem.is_banded,
        "PADDED": problem.key_padding_mask is not None,
        "DROPOUT": problem.dropout_p > 0.0,
        "num_warps": chosen.num_warps,
        "num_stages": chosen.num_stages,
        "enable_fp_fusion": True,
    }


def _tuning_key(problem: Problem, pack: int) -> tuple[object, ...]:
    """What decides which configuration is fastest: the device, the numbers, the pattern, and lengths by their power."""
    query, key = problem.query, problem.key
    return (
        query.device, query.dtype, query.shape[3], pack, problem.groups, problem.rules, problem.is_causal,
        (query.shape[0] * key.shape[2]).bit_length(), query.shape[1].bit_length(), key.shape[1].bit_length(),
        problem.cu_seqlens is not None, problem.key_padding_mask is not None, problem.dropout_p > 0.0,
    )  # fmt: skip


def _merge_splits(parts: tuple[Tensor, Tensor], out: Tensor, lse: Tensor) -> None:
    block, lines = 4, lse.numel()
    merge_splits_kernel[(-(-lines // block),)](
        *parts, out, lse, lines, parts[0].shape[0], D=out.shape[3], BLOCK_D=_block_d(out), BLOCK=block, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
