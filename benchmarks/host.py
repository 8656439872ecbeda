"""What a call costs before any arithmetic: attention over 16 rows, on one thread, next to PyTorch's dense attention.

    python -m benchmarks.host [--repeats N]

At 16 rows the arithmetic takes a few microseconds; what remains is checking, planning (cached after the first call),
dispatch and, with gradients, autograd. The implementations are called in turn; medians are of all calls.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dilated_attention_pytorch import DilatedPattern, attend

from .study import DTYPES, Study, run, seconds

PATTERN = DilatedPattern([64, 256], [1, 4])
DENSE = "dense SDPA"
ROWS, HEADS, HEAD_DIM = 16, 2, 16


@dataclass(frozen=True, kw_only=True)
class HostTime(Study):
    """Settings."""

    repeats: int = 500
    """Calls of each implementation that are timed."""
    threads: int | None = 1
    """Threads of PyTorch."""


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """All pairs under the causal mask."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


CALLS: dict[str, Callable[..., Tensor]] = {
    "native": functools.partial(attend, pattern=PATTERN, is_causal=True, impl="native"),
    "aten": functools.partial(attend, pattern=PATTERN, is_causal=True, impl="aten"),
    DENSE: dense,
}


def timed(dtype: torch.dtype, *, has_backward: bool, repeats: int) -> dict[str, float]:
    """Median microseconds of a call, by implementation."""
    qkv = [x.requires_grad_(has_backward) for x in torch.randn(3, 1, ROWS, HEADS, HEAD_DIM).to(dtype).unbind()]

    def call(name: str) -> None:
        out = CALLS[name](*qkv)
        if has_backward:
            torch.autograd.grad(out, qkv, out.detach())

    found: dict[str, list[float]] = {name: [] for name in CALLS}
    for turn in range(repeats + repeats // 10 + 1):
        for name in CALLS:
            taken = seconds(functools.partial(call, name))
            if turn > repeats // 10:
                found[name].append(taken)
    return {name: 1e6 * statistics.median(values) for name, values in found.items()}


def measure(given: HostTime) -> dict[str, Any]:
    """Both dtypes, without and with the backward."""
    points = []
    for name in ("float32", "bfloat16"):
        for mode in ("forward", "forward + backward"):
            found = timed(DTYPES[name], has_backward=mode != "forward", repeats=given.repeats)
            points.append({"dtype": name, "mode": mode, "microseconds": found})
            print(points[-1], flush=True)
    return {"rows": ROWS, "heads": HEADS, "head_dim": HEAD_DIM, "points": points}


if __name__ == "__main__":
    run(HostTime, measure, text=__doc__, name="host", group="attention", tiny={"repeats": 3})
