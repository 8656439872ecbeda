"""Time of block patterns on this machine, relative to density times dense attention's time in the same run.

    python -m benchmarks.blocks [--impl auto|native|aten]

A time is printed only if the call's sampled rows and gradients agree with a dense softmax in float64. It is the minimum
of several calls, both contestants in turn: other load on the machine makes calls longer, never shorter.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch import (
    Pattern,
    attend,
    from_block_mask,
    hierarchical,
    local_window,
    random_blocks,
    strided_blocks,
)
from dilated_attention_pytorch.benchmarks.shapes import DtypeName

from .study import DTYPES, StudyOfCalls, run, seconds

BLOCK, HEADS, HEAD_DIM = 128, 4, 64
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
"""Errors of a row relative to the largest entry of its exact value, explained by rounding of inputs and weights."""


@dataclass(frozen=True, kw_only=True)
class Blocks(StudyOfCalls):
    """Settings."""

    rows: int = 16384
    """Rows of the calls."""
    densities: tuple[float, ...] = (0.05, 0.1, 0.2)
    """Nominal densities of the patterns."""
    dtypes: tuple[DtypeName, ...] = ("float32", "bfloat16")
    """Dtypes of the operands."""


def drawn_mask(density: float, heads: int, rows: int) -> Tensor:
    """A separate mask for every head, with equally many blocks in each of its rows."""
    blocks = rows // BLOCK
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(heads, blocks, blocks, generator=generator).argsort(-1).argsort(-1)
    return order < round(density * blocks)


def patterns(density: float, rows: int) -> dict[str, Pattern]:
    """The kinds of patterns, at nearly one density."""
    width = round(density * rows)
    return {
        "from_block_mask, drawn": from_block_mask(drawn_mask(density, HEADS, rows), BLOCK),
        "random_blocks": random_blocks(density),
        "strided_blocks": strided_blocks(round(1 / density)),
        "hierarchical": hierarchical(max(1, round(density * rows / BLOCK / 5)), levels=4),
        "local_window": local_window(width // 2, width - width // 2 - 1),
    }


def operands(rows: int, kv_heads: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Query, key, value and the gradient of the output."""
    generator = torch.Generator().manual_seed(rows)
    return tuple(
        torch.randn(1, rows, number, HEAD_DIM, generator=generator).to(dtype)
        for number in (HEADS, kv_heads, kv_heads, HEADS)
    )


def check(pattern: Pattern, inputs: tuple[Tensor, ...], dtype: DtypeName, *, is_causal: bool) -> float:
    """Largest relative error of some rows of the output, and of the query's gradient there, against dense float64.

    Raises:
        SystemExit: it exceeds what rounding explains; nothing is timed.
    """
    q, k, v, grad = inputs
    leaves = tuple(x.clone().requires_grad_() for x in (q, k, v))
    out = attend(leaves[0], leaves[1], leaves[2], pattern, is_causal=is_causal)
    grad_query, grad_key, grad_value = torch.autograd.grad(out, leaves, grad)
    out = out.detach()
    num_rows = q.shape[1]
    rows = torch.tensor([0, 1, 127, 128, num_rows // 2 + 5, num_rows - 1])
    counts = pattern.counts(rows, torch.arange(num_rows), k.shape[2], is_causal=is_causal)
    ratio = q.shape[2] // k.shape[2]
    exact = [x.double() for x in (q[0, rows], k[0], v[0], grad[0, rows])]
    query, key, value, of_out = exact[0], *(x.repeat_interleave(ratio, 1) for x in exact[1:3]), exact[3]
    scores = torch.einsum("nhd,mhd->hnm", query, key) / HEAD_DIM**0.5
    weights = torch.softmax(scores + counts.repeat_interleave(ratio, 0).double().log(), -1).nan_to_num(0.0)  # no key
    expected = torch.einsum("hnm,mhd->nhd", weights, value)
    of_weights = torch.einsum("nhd,mhd->hnm", of_out, value)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
    expected_grad = torch.einsum("hnm,mhd->nhd", of_scores, key) / HEAD_DIM**0.5
    pairs = ((out[0, rows], expected), (grad_query[0, rows], expected_grad))
    errors = [float((got.double() - want).abs().max() / want.abs().max()) for got, want in pairs]
    # For keys and values, one scalar each: <dK, K> = <dS, S> = <dQ, Q>, and <dV, V> = <dO, O>.
    sums = [float((x.double() * y.double()).sum()) for x, y in ((grad_key, k), (grad_query, q))]
    scale = float((grad_query.double() * q.double()).abs().sum())
    errors.append(abs(sums[0] - sums[1]) / scale)
    sums = [float((x.double() * y.double()).sum()) for x, y in ((grad_value, v), (grad, out))]
    errors.append(abs(sums[0] - sums[1]) / float((grad.double() * out.double()).abs().sum()))
    if not max(errors) <= TOLERANCE[dtype]:
        raise SystemExit(f"not timed, because it is wrong: {pattern}: {errors}")
    return max(errors)


def timed(
    name: str, pattern: Pattern, rows: int, dtype: DtypeName, *, kv_heads: int = HEADS, is_causal: bool = False
) -> dict[str, Any]:
    """Times of one pattern and of dense attention."""
    inputs = operands(rows, kv_heads, DTYPES[dtype])
    error = check(pattern, inputs, dtype, is_causal=is_causal)
    density = pattern.density(rows, num_kv_heads=kv_heads, is_causal=is_causal)
    *leaves, grad = inputs
    query, key, value = (x.requires_grad_() for x in leaves)

    def ours() -> Tensor:
        return attend(query, key, value, pattern, is_causal=is_causal)

    def dense() -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in leaves)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        return out.transpose(1, 2)

    result: dict[str, Any] = {
        "pattern": name,
        "density": density,
        "rows": rows,
        "heads": HEADS,
        "kv_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "block_size": BLOCK,
        "dtype": dtype,
        "causal": is_causal,
        "largest_error": error,
    }
    for mode in ("forward", "forward_backward"):
        times: dict[str, list[float]] = {"dense": [], "ours": []}
        for repeat in range(3):
            for who, call in (("dense", dense), ("ours", ours), ("ours", ours)):
                if mode == "forward":
                    with torch.no_grad():
                        taken = seconds(call)
                else:
                    taken = seconds(lambda call=call: torch.autograd.grad(call(), leaves, grad))  # type: ignore[misc]
                if repeat:
                    times[who].append(taken)
        least = {who: min(taken) for who, taken in times.items()}
        result[mode] = {
            "seconds": least["ours"],
            "dense_seconds": least["dense"],
            "median": statistics.median(times["ours"]),
            "dense_median": statistics.median(times["dense"]),
            "ratio_to_density": least["ours"] / (density * least["dense"]),
        }
    print(result, flush=True)
    return result


def measure(given: Blocks) -> dict[str, Any]:
    """Every kind of block pattern at every density and dtype; grouped heads and a causal mask for one of them."""
    results = []
    for dtype in given.dtypes:
        for density in given.densities:
            for name, pattern in patterns(density, given.rows).items():
                results.append(timed(name, pattern, given.rows, dtype))
        for is_causal, kv_heads in ((True, HEADS), (False, 1)):
            pattern = from_block_mask(drawn_mask(0.1, kv_heads, given.rows), BLOCK)
            name = "from_block_mask, drawn"
            results.append(timed(name, pattern, given.rows, dtype, kv_heads=kv_heads, is_causal=is_causal))
    return {"speed": results}


if __name__ == "__main__":
    tiny = {"rows": 1024, "densities": (0.2,), "dtypes": ("float32",)}
    run(Blocks, measure, text=__doc__, name="blocks", group="attention", tiny=tiny)
