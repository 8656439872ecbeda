"""Inputs of magnitude 1e-6 to 1e8: which implementations stay finite and accurate, compared with PyTorch's attention.

    TRITON_INTERPRET=1 python -m benchmarks.magnitudes [--output FILE]

Query, key and value are normal numbers times the magnitude, for 61 rows under a sum of dilation groups and a window,
causal and not. The error of a result is its largest difference from float64 on the same inputs, relative to the largest
term of its sum: gradients of queries are 0 in exact arithmetic where one key has all probability.
Needs no GPU: the Triton kernels run in Triton's interpreter.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dilated_attention_pytorch import DilatedPattern, Pattern, attend, local_window
from dilated_attention_pytorch.benchmarks.results import module_command, origin
from dilated_attention_pytorch.kernels.select import Impl, refusal

from .options import parse, parser_of, write_results

MAGNITUDES = (1e-6, 1e-3, 1.0, 1e2, 1e4, 1e5, 1e6, 1e8)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
IMPLS = ("reference", "aten", "native", "triton")
PYTORCH = "PyTorch"
"""PyTorch's own `scaled_dot_product_attention`, dense."""
ROWS, HEADS, KV_HEADS, WIDTH = 61, 2, 1, 16
PATTERN = DilatedPattern([16, 50], [1, 3]) + local_window(9)
ALL = DilatedPattern([ROWS], [1])


class Outcome(NamedTuple):
    """Result of one implementation over the output and the three gradients, causal and not."""

    is_finite: bool
    error: float
    """Largest error; NaN if a result is not finite."""


def operands(dtype: torch.dtype, magnitude: float) -> list[Tensor]:
    """Query, key and value of the given magnitude, and the gradient of the output."""
    generator = torch.Generator().manual_seed(3)
    sizes = ((HEADS, magnitude), (KV_HEADS, magnitude), (KV_HEADS, magnitude), (HEADS, 1.0))
    return [
        (torch.randn(1, ROWS, heads, WIDTH, generator=generator, dtype=torch.float64) * size).to(dtype)
        for heads, size in sizes
    ]


def can_run(impl: str, dtype: torch.dtype) -> bool:
    """Whether an implementation supports this dtype on this machine's CPU."""
    return impl == PYTORCH or refusal(impl, torch.device("cpu"), dtype, WIDTH) is None


def outcome(impl: str, dtype: torch.dtype, magnitude: float) -> Outcome:
    """Largest error of one implementation against float64."""
    inputs, is_finite, error = operands(dtype, magnitude), True, 0.0
    exact_inputs, pattern = [x.double() for x in inputs], ALL if impl == PYTORCH else PATTERN
    query, key, value, grad = (float(x.norm(dim=-1).max()) for x in exact_inputs)
    # The largest probability is 1. The derivative by a score is a probability times at most 2 |dO| |v|.
    of_score = 2 * grad * value * WIDTH**-0.5
    terms = (float(exact_inputs[2].abs().max()), of_score * key, of_score * query, grad)
    for is_causal in (False, True):
        found = _results(impl, inputs, pattern, is_causal=is_causal)
        exact = _results("reference", exact_inputs, pattern, is_causal=is_causal)
        for mine, want, term in zip(found, exact, terms, strict=True):
            is_finite = is_finite and bool(mine.isfinite().all())
            error = max(error, float((mine.double() - want).abs().max()) / term)
    return Outcome(is_finite, error if is_finite else math.nan)


def _results(impl: str, inputs: list[Tensor], pattern: Pattern, *, is_causal: bool) -> list[Tensor]:
    *leaves, grad = inputs
    query, key, value = leaves = [x.clone().requires_grad_() for x in leaves]
    if impl == PYTORCH:
        key, value = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (key, value))
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = scaled_dot_product_attention(query, key, value, is_causal=is_causal).transpose(1, 2)
    else:
        out = attend(query, key, value, pattern, is_causal=is_causal, impl=cast(Impl, impl))
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def row_of(magnitude: float, outcomes: dict[str, Outcome]) -> str:
    """A row of the table of docs/definition.md."""
    cells = ["" if name not in outcomes else _cell(outcomes[name]) for name in (*IMPLS, PYTORCH)]
    return f"| {magnitude:g} | " + " | ".join(cells) + " |"


def _cell(found: Outcome) -> str:
    return f"{found.error:.0e}" if found.is_finite else "not finite"


def main() -> None:
    parser = parser_of(__doc__)
    words = parse(parser, "magnitudes.json")
    dtypes, magnitudes = (DTYPES[:1], MAGNITUDES[:2]) if words.tiny else (DTYPES, MAGNITUDES)
    console, records = Console(width=140), []
    for dtype in dtypes:
        table = Table(str(dtype).removeprefix("torch."), *IMPLS, PYTORCH)
        for magnitude in magnitudes:
            found = {x: outcome(x, dtype, magnitude) for x in (*IMPLS, PYTORCH) if can_run(x, dtype)}
            table.add_row(*row_of(magnitude, found).strip("| ").split(" | "))
            records.append(
                {
                    "dtype": str(dtype).removeprefix("torch."),
                    "magnitude": magnitude,
                    "errors": {name: one.error if one.is_finite else None for name, one in found.items()},
                }
            )
        console.print(table)
    values = {"machine": origin(module_command()), "rows": ROWS, "heads": HEADS, "head_dim": WIDTH, "records": records}
    write_results(words.output, "attention", values)


if __name__ == "__main__":
    main()
