"""The engine against the dense oracle: every output and gradient, on drawn calls, in every dtype."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from dilated_attention_pytorch import DilatedPattern, attend, attend_with_lse, from_block_mask
from dilated_attention_pytorch.kernels.select import Impl, refusal
from dilated_attention_pytorch.ops import tiles
from support.drawn import SWEEP, DrawnCall, block_calls, calls, examples
from support.error_budget import parts_of_budget
from support.oracle import Groups, Rule, dense_attention

NAMES = ("out", "lse", "grad_query", "grad_key", "grad_value")
DRAWS = {"dilated": 60, "block": 40}  # of every part


def results(out: Tensor, lse: Tensor, inputs: list[Tensor], grad_out: Tensor, grad_lse: Tensor | None) -> list[Tensor]:
    """out, lse with -inf as 0, and the gradients of a loss over both."""
    seen = lse != float("-inf")
    loss = (out.double() * grad_out.double()).sum()
    if grad_lse is not None:
        loss = loss + (torch.where(seen, lse, 0.0) * grad_lse).sum()
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    grads = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, grads, strict=True)]
    return [out, torch.where(seen, lse, 0.0), *grads]


def oracle(call: DrawnCall, inputs: list[Tensor], grad_out: Tensor, grad_lse: Tensor | None) -> list[Tensor]:
    exact = [x.detach().double().requires_grad_() for x in inputs]
    scale = 1 / math.sqrt(call.head_dim) if call.scale is None else call.scale
    out, lse = dense_attention(*exact, *call.counts(), scale)
    return [lse == float("-inf"), *results(out, lse, exact, grad_out.double(), grad_lse)]


@pytest.mark.parametrize(
    ("kind", "part"), [("dilated", part) for part in range(4)] + [("block", part) for part in range(3)]
)
def test_float64_equals_the_oracle_to_1e_10(kind: str, part: int, figure: Any) -> None:
    worst = dict.fromkeys(NAMES, 0.0)
    drawn = 0

    @examples(DRAWS[kind])
    @given(calls() if kind == "dilated" else block_calls())
    def check(call: DrawnCall) -> None:
        nonlocal drawn
        # derandomize repeats its draws in every part: the part moves the seed, and every second one drops the lse.
        call.seed += part
        call.is_causal ^= bool(part & 2)
        call.summands = tuple(moved(summand, part) for summand in call.summands)
        *inputs, grad_out, grad_lse = call.tensors(torch.float64)
        weight = grad_lse if part & 1 else None
        inputs = [x.requires_grad_() for x in inputs]
        options: Any = {"is_causal": call.is_causal, "scale": call.scale, "impl": "aten", **call.options}
        out, lse = attend_with_lse(*inputs, call.pattern, **options)
        dead, *expected = oracle(call, inputs, grad_out, weight)
        assert torch.equal(lse == float("-inf"), dead)
        drawn += 1
        for name, got, want in zip(NAMES, results(out, lse, inputs, grad_out, weight), expected, strict=True):
            error = (got - want).abs().max().item() if got.numel() else 0.0
            assert error <= 1e-10, (name, error)
            worst[name] = max(worst[name], error)
        if all(isinstance(one, Rule) or one.tail == "ragged" for one in call.summands):
            with torch.no_grad():
                ones = attend(*inputs[:2], torch.ones_like(inputs[2]), call.pattern, **options)
            torch.testing.assert_close(ones, torch.where(dead.unsqueeze(-1), 0.0, torch.ones_like(ones)))

    check()
    assert drawn >= (10 if SWEEP else 1) * DRAWS[kind]
    figure(
        f"float64, {kind} patterns, {drawn} drawn calls (part {part}), largest errors",
        {k: f"{v:.1e}" for k, v in worst.items()},
    )


def test_a_segment_that_a_shift_moves_over_the_end_of_a_longer_one_is_whole() -> None:
    """Draws seldom have lengths that divide each other and a shift of the shorter ones alone."""
    pattern = DilatedPattern([64], [1]) + DilatedPattern([16], [1], segment_shift=5)
    q, k, v = torch.randn(3, 1, 200, 2, 5, dtype=torch.float64)
    found, expected = (attend(q, k, v, pattern, impl=impl) for impl in ("aten", "reference"))  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def moved(summand: Groups | Rule, by: int) -> Groups | Rule:
    """Another pattern from an equal draw, for another part of one test."""
    if isinstance(summand, Groups):
        return rotated(summand, by)
    if summand.name == "mask":
        return dataclasses.replace(summand, mask=tuple(tuple(rows[::-1] for rows in head) for head in summand.mask))
    if summand.name == "random":
        return dataclasses.replace(
            summand, numbers=(*summand.numbers[:2], summand.numbers[2] // (1 + by), *summand.numbers[3:])
        )
    return dataclasses.replace(summand, numbers=tuple(number + by for number in summand.numbers))


def rotated(groups: Groups, by: int) -> Groups:
    """The same lengths with other rates: parts of one test draw different patterns from equal draws."""
    by %= len(groups.rates)
    return dataclasses.replace(groups, rates=tuple(r + by for r in groups.rates[by:] + groups.rates[:by]))


@examples(60)
@given(calls())
def test_the_reference_equals_the_oracle(call: DrawnCall) -> None:
    *inputs, grad_out, grad_lse = call.tensors(torch.float64)
    inputs = [x.requires_grad_() for x in inputs]
    out, lse = attend_with_lse(
        *inputs, call.pattern, is_causal=call.is_causal, scale=call.scale, impl="reference", **call.options
    )
    dead, *expected = oracle(call, inputs, grad_out, grad_lse)
    assert torch.equal(lse == float("-inf"), dead)
    for got, want in zip(results(out, lse, inputs, grad_out, grad_lse), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["dilated", "block"])
@pytest.mark.parametrize(
    ("impl", "dtype"),
    [
        *itertools.product(["aten", "native"], [torch.float32, torch.bfloat16]),
        pytest.param("aten", torch.float16, marks=pytest.mark.slow),
        ("native", torch.float16),
    ],
    ids=str,
)
def test_low_precision_stays_within_the_error_budget(
    impl: Impl, kind: str, dtype: torch.dtype, figure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if refusal(impl, torch.device("cpu"), dtype, 1) is not None:
        pytest.skip("not on this machine")
    used = dict.fromkeys(NAMES, 0.0)
    if kind == "block":  # low precision accumulates in tensors that begin where a tile does: many small ones
        monkeypatch.setattr(tiles, "tile_size", lambda rows, width, _: max(1, max(rows * width // 48, 64) // width))

    @examples(40 if kind == "dilated" else 30)
    @given(calls() if kind == "dilated" else block_calls())
    def check(call: DrawnCall) -> None:
        call.summands = tuple(
            dataclasses.replace(one, tail="ragged") if isinstance(one, Groups) else one for one in call.summands
        )
        *inputs, grad_out, _ = call.tensors(dtype)
        inputs = [x.requires_grad_() for x in inputs]
        out, lse = attend_with_lse(
            *inputs, call.pattern, is_causal=call.is_causal, scale=call.scale, impl=impl, **call.options
        )
        assert out.dtype == dtype
        assert lse.dtype == torch.float32
        got = results(out, lse, inputs, grad_out, None)
        _, *want = oracle(call, inputs, grad_out, None)
        for name, part in parts_of_budget(call, inputs, grad_out, got, want).items():
            assert part <= 1, (name, part)
            used[name] = max(used[name], part)

    check()
    figure(
        f"{impl}, {kind} patterns, {dtype}, largest part of the error budget used",
        {k: f"{v:.2f}" for k, v in used.items()},
    )


@pytest.mark.parametrize("impl", ["aten", "native"])
def test_blocks_of_packed_documents_in_tiles_of_their_own_equal_each_document_alone(
    impl: Impl, monkeypatch: pytest.MonkeyPatch
) -> None:
    if refusal(impl, torch.device("cpu"), torch.bfloat16, 1) is not None:
        pytest.skip("not on this machine")
    monkeypatch.setattr(tiles, "tile_size", lambda *_: 32)  # accumulators begin where a document does
    pattern = from_block_mask(torch.rand(2, 5, 5) < 0.5, 8)
    boundaries = [0, 13, 37, 74]
    q, k, v, g = (torch.randn(2, boundaries[-1], 2, 16).bfloat16().requires_grad_() for _ in range(4))

    def computed(start: int, stop: int, **options: Any) -> list[Tensor]:
        inputs = [x.detach()[:, start:stop].requires_grad_() for x in (q, k, v)]
        out = attend(*inputs, pattern, impl=impl, **options)
        return [out, *torch.autograd.grad(out, inputs, g.detach()[:, start:stop])]

    packed = computed(0, boundaries[-1], cu_seqlens=torch.tensor(boundaries, dtype=torch.int32))
    alone = [computed(start, stop) for start, stop in itertools.pairwise(boundaries)]
    for got, parts in zip(packed, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(got, torch.cat(parts, 1))


def test_bfloat16_is_as_exact_as_dense_attention_in_bfloat16(figure: Any) -> None:
    """The paper's five groups: partials rounded to bfloat16 before or while merging would show."""
    pattern = DilatedPattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
    q, k, v, g = (torch.randn(1, 2048, 2, 64, dtype=torch.float64).bfloat16() for _ in range(4))

    def ours(*inputs: Tensor) -> Tensor:
        return attend(*inputs, pattern)

    def dense(*inputs: Tensor) -> Tensor:
        heads = (x.transpose(1, 2) for x in inputs)
        return torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)

    def relative_errors(compute: Any) -> list[float]:
        both = []
        for dtype in (torch.bfloat16, torch.float64):
            inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
            out = compute(*inputs)
            both.append([out.detach(), *torch.autograd.grad(out, inputs, g.to(dtype))])
        return [((low.double() - high).norm() / high.norm()).item() for low, high in zip(*both, strict=True)]

    names = ("out", "grad_query", "grad_key", "grad_value")
    ratios = {n: a / b for n, a, b in zip(names, relative_errors(ours), relative_errors(dense), strict=True)}
    figure("bfloat16 error over that of dense SDPA", {name: f"{ratio:.2f}" for name, ratio in ratios.items()})
    assert max(ratios.values()) <= 1.5


def test_gradcheck() -> None:
    pattern = DilatedPattern([5, 11], [1, 3]) + DilatedPattern([13], [2], segment_shift=4)
    q = torch.randn(1, 13, 4, 2, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 13, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for causal in (False, True):
        assert torch.autograd.gradcheck(
            lambda *x, causal=causal: tuple(attend_with_lse(*x, pattern, is_causal=causal)), (q, k, v)
        )
