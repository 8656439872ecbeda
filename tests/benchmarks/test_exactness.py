"""The gate: what is right passes, and whatever is wrong in any row, column or gradient does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention_pytorch import attend, attend_with_lse, merge
from dilated_attention_pytorch.benchmarks.exactness import Verdict, draw_samples, judge, sampled_gradient
from dilated_attention_pytorch.benchmarks.shapes import Case, Computes
from support.benchmark_cases import operands_of, oracle, small_case
from support.drawn import examples

Attention = Callable[[Case, Tensor, Tensor, Tensor], Tensor]


def verdict(case: Case, attention: Attention, computes: Computes = "pattern") -> Verdict:
    operands, samples = operands_of(case), draw_samples(case)
    out = attention(case, *operands)
    if case.mode != "forward_backward":
        return judge(case, computes, samples, operands, out)
    grad = sampled_gradient(case, samples, operands[0])
    return judge(case, computes, samples, operands, out, grad, torch.autograd.grad(out, operands, grad))


def ours(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend(query, key, value, case.pattern, is_causal=case.causal, query_offset=case.query_offset)


@examples(60)
@given(data=st.data())
def test_the_oracle_of_the_tests_passes_whatever_the_case(data: st.DataObject) -> None:
    num_groups = data.draw(st.integers(1, 4))
    kv_heads, ratio = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    case = small_case(
        rows=data.draw(st.integers(1, 120)),
        heads=kv_heads * ratio,
        kv_heads=kv_heads,
        batch=data.draw(st.integers(1, 2)),
        segment_lengths=tuple(data.draw(st.integers(1, 130)) for _ in range(num_groups)),
        dilation_rates=tuple(data.draw(st.integers(1, 9)) for _ in range(num_groups)),
        offset_rule=data.draw(st.sampled_from(["modulo", "block"])),
        causal=data.draw(st.booleans()),
        mode=data.draw(st.sampled_from(["forward", "forward_backward"])),
    )
    judged = verdict(case, oracle)
    assert judged.passes, judged.describe()
    assert max(judged.errors.values()) < 1e-13


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("causal", [False, True])
def test_ours_passes_in_every_dtype(dtype: str, causal: bool) -> None:
    judged = verdict(small_case(dtype=dtype, causal=causal, rows=257), ours)
    assert judged.passes, judged.describe()


def test_a_decoding_step_is_held_against_the_last_row() -> None:
    case = small_case(mode="decode", causal=True)
    assert verdict(case, ours).passes
    assert not verdict(case, lambda case, q, k, v: ours(case, q, k.roll(1, 1), v)).passes


def _scaled(factor: float) -> Attention:
    return lambda case, q, k, v: factor * ours(case, q, k, v)


def _one_row_off(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out = ours(case, query, key, value)
    change = torch.zeros_like(out)
    change[0, -1] = 0.02
    return out + change


def _not_a_number(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.where(torch.arange(case.rows)[:, None, None] == 0, float("nan"), ours(case, query, key, value))


def _groups_apart(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A softmax for every group, averaged: what code with LongNet's name often computes."""
    pattern = case.pattern
    parts = []
    for w, r in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True):
        alone = type(pattern)([w], [r], offset_rule=pattern.offset_rule)
        parts.append(attend(query, key, value, alone, is_causal=case.causal))
    return torch.stack(parts).mean(0)


@pytest.mark.parametrize("wrong", [_scaled(1.0005), _one_row_off, _not_a_number, _groups_apart])
@pytest.mark.parametrize("mode", ["forward", "forward_backward"])
def test_what_is_wrong_in_the_output_is_rejected(wrong: Attention, mode: str) -> None:
    judged = verdict(small_case(dtype="float32", mode=mode), wrong)
    assert not judged.passes
    assert not judged.errors["out"] <= judged.allowed


def _detached_weights(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The merge weights not differentiated, as in the authors' code: the output is right, the gradient is not."""
    pattern = case.pattern
    partials = []
    for w, r in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True):
        alone = type(pattern)([w], [r], offset_rule=pattern.offset_rule)
        out, lse = attend_with_lse(query, key, value, alone, is_causal=case.causal)
        partials.append((out, lse.detach()))
    return merge(partials).out


class _SpoiledGradient(torch.autograd.Function):
    """The identity, with a gradient that is nearly right."""

    @staticmethod
    def forward(ctx, tensor: Tensor, row: int | None, factor: float) -> Tensor:
        ctx.options = (row, factor)
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        row, factor = ctx.options
        spoiled = grad.clone()
        spoiled[:, slice(None) if row is None else row] *= factor
        return spoiled, None, None


def _spoiled(which: int, row: int | None, factor: float) -> Attention:
    def attention(case: Case, *operands: Tensor) -> Tensor:
        changed = [_SpoiledGradient.apply(x, row, factor) if index == which else x for index, x in enumerate(operands)]
        return ours(case, *changed)

    return attention


GRADIENTS = {
    "weights of the merge detached": _detached_weights,
    "gradient of the query 0.2 % too large": _spoiled(0, None, 1.002),
    "gradient of the key 0.2 % too large": _spoiled(1, None, 1.002),
    "gradient of the value 0.2 % too large": _spoiled(2, None, 1.002),
    "gradient of one key lost": _spoiled(1, 57, 0.0),
    "gradient of one value lost": _spoiled(2, 57, 0.0),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_what_is_wrong_in_a_gradient_alone_is_rejected(name: str) -> None:
    judged = verdict(small_case(dtype="float32"), GRADIENTS[name])
    assert judged.errors["out"] <= judged.allowed
    assert not judged.passes
    assert "grad_" in judged.describe()


def test_dense_attention_is_right_as_dense_attention_only() -> None:
    def dense(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal).transpose(1, 2)

    for causal in (False, True):
        case = small_case(causal=causal)
        assert verdict(case, dense, "dense").passes
        assert not verdict(case, dense, "pattern").passes
        assert not verdict(case, ours, "dense").passes
