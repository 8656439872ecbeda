"""Time of dilated attention on this machine, as a ratio to dense attention's own rate in the same run.

    python -m benchmarks.attention [--rows N ...] [--head-dims D ...] [--impl auto|native|aten] [--avx2]

A time is printed only if the call's sampled rows agree with the definition. The bound of a time is the exact number of
operations of its pattern divided by the rate of PyTorch's dense attention at 8,192 rows, in the same run and dtype.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dilated_attention_pytorch import DilatedPattern, attend
from dilated_attention_pytorch.benchmarks.exactness import draw_samples, judge, sampled_gradient
from dilated_attention_pytorch.benchmarks.shapes import Case, DtypeName

from .study import DTYPES, StudyOfCalls, run, seconds

PATTERN = DilatedPattern([2048, 4096, 8192], [1, 2, 4])
LONG_SECONDS = 10.0  # calls that take longer are timed only twice


@dataclass(frozen=True, kw_only=True)
class Attention(StudyOfCalls):
    """Settings."""

    rows: tuple[int, ...] = (16384, 65536)
    """Rows of the calls."""
    head_dims: tuple[int, ...] = (64,)
    """Widths of a head."""
    heads: int = 8
    """Number of heads."""
    dtypes: tuple[DtypeName, ...] = ("float32", "bfloat16")
    """Dtypes of the operands."""
    dense_rows: int = 8192
    """Rows of dense attention, whose rate is the bound's."""
    repeats: int = 5
    """Times that a call is timed; at most 3 above 20,000 rows."""


Operands = tuple[Tensor, Tensor, Tensor]


def operands(rows: int, heads: int, dtype: torch.dtype, head_dim: int = 64) -> tuple[Operands, Tensor]:
    """Query, key and value, which require gradients, and the gradient of the output."""
    generator = torch.Generator().manual_seed(rows)
    q, k, v, g = (torch.randn(1, rows, heads, head_dim, generator=generator).to(dtype) for _ in range(4))
    return (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), g


class Dense:
    """Dense scaled dot-product attention: the rate that this machine reaches."""

    def __init__(self, rows: int, heads: int, dtype: torch.dtype, head_dim: int, *, is_causal: bool) -> None:
        self.inputs, self.grad = operands(rows, heads, dtype, head_dim)
        self.is_causal = is_causal
        # PyTorch counts the whole square for its own causal attention; here only the triangle counts.
        pairs = rows * (rows + 1) // 2 if is_causal else rows**2
        self.flops = 4 * head_dim * heads * pairs

    def forward(self) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in self.inputs)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return out.transpose(1, 2)

    def forward_seconds(self) -> float:
        with torch.no_grad():
            return seconds(self.forward)

    def both_seconds(self) -> float:
        return seconds(lambda: torch.autograd.grad(self.forward(), self.inputs, self.grad))


def gate(inputs: Operands, dtype: DtypeName, *, is_causal: bool) -> dict[str, float]:
    """Relative errors of the timed call on sampled rows, and of the gradients through them.

    Raises:
        SystemExit: they exceed what rounding explains; nothing is timed.
    """
    _, rows, heads, head_dim = inputs[0].shape
    case = Case(
        shape="study",
        mode="forward_backward",
        rows=rows,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        segment_lengths=tuple(PATTERN.segment_lengths),
        dilation_rates=tuple(PATTERN.dilation_rates),
        causal=is_causal,
        dtype=dtype,
    )
    samples = draw_samples(case)
    grad = sampled_gradient(case, samples, inputs[0])
    out = attend(*inputs, case.pattern, is_causal=is_causal)
    verdict = judge(case, "pattern", samples, inputs, out, grad, torch.autograd.grad(out, inputs, grad))
    if not verdict.passes:
        raise SystemExit(f"not timed, because it is wrong: {case.name}: {verdict.describe()}")
    return verdict.errors


def timed(given: Attention, rows: int, head_dim: int, dtype: DtypeName, *, is_causal: bool) -> dict[str, Any]:
    """Median times of this package and of dense attention, timed alternately, and their ratio per operation."""
    inputs, grad = operands(rows, given.heads, DTYPES[dtype], head_dim)
    errors = gate(inputs, dtype, is_causal=is_causal)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        attend(*inputs, PATTERN, is_causal=is_causal)
    flops = counter.get_total_flops()

    def forward() -> Tensor:
        return attend(*inputs, PATTERN, is_causal=is_causal)

    def forward_seconds() -> float:
        with torch.no_grad():
            return seconds(forward)

    def both_seconds() -> float:
        return seconds(lambda: torch.autograd.grad(forward(), inputs, grad))

    dense = Dense(given.dense_rows, given.heads, DTYPES[dtype], head_dim, is_causal=is_causal)
    result: dict[str, Any] = {
        "rows": rows,
        "heads": given.heads,
        "head_dim": head_dim,
        "dtype": dtype,
        "causal": is_causal,
        "forward_flops": flops,
        "largest_sampled_errors": errors,
    }
    repeats = min(given.repeats, 3) if rows > 20_000 else given.repeats
    for name, ours, theirs, factor in (
        ("forward", forward_seconds, dense.forward_seconds, 1.0),
        ("forward_backward", both_seconds, dense.both_seconds, 3.5),
    ):
        times: list[float] = []
        dense_times: list[float] = []
        # With AVX2 alone PyTorch's backward in bfloat16 takes most of a minute.
        for _ in range(repeats if theirs() < LONG_SECONDS else 2):
            dense_times.append(theirs())
            times.append(ours())
            dense_times.append(theirs())
        rate = factor * dense.flops / statistics.median(dense_times)
        ratio = statistics.median(times) / (factor * flops / rate)
        result[name] = {
            "seconds": statistics.median(times),
            "fastest": min(times),
            "slowest": max(times),
            "dense_seconds": statistics.median(dense_times),
            "dense_rate_gflops": rate / 1e9,
            "ratio_to_bound": ratio,
        }
    return result


def measure(given: Attention) -> dict[str, Any]:
    """Every combination of the settings."""
    results = []
    for rows, head_dim, dtype, is_causal in itertools.product(given.rows, given.head_dims, given.dtypes, (False, True)):
        results.append(timed(given, rows, head_dim, dtype, is_causal=is_causal))
        print(results[-1], flush=True)
    return {"dense_rows": given.dense_rows, "speed": results}


if __name__ == "__main__":
    tiny = {"rows": (1024,), "heads": 1, "dtypes": ("float32",), "dense_rows": 256, "repeats": 1}
    run(Attention, measure, text=__doc__, name="attention", group="attention", tiny=tiny)
