"""Calls of the Triton kernels compared with the oracle: operands surrounded by NaN, results within the error budget."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention_pytorch import attend_with_lse
from dilated_attention_pytorch.kernels.select import is_interpreted
from support.drawn import SWEEP, DrawnCall, Sizes, examples
from support.error_budget import budget
from support.oracle import dense_attention

DEVICE = "cpu" if is_interpreted() else "cuda"
NAMES = ("out", "lse", "grad_query", "grad_key", "grad_value")
# The interpreter takes a tenth of a millisecond per operation and program, so there are few tiles and intervals.
SMALL = Sizes(
    st.one_of(st.sampled_from([1, 7, 15, 16, 17, 33]), st.integers(1, 45)),
    batch=2,
    kv_heads=2,
    head_dims=(5, 16, 24, 32),
    groups=3,
    summands=(1, 1, 1, 2),
    segments=st.one_of(st.integers(5, 60), st.sampled_from([3, 8, 16, 32, 64])),
    ratios=(1, 1, 2, 3),
)


@contextlib.contextmanager
def poisoned(*, warn_only: bool = False) -> Iterator[None]:
    """Fill every ``torch.empty`` with NaN, or with the largest integer, under deterministic algorithms."""
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def surrounded(x: Tensor, room: int = 3) -> Tensor:
    """``x`` as a view into storage that is NaN elsewhere, with ``room`` elements between heads."""
    batch, rows, heads, head_dim = x.shape
    storage = torch.full((batch, rows + 40, heads + 1, head_dim + room), float("nan"), dtype=x.dtype, device=DEVICE)
    view = storage[:, 20 : rows + 20, :heads, :head_dim]
    view.copy_(x)
    return view.detach().requires_grad_()


def check_drawn_calls(
    name: str,
    number: int,
    drawn_calls: st.SearchStrategy[DrawnCall],
    check: Callable[[DrawnCall, dict[str, float]], None],
    figure: Any,
) -> None:
    """Check ``number`` calls, ten times as many in the sweep; record the part of the error budget that was used."""
    used: dict[str, float] = {}
    drawn = 0

    @examples(number, is_shrunk=False)
    @given(drawn_calls, st.integers(0, 2**31))
    def draw(call: DrawnCall, seed: int) -> None:
        nonlocal drawn
        call.seed = seed
        drawn += 1
        check(call, used)

    draw()
    assert drawn >= (10 if SWEEP else 1) * number
    figure(f"{name}, {drawn} drawn calls, part of the error budget", {key: f"{part:.2f}" for key, part in used.items()})


def check(
    call: DrawnCall,
    dtype: torch.dtype,
    used: dict[str, float],
    *,
    impl: str = "triton",
    with_lse: bool = True,
    with_gradients: bool = True,
    room: int = 3,
) -> None:
    """Check that a call is within the error budget; ``with_lse`` also differentiates the log-sum-exp."""
    *inputs, grad_out, grad_lse = call.tensors(dtype)
    grad_lse = grad_lse if with_lse else torch.zeros_like(grad_lse)
    here = [surrounded(x, room) for x in inputs]
    options = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in call.options.items()}
    with poisoned():
        out, lse = attend_with_lse(
            *here, call.pattern, is_causal=call.is_causal, scale=call.scale, impl=impl, **options
        )
        dead = lse == float("-inf")
        finite = torch.where(dead, 0.0, lse)
        # The gradient of the output is strided like the query; only rows that saw a key have an lse to differentiate.
        weights = surrounded(grad_out).detach()
        lse_weights = torch.where(dead, 0.0, grad_lse.to(DEVICE, torch.float32))
        grads = torch.autograd.grad((out, finite), here, (weights, lse_weights)) if with_gradients else ()
    scale = 1 / math.sqrt(call.head_dim) if call.scale is None else call.scale
    exact = [x.detach().double().requires_grad_() for x in inputs]
    counts, zero_pad_keys = call.counts()
    want_out, want_lse = dense_attention(*exact, counts, zero_pad_keys, scale)
    assert torch.equal(dead.cpu(), want_lse == float("-inf"))
    want_finite = torch.where(dead.cpu(), 0.0, want_lse)
    lse_weights = lse_weights.cpu().double()
    want_grads = torch.autograd.grad((want_out, want_finite), exact, (grad_out.double(), lse_weights))
    # In the budget, zero-padding keys are keys with score and value 0.
    most = int(zero_pad_keys.max()) if zero_pad_keys.numel() else 0
    filled = torch.cat([counts, (torch.arange(most) < zero_pad_keys.unsqueeze(-1)).to(counts)], -1)
    q, k, v = (x.detach() for x in exact)
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, most)).repeat_interleave(call.ratio, 2) for x in (k, v))
    filled = filled.repeat_interleave(call.ratio, 1).double()
    bounds = budget(q, k, v, grad_out.double(), filled, scale, dtype, lse_weights)
    got = (out, finite, *grads)
    # Without gradients, only the first two are compared.
    for name, x, y, bound in zip(NAMES, got, (want_out, want_finite, *want_grads), bounds, strict=with_gradients):
        if name in ("grad_key", "grad_value"):
            bound = bound[:, : call.num_keys].unflatten(2, (-1, call.ratio)).sum(3)
        bound = bound + torch.finfo(dtype).tiny * 64
        error = (x.detach().cpu().double() - y).abs()
        assert (error <= bound).all(), (name, error.max().item())
        if error.numel():
            used[name] = max(used.get(name, 0.0), (error / bound).max().item())
