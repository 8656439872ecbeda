"""Large float32 products on a CPU by PyTorch's two routes, and a training step by each.

    python -m benchmarks.linear [--rows N ...]

Both routes are timed in turns and must agree: an `embed` of a slide takes products of these shapes. The step is of a
LongNet of 4 layers, 512 wide. "chosen" is the route that the models of the package take here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.models import LongNetConfig, LongNetForCausalLM
from dilated_attention_pytorch.nn.linear import ROUTES, VARIABLE, linear_choice

from .study import Study, run, seconds

SHAPES = ((768, 768), (768, 3072), (3072, 768))
"""Inner and outer width of the products of a slide encoder."""
TOLERANCE = 1e-5
"""Relative to the largest number of a result."""


@dataclass(frozen=True, kw_only=True)
class Linear(Study):
    """Settings."""

    rows: tuple[int, ...] = (1, 16, 128, 512, 1024, 4096, 20_000)
    """Rows of a product."""
    tokens: int = 8192
    """Tokens of a training step."""
    repeats: int = 5
    """Turns of each route."""


def in_turns(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Shortest seconds of each call."""
    for call in calls.values():
        call()
    turns = [{name: seconds(call) for name, call in calls.items()} for _ in range(repeats)]
    return {name: min(turn[name] for turn in turns) for name in calls}


def product(rows: int, width_in: int, width_out: int, repeats: int) -> dict[str, Any]:
    """GFLOP/s of one product by both routes.

    Raises:
        SystemExit: their results differ by more than rounding explains.
    """
    operands = [torch.randn(shape, requires_grad=True) for shape in ((rows, width_in), (width_out, width_in))]
    operands.append(torch.randn(width_out, requires_grad=True))
    grad = torch.randn(rows, width_out)

    def forward(name: str) -> Tensor:
        with torch.no_grad():
            return ROUTES[name](*operands)

    def both(name: str) -> tuple[Tensor, ...]:
        return torch.autograd.grad(ROUTES[name](*operands), operands, grad)

    difference = max(
        float((found - expected).abs().max() / expected.abs().max())
        for found, expected in zip(
            (forward("convolution"), *both("convolution")), (forward("linear"), *both("linear")), strict=True
        )
    )
    if not difference < TOLERANCE:
        raise SystemExit(f"not timed, because the routes differ by {difference:.1e} at {rows} rows")
    found: dict[str, Any] = {"rows": rows, "in": width_in, "out": width_out, "largest_difference": difference}
    for mode, call, flops in (("forward", forward, 2), ("forward_backward", both, 6)):
        taken = in_turns({name: functools.partial(call, name) for name in ROUTES}, repeats)
        found[mode] = {name: flops * rows * width_in * width_out / taken[name] / 1e9 for name in taken}
    return found


def step(tokens: int, repeats: int) -> dict[str, Any]:
    """Seconds of a forward and backward pass by both routes, and the losses."""
    config = LongNetConfig(
        vocab_size=4096,
        embed_dim=512,
        num_layers=4,
        num_heads=8,
        segment_lengths=(1024, 8192),
        dilation_rates=(1, 4),
    )
    model = LongNetForCausalLM.from_longnet_config(config).train()
    ids = torch.randint(config.vocab_size, (1, tokens))
    losses = {}

    def by(name: str) -> None:
        os.environ[VARIABLE] = name
        linear_choice.cache_clear()
        loss = model(input_ids=ids, labels=ids, skip_logits=True).loss
        loss.backward()
        losses[name] = float(loss.detach())

    before = os.environ.pop(VARIABLE, None)
    taken = in_turns({name: functools.partial(by, name) for name in ROUTES}, repeats)
    os.environ.pop(VARIABLE)
    if before is not None:
        os.environ[VARIABLE] = before
    linear_choice.cache_clear()
    return {"tokens": tokens, "seconds": taken, "losses": losses, "ratio": taken["convolution"] / taken["linear"]}


def measure(given: Linear) -> dict[str, Any]:
    """Rates of the products, the step, and the choice of this machine."""
    choice = linear_choice(torch.get_num_threads())
    print(choice.describe())
    products = []
    for width_in, width_out in SHAPES:
        for rows in given.rows:
            products.append(product(rows, width_in, width_out, given.repeats))
            print(products[-1], flush=True)
    of_step = step(given.tokens, given.repeats)
    print(of_step)
    return {"chosen": choice._asdict(), "products": products, "step": of_step}


if __name__ == "__main__":
    tiny = {"rows": (1, 1100), "tokens": 64, "repeats": 1}
    run(Linear, measure, text=__doc__, name="linear", group="models", tiny=tiny)
