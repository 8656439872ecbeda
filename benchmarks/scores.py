"""Terms of the scores: seconds of attention with each over the seconds without, and what narrow values save.

    python -m benchmarks.scores [--rows N ...]

All calls of a line are timed in turns. "values" compares values 128 wide under keys 192 wide with the same values
padded to 192. "coordinates" are slopes of distances in a square grid of tiles. The slopes, the table and the sinks have
gradients, as they have in training.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dilated_attention_pytorch import DilatedPattern, attend
from dilated_attention_pytorch.ops import Scores

from .linear import in_turns
from .study import StudyOfCalls, run

HEADS, WIDTH = 8, 64
KEY_WIDTH, VALUE_WIDTH = 192, 128


@dataclass(frozen=True, kw_only=True)
class OfScores(StudyOfCalls):
    """Settings."""

    rows: tuple[int, ...] = (16_384,)
    """Rows of queries and keys."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Dtypes of query, key and value."""
    repeats: int = 5
    """Turns of each call."""


def terms() -> dict[str, tuple[Tensor, ...]]:
    """The tensors of every case; all require gradients."""
    slopes = (2.0 ** -torch.arange(1.0, HEADS + 1)).requires_grad_()
    return {
        "none": (),
        "softcap": (),
        "slopes": (slopes,),
        "coordinates": (slopes,),
        "distance_bias": (torch.randn(HEADS, 257, requires_grad=True),),
        "sinks": (torch.randn(HEADS, requires_grad=True),),
    }


def scores_of(name: str, tensors: tuple[Tensor, ...], rows: int) -> Scores | None:
    if name == "coordinates":
        tiles = torch.arange(rows)
        edge = math.isqrt(rows)
        return Scores(slopes=tensors[0], coordinates=torch.stack((tiles // edge, tiles % edge), -1).unsqueeze(0))
    if name == "none":
        return None
    if name == "softcap":
        return Scores(softcap=50.0)
    by_name = {name: tensors[0]}
    return Scores(slopes=by_name.get("slopes"), distance_bias=by_name.get("distance_bias"), sinks=by_name.get("sinks"))


def call(q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, name: str, tensors: Any, is_training: bool) -> None:
    with torch.set_grad_enabled(is_training):
        out = attend(q, k, v, pattern, is_causal=True, scores=scores_of(name, tensors, q.shape[1]))
    if is_training:
        torch.autograd.grad(out, (q, k, v, *tensors), torch.ones_like(out))


def padded(q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, is_training: bool) -> None:
    with torch.set_grad_enabled(is_training):
        wide = functional.pad(v, (0, KEY_WIDTH - VALUE_WIDTH))
        out = attend(q, k, wide, pattern, is_causal=True)[..., :VALUE_WIDTH]
    if is_training:
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


def ratios(calls: dict[str, Callable[[], object]], repeats: int, base: str) -> dict[str, Any]:
    seconds = in_turns(calls, repeats)
    of_base = seconds.pop(base)
    return {"seconds": of_base, "ratios": {name: taken / of_base for name, taken in seconds.items()}}


def line(rows: int, dtype: torch.dtype, repeats: int, *, is_training: bool) -> dict[str, Any]:
    """Ratios of one length and dtype."""
    pattern = DilatedPattern([2048, 4096, 8192, 16_384], [1, 2, 4, 8])
    q, k, v = (torch.randn(1, rows, HEADS, WIDTH).to(dtype).requires_grad_() for _ in range(3))
    calls: dict[str, Callable[[], object]] = {
        name: functools.partial(call, q, k, v, pattern, name, tensors, is_training) for name, tensors in terms().items()
    }
    found: dict[str, Any] = {
        "rows": rows,
        "dtype": str(dtype),
        "pass": "forward_backward" if is_training else "forward",
    }
    found |= ratios(calls, repeats, "none")
    q, k = (torch.randn(1, rows, 2, KEY_WIDTH).to(dtype).requires_grad_() for _ in range(2))
    v = torch.randn(1, rows, 2, VALUE_WIDTH).to(dtype).requires_grad_()
    own = functools.partial(call, q, k, v, pattern, "none", (), is_training)
    widths: dict[str, Callable[[], object]] = {
        "values": own,
        "padded": functools.partial(padded, q, k, v, pattern, is_training),
    }
    found["ratios"]["values"] = ratios(widths, repeats, "padded")["ratios"]["values"]
    return found


def measure(given: OfScores) -> dict[str, Any]:
    """Ratios for every length, dtype and pass."""
    lines = []
    for rows, dtype, is_training in itertools.product(given.rows, given.dtypes, (False, True)):
        lines.append(line(rows, getattr(torch, dtype), given.repeats, is_training=is_training))
        print(lines[-1], flush=True)
    return {"lines": lines}


if __name__ == "__main__":
    run(OfScores, measure, text=__doc__, name="scores", group="attention", tiny={"rows": (64,), "repeats": 1})
