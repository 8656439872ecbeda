"""The published route, as it is rendered here, equals the definition: else its time would be that of something else."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch.benchmarks.published import published_attention
from dilated_attention_pytorch.benchmarks.shapes import Case
from support.benchmark_cases import operands_of, oracle, small_case
from support.drawn import examples


def largest_error(case: Case) -> float:
    operands = operands_of(case)
    out = published_attention(*operands, case.pattern, is_causal=case.causal)
    expected = oracle(case, *operands)
    grad = torch.randn_like(expected)
    pairs = zip(
        (out, *torch.autograd.grad(out, operands, grad)),
        (expected, *torch.autograd.grad(expected, operands, grad)),
        strict=True,
    )
    return max(float((got - right).detach().abs().max()) for got, right in pairs)


@examples(60)
@given(data=st.data())
def test_it_equals_the_oracle_in_output_and_gradients(data: st.DataObject) -> None:
    num_groups = data.draw(st.integers(1, 4))
    kv_heads, ratio = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([1, 1, 2, 3]))
    case = small_case(
        rows=data.draw(st.integers(1, 130)),
        heads=kv_heads * ratio,
        kv_heads=kv_heads,
        batch=data.draw(st.integers(1, 2)),
        head_dim=data.draw(st.sampled_from([2, 5, 8])),
        segment_lengths=tuple(data.draw(st.integers(1, 140)) for _ in range(num_groups)),
        dilation_rates=tuple(data.draw(st.integers(1, 13)) for _ in range(num_groups)),
        offset_rule=data.draw(st.sampled_from(["modulo", "block"])),
        causal=data.draw(st.booleans()),
    )
    assert largest_error(case) < 1e-11
