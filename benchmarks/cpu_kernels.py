"""The package's CPU kernels against PyTorch's own: time of impl="native" over impl="aten" on a grid of calls.

    python -m benchmarks.cpu_kernels [--avx2] [--seconds S]

Covers every dtype with every head width, number of rows and kind of pattern, each as a decoding step (one query, the
last row), as a forward pass, and as forward and backward. Causal masks and grouped heads are drawn at random. The
number of heads is chosen so that a call takes milliseconds. A call of more than a few dozen GFLOP is made causal, and
left out if it is still too long.

A case is timed only if native agrees, within rounding, with aten in higher precision on the same operands (float64, or
float32 for 16-bit dtypes), for output and gradients. Both are then called in turn; the ratio is that of the minimum
times: other load on the machine makes calls longer, never shorter.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dilated_attention_pytorch import DilatedPattern, Pattern, attend, from_block_mask, local_window
from dilated_attention_pytorch.benchmarks import exactness, shapes
from dilated_attention_pytorch.kernels.select import Impl
from dilated_attention_pytorch.patterns.flops import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, pair_flops

from .study import Study, run, seconds

Mode = Literal["decode", "forward", "forward_backward"]
DTYPES: tuple[shapes.DtypeName, ...] = ("float32", "bfloat16", "float16")
HEAD_DIMS = (16, 48, 64, 96, 128, 256)
ROWS = (256, 2048, 16384)
KINDS = ("dilated", "local_window", "blocks", "dense")
MODES: tuple[Mode, ...] = ("decode", "forward", "forward_backward")
TARGET, MOST = 0.5e9, 35e9  # operations of a call: target for the number of heads, and maximum
LEAST_SAMPLE = 1e-3  # seconds: shorter calls are repeated within a sample


@dataclass(frozen=True, kw_only=True)
class CpuKernels(Study):
    """Settings."""

    only: str = ""
    """Cases whose name contains this."""
    seconds: float = 0.15
    """That a case is timed for, two turns at least."""
    most_flops: float = math.inf
    """Leaves out cases of more operations."""
    most_cases: int | None = None
    """Number of cases, at most."""


@functools.cache
def pattern_of(kind: str, rows: int, kv_heads: int) -> Pattern:
    """The pattern of a kind, scaled to the rows."""
    if kind == "dilated":
        return DilatedPattern([rows // 16, rows // 8, rows // 4], [1, 2, 4])
    if kind == "local_window":
        return local_window(rows // 16, rows // 16)
    if kind == "dense":
        return DilatedPattern([rows], [1])
    block = 32 if rows == min(ROWS) else 128
    number = rows // block
    drawn = torch.rand(kv_heads, number, number, generator=torch.Generator().manual_seed(rows)) < 0.12
    return from_block_mask(drawn | torch.eye(number, dtype=torch.bool), block)


@functools.cache
def pairs_of(kind: str, rows: int, kv_heads: int, *, is_causal: bool) -> float:
    """Query-key pairs per head."""
    density = pattern_of(kind, rows, kv_heads).density(rows, num_kv_heads=kv_heads, is_causal=is_causal)
    return density * (rows * (rows + 1) / 2 if is_causal else rows**2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One call."""

    dtype: shapes.DtypeName
    head_dim: int
    rows: int
    kind: str
    mode: Mode
    causal: bool
    heads: int
    kv_heads: int

    @property
    def name(self) -> str:
        """The case in words."""
        heads = f"H={self.heads}" + ("" if self.heads == self.kv_heads else f"/{self.kv_heads}")
        return (
            f"{self.mode}, {self.kind}, {self.dtype}, D={self.head_dim}, N={self.rows}, {heads}, "
            f"{'causal' if self.causal else 'not causal'}"
        )

    @property
    def flops(self) -> float:
        """Operations of the call."""
        pairs = pairs_of(self.kind, self.rows, self.kv_heads, is_causal=self.causal)
        if self.mode == "decode":
            pairs /= self.rows
        products = FORWARD_PRODUCTS + (BACKWARD_PRODUCTS if self.mode == "forward_backward" else 0)
        return self.heads * pairs * pair_flops(1, self.head_dim, products)


def fitted(case: Case) -> Case | None:
    """The case with enough heads to make it long enough; None if one head takes too long."""
    values = asdict(case)
    if case.mode == "decode":
        return Case(**values | {"heads": 32, "kv_heads": 32 // case.kv_heads})
    one = Case(**values | {"heads": 1, "kv_heads": 1})
    if one.flops > MOST:
        one = Case(**asdict(one) | {"causal": True})
    if one.flops > MOST:
        return None
    heads = 2 ** max(0, min(5, math.floor(math.log2(TARGET / one.flops))))
    return Case(**asdict(one) | {"heads": heads, "kv_heads": max(1, heads // case.kv_heads)})


def grid() -> tuple[list[Case], list[Case]]:
    """The cases in the order of the run, and those that take too long."""
    draw = random.Random(0)
    cases: list[Case] = []
    too_long: list[Case] = []
    for dtype, head_dim, rows, kind, mode in itertools.product(DTYPES, HEAD_DIMS, ROWS, KINDS, MODES):
        case = Case(
            dtype=dtype,
            head_dim=head_dim,
            rows=rows,
            kind=kind,
            mode=mode,
            causal=draw.random() < 0.5,
            heads=1,
            kv_heads=draw.choice((1, 1, 4)),  # here: query heads per key/value head
        )
        found = fitted(case)
        (too_long if found is None else cases).append(case if found is None else found)
    draw.shuffle(cases)
    return cases, too_long


class Call:
    """A case with its operands."""

    def __init__(self, case: Case) -> None:
        self.case, self.pattern = case, pattern_of(case.kind, case.rows, case.kv_heads)
        self.is_backward = case.mode == "forward_backward"
        generator = torch.Generator().manual_seed(case.rows + case.head_dim)
        dtype = getattr(torch, case.dtype)
        queries = 1 if case.mode == "decode" else case.rows
        sizes = ((queries, case.heads), (case.rows, case.kv_heads), (case.rows, case.kv_heads), (queries, case.heads))
        *leaves, self.grad = (
            torch.randn(1, rows, heads, case.head_dim, generator=generator).to(dtype) for rows, heads in sizes
        )
        self.leaves = tuple(leaf.requires_grad_(self.is_backward) for leaf in leaves)
        self.offset = case.rows - queries

    def results(self, impl: Impl, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """The output, and the gradients if they are part of the call."""
        leaves, grad = self.leaves, self.grad
        if dtype is not None:
            leaves = tuple(leaf.detach().to(dtype).requires_grad_(self.is_backward) for leaf in leaves)
            grad = grad.to(dtype)
        query, key, value = leaves
        out = attend(query, key, value, self.pattern, is_causal=self.case.causal, query_offset=self.offset, impl=impl)
        return (out, *torch.autograd.grad(out, leaves, grad)) if self.is_backward else (out,)

    def error(self) -> float:
        """Largest error of native relative to aten in higher precision, over what rounding explains."""
        case = self.case
        precise = torch.float64 if case.dtype == "float32" else torch.float32
        allowed, _ = exactness.allowed_errors(
            shapes.Case(
                shape="grid",
                mode="forward",
                rows=case.rows,
                heads=case.heads,
                kv_heads=case.kv_heads,
                head_dim=case.head_dim,
                segment_lengths=(case.rows,) * (3 if case.kind == "dilated" else 1),
                dilation_rates=(1,) * (3 if case.kind == "dilated" else 1),
                causal=case.causal,
                dtype=case.dtype,
            )
        )
        pairs = zip(self.results("native"), self.results("aten", precise), strict=True)
        errors = [float(((got.to(precise) - want).norm() / want.norm()).detach()) for got, want in pairs]
        return max(math.inf if math.isnan(error) else error for error in errors) / allowed


def timed(case: Case, budget: float) -> dict[str, Any]:
    """Ratio of the minimum times; without it if native is wrong."""
    call = Call(case)
    result: dict[str, Any] = {**asdict(case), "name": case.name, "gflop": case.flops / 1e9, "error": call.error()}
    if not result["error"] <= 1.0:
        return result
    impls: tuple[Impl, Impl] = ("native", "aten")
    samples: dict[str, list[float]] = {impl: [] for impl in impls}
    with torch.set_grad_enabled(call.is_backward):
        first = {impl: seconds(lambda impl=impl: call.results(impl)) for impl in impls}  # type: ignore[misc]
        times = {impl: max(1, math.ceil(LEAST_SAMPLE / first[impl])) for impl in impls}
        turn = sum(times[impl] * first[impl] for impl in impls)
        for _ in range(max(2, min(7, math.floor(budget / turn)))):
            for impl in impls:
                calls = times[impl]
                taken = seconds(lambda impl=impl, calls=calls: [call.results(impl) for _ in range(calls)])  # type: ignore[misc]
                samples[impl].append(taken / calls)
    least = {impl: min(taken) for impl, taken in samples.items()}
    return result | {
        "turns": len(samples["native"]),
        "native_seconds": least["native"],
        "aten_seconds": least["aten"],
        "native_median": statistics.median(samples["native"]),
        "aten_median": statistics.median(samples["aten"]),
        "ratio": least["native"] / least["aten"],
    }


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, geometric means over all cases and by value of every axis, the worst case, and all slower ones."""
    right = [result for result in results if "ratio" in result]
    slower = sorted((x for x in right if x["ratio"] > 1.0), key=lambda x: -x["ratio"])
    axes = ("mode", "dtype", "head_dim", "rows", "kind", "causal")
    return {
        "cases": len(right),
        "wrong": [result["name"] for result in results if "ratio" not in result],
        "slower": len(slower),
        "geometric_mean": statistics.geometric_mean(result["ratio"] for result in right),
        "worst": max(result["ratio"] for result in right),
        "geometric_mean_by": {
            axis: {
                str(value): statistics.geometric_mean(x["ratio"] for x in right if x[axis] == value)
                for value in sorted({x[axis] for x in right})
            }
            for axis in axes
        },
        "slower_cases": [{name: x[name] for name in ("name", "ratio", "native_seconds")} for x in slower],
    }


def measure(given: CpuKernels) -> dict[str, Any]:
    """The grid.

    Raises:
        SystemExit: native is wrong in a case.
    """
    cases, too_long = grid()
    cases = [case for case in cases if given.only in case.name and case.flops < given.most_flops]
    results = []
    for case in cases[: given.most_cases]:
        results.append(timed(case, given.seconds))
        print(f"{len(results)} of {len(cases)}: {results[-1].get('ratio', 'WRONG')} {case.name}", flush=True)
    found = summary(results)
    print(found)
    if found["wrong"]:
        raise SystemExit("not published, because native is wrong")
    too_long_names = [case.name for case in too_long]
    return {"impl": ["native", "aten"], **found, "too_long": too_long_names, "results": results}


if __name__ == "__main__":
    tiny = {"most_flops": 1e7, "most_cases": 6, "seconds": 0.0}
    run(CpuKernels, measure, text=__doc__, name="cpu_kernels", group="attention", tiny=tiny)
