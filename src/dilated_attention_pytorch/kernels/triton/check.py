"""The check of the kernels on a device, a program of its own: a few calls against the definition in float64.

    python -m dilated_attention_pytorch.kernels.triton.check cuda:0 bfloat16 64

It prints a line of JSON once it has the device, before every call, after it, and at the end: what is missing tells
:mod:`..device_check` where the program ended. Operands are drawn, and results compared, on the CPU.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels.device_check import machine_of
from dilated_attention_pytorch.kernels.reference import reference_probabilities
from dilated_attention_pytorch.kernels.rounding import NAMES, Exact, Tally, Verdict, allowed_errors, exact_results
from dilated_attention_pytorch.kernels.select import is_interpreted
from dilated_attention_pytorch.parent import end_with_parent
from dilated_attention_pytorch.patterns import DilatedPattern, Pattern, local_window

from . import launch
from .plan import plan_of
from .problem import Problem


class CheckedCall(NamedTuple):
    """A call of the check."""

    name: str
    pattern: Pattern
    num_queries: int
    num_keys: int
    heads: tuple[int, int]
    """Query heads, and key/value heads."""
    is_causal: bool
    batch_size: int = 1
    query_offset: int = 0
    key_offset: int = 0
    boundaries: tuple[int, ...] | None = None
    is_padded: bool = False
    is_narrow: bool = False
    """Whether rows of a head fill three quarters of their block."""
    has_biases: bool = False
    """Whether biases by distance and of keys add to the scores."""
    num_splits: int = 1
    """More than one: the forward alone, with the keys divided among so many programs."""


CALLS = (
    CheckedCall("causal", DilatedPattern([400, 2048], [1, 3]), 521, 521, (2, 2), True),
    CheckedCall(
        "window, padding, slab",
        DilatedPattern([100, 600], [2, 3]) + local_window(150, 70),
        151,
        401,
        (2, 2),
        False,
        batch_size=2,
        query_offset=211,
        key_offset=37,
        is_padded=True,
        is_narrow=True,
    ),
    CheckedCall("documents", DilatedPattern([64, 128], [1, 2]), 263, 263, (3, 1), True, boundaries=(0, 97, 98, 263)),
    CheckedCall("biases", DilatedPattern([70, 200], [1, 2]), 199, 199, (2, 1), True, has_biases=True),
    CheckedCall(
        "decoding", DilatedPattern([512, 4096], [1, 2]), 1, 1001, (8, 2), True, query_offset=1000, num_splits=3
    ),
)
"""Together: causal and not, several groups, a window, grouped heads, padding, packed documents, odd lengths,
offsets, heads narrower than their blocks, biases of the scores, split keys. The first is computed by every
configuration that the kernels have."""


class Drawn(NamedTuple):
    """A call with its operands on the device, and its results by the definition."""

    problem: Problem
    grad_out: Tensor
    exact: list[Exact]
    """Over ``[B, heads, rows, D]``."""


def main(arguments: Sequence[str]) -> None:
    """Compute all calls on a device, in a dtype, with heads up to a width."""
    device, dtype, width = torch.device(arguments[0]), getattr(torch, arguments[1]), int(arguments[2])
    end_with_parent()
    # Memory that a kernel leaves unwritten is NaN then, and nothing is timed.
    torch.use_deterministic_algorithms(True)
    torch.empty(1, device=device)
    _say(machine=machine_of(device))
    for index, call in enumerate(CALLS):
        drawn = draw(call, device, dtype, width, seed=index)
        _check(call, drawn, by_all=index == 0 and not is_interpreted())
    _say(complete=True)


def _check(call: CheckedCall, drawn: Drawn, *, by_all: bool) -> None:
    """Compute a call and judge it: by the first configuration of every kernel, or by all in turn."""
    from triton.runtime.errors import OutOfResources

    for configuration in _configurations(drawn.problem, are_all=by_all):
        name = call.name + configuration
        _say(call=name)
        try:
            verdict = judge(call, drawn, compute(call, drawn))
        except OutOfResources:  # less shared memory than others of its capability: tuning passes over it, too
            if not configuration:
                raise
        else:
            _say(call=name, found=verdict.describe(), passes=verdict.passes)


def _say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def draw(call: CheckedCall, device: torch.device, dtype: torch.dtype, width: int, *, seed: int) -> Drawn:
    """Draw operands on the CPU, compute the results there in float64, and bring the operands to the device."""
    generator = torch.Generator().manual_seed(seed)
    head_dim = width * 3 // 4 if call.is_narrow else width
    num_heads, num_kv_heads = call.heads

    def rows(count: int, heads: int) -> Tensor:
        return torch.randn(call.batch_size, count, heads, head_dim, generator=generator).to(dtype)

    query, grad_out = (rows(call.num_queries, num_heads) for _ in range(2))
    key, value = (rows(call.num_keys, num_kv_heads) for _ in range(2))
    boundaries = None if call.boundaries is None else torch.tensor(call.boundaries, dtype=torch.int32)
    mask = None
    if call.is_padded:
        mask = torch.rand(call.batch_size, call.num_keys, generator=generator) < 0.2
        mask[0, -50:] = True
    biases: dict[str, Any] = {}
    if call.has_biases:
        distances = call.num_queries + call.num_keys - 1
        shapes = {"distance_bias": (num_heads, distances), "key_bias": (call.batch_size, call.num_keys, num_kv_heads)}
        biases = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    scale = 1 / math.sqrt(head_dim)
    q, k, v, g = (x.double() for x in (query, key, value, grad_out))
    probabilities, _, _ = reference_probabilities(
        q,
        k,
        call.pattern,
        torch.arange(call.num_queries) + call.query_offset,
        is_causal=call.is_causal,
        scale=scale,
        key_offset=call.key_offset,
        cu_seqlens=boundaries,
        key_padding_mask=mask,
        **{name: bias.double() for name, bias in biases.items()},
    )
    q, k, v, g = (x.repeat_interleave(num_heads // x.shape[2], 2).transpose(1, 2) for x in (q, k, v, g))
    exact = exact_results(probabilities, q, k, v, scale, g if call.num_splits == 1 else None)
    problem = Problem(
        _surrounded(query, device),
        _surrounded(key, device),
        _surrounded(value, device),
        call.pattern.groups,
        call.is_causal,
        scale,
        call.query_offset,
        call.key_offset,
        None if boundaries is None else boundaries.to(device),
        None if mask is None else mask.to(device),
        rules=call.pattern.rules,
        **{name: bias.to(device) for name, bias in biases.items()},
    )
    return Drawn(problem, _surrounded(grad_out, device), exact)


def _surrounded(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on the device as a view into storage that is NaN elsewhere; strides stay multiples of 16."""
    batch, rows, heads, head_dim = x.shape
    storage = torch.full((batch, rows + 32, heads + 1, head_dim), float("nan"), dtype=x.dtype, device=device)
    view = storage[:, 16 : rows + 16, :heads]
    view.copy_(x)
    return view


def _configurations(problem: Problem, *, are_all: bool) -> Iterator[str]:
    """Select the first configuration of every kernel, then the others of one kernel after the other; their names."""
    yield ""
    if not are_all:
        return
    plan = plan_of(problem)
    for kernel in (plan.forward, plan.query_gradient, plan.key_gradient):
        shipped = kernel.choice.candidates
        for candidate in shipped[1:]:
            kernel.choice.candidates = (candidate,)
            yield f", {kernel.kernel} {'x'.join(map(str, candidate))}"
        kernel.choice.candidates = shipped


def compute(call: CheckedCall, drawn: Drawn) -> list[Tensor]:
    """The output and the gradients of query, key and value by the kernels; the output alone if keys are split."""
    out, lse = launch.forward(drawn.problem, call.num_splits)
    if call.num_splits > 1:
        return [out]
    return [out, *launch.backward(drawn.problem, out, lse, drawn.grad_out, None, needs_distance_bias=False)[:3]]


def judge(call: CheckedCall, drawn: Drawn, results: list[Tensor]) -> Verdict:
    """The verdict on the results of a call."""
    dtype, head_dim = results[0].dtype, results[0].shape[3]
    tallies = {name: Tally(dtype) for name, _ in zip(NAMES, results, strict=False)}
    for tally, result, exact in zip(tallies.values(), results, drawn.exact, strict=True):
        # Query heads that share keys and values add to their gradients.
        value, terms = (x.unflatten(1, (result.shape[2], -1)).sum(2) for x in exact)
        tally.add(result.cpu().transpose(1, 2), Exact(value, terms))
    summands = len(call.pattern.groups) + len(call.pattern.rules)
    return Verdict.of(tallies, allowed_errors(dtype, head_dim=head_dim, num_keys=call.num_keys, num_groups=summands))


if __name__ == "__main__":
    main(sys.argv[1:])
