"""The executor as an operator: compiled, checked by opcheck, counted, cast by autocast, sparing with memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from torch.utils.flop_counter import FlopCounterMode

from dilated_attention_pytorch import DilatedPattern, attend, attend_with_lse, dilated_attention
from dilated_attention_pytorch.kernels import select
from dilated_attention_pytorch.ops import operators
from dilated_attention_pytorch.ops.call import Call
from dilated_attention_pytorch.ops.implementations import IMPLEMENTATIONS
from support.drawn import DrawnCall, calls, examples

PATTERN = DilatedPattern([13, 32], [1, 3])


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


# opcheck's own comparison reads the gradient of a tensor that is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("is_packed", [False, True], ids=["dropout", "packed, padded and causal"])
@pytest.mark.parametrize("impl", ["aten", "native"])
def test_opcheck(impl: str, is_packed: bool) -> None:
    if select.refusal(impl, torch.device("cpu"), torch.float32, 8) is not None:
        pytest.skip("not on this machine")
    q, k, v = leaves((2, 37, 4, 8), (2, 37, 2, 8), (2, 37, 2, 8))
    options: dict[str, Any] = {
        "cu_seqlens": torch.tensor([0, 9, 37], dtype=torch.int32),
        "key_padding_mask": torch.rand(2, 37) < 0.3,
        "is_causal": True,
    }
    if not is_packed:
        options = {"dropout_seed": torch.tensor(5), "dropout_p": 0.3}
    call = Call(q, k, v, pattern=PATTERN, scale=0.3, impl=IMPLEMENTATIONS[impl], **options).for_operator()
    torch.library.opcheck(operators.attend, call)
    out, lse = attend_with_lse(q, k, v, PATTERN)
    with torch.no_grad():
        arguments = (torch.randn_like(out), torch.randn_like(lse), out, lse, *call)
        torch.library.opcheck(operators.attend_backward, arguments)
        for axis, values in (("queries", v), ("keys", q)):
            torch.library.opcheck(operators.weighted_sum, (axis, values, [q, k, None], lse, *call))


def test_compiled_under_autocast_equals_eager() -> None:
    torch._dynamo.reset()
    inputs = leaves((1, 33, 4, 8), (1, 33, 2, 8), (1, 33, 2, 8))
    compiled = torch.compile(lambda *x: attend(*x, PATTERN), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(*inputs), attend(*inputs, PATTERN))


# Importing inductor scripts functions of PyTorch's own.
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_graph_break_equals_eager(dynamic: bool) -> None:
    torch._dynamo.reset()

    def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        first = attend(q, k, v, PATTERN, is_causal=True)
        return dilated_attention(first.sin(), k, v, [16, 64], [1, 4], is_causal=True).sum(-1)

    compiled = torch.compile(compute, fullgraph=True, dynamic=dynamic)
    for rows in (37, 53):
        inputs = leaves((2, rows, 4, 8), (2, rows, 2, 8), (2, rows, 2, 8))
        eager, traced = compute(*inputs), compiled(*inputs)
        torch.testing.assert_close(traced, eager)
        for ours, theirs in zip(
            torch.autograd.grad(traced.sin().sum(), inputs), torch.autograd.grad(eager.sin().sum(), inputs), strict=True
        ):
            torch.testing.assert_close(ours, theirs)


@examples(60)
@given(calls(with_padding=False))
def test_the_flop_counter_reports_the_patterns_exact_count(call: DrawnCall) -> None:
    q, k, v, grad_out, _ = call.tensors(torch.float32)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    pairs = int(call.counts()[0].sum()) * call.ratio
    with FlopCounterMode(display=False) as forward:
        out = attend(q, k, v, call.pattern, is_causal=call.is_causal, **call.options)
    with FlopCounterMode(display=False) as backward:
        out.backward(grad_out)
    assert forward.get_total_flops() == 4 * call.head_dim * pairs
    assert backward.get_total_flops() == 10 * call.head_dim * pairs


def test_autocast_computes_in_its_dtype_and_returns_gradients_in_the_inputs() -> None:
    inputs = leaves((1, 40, 2, 8), (1, 40, 2, 8), (1, 40, 2, 8))
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(*inputs, PATTERN)
    assert out.dtype == torch.bfloat16
    expected = attend(*(x.bfloat16() for x in inputs), PATTERN)
    assert torch.equal(out, expected)
    assert all(grad.dtype == torch.float32 for grad in torch.autograd.grad(out.float().sum(), inputs))
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(*(x.double() for x in inputs), PATTERN).dtype == torch.float64


@pytest.mark.parametrize("impl", ["aten", "reference"])
def test_autocast_rounds_nothing_inside(impl: str) -> None:
    """Dropout and the reference multiply matrices of their own, which autocast must leave in float32."""
    inputs = [torch.randn(1, 40, 2, 8).bfloat16() for _ in range(3)]
    outputs = []
    for enabled in (True, False):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            outputs.append(attend(*inputs, PATTERN, dropout_p=0.2, impl=impl))
    assert torch.equal(*outputs)


def test_saved_for_backward_are_the_inputs_the_merged_output_and_its_lse_and_nothing_else() -> None:
    inputs = leaves((1, 64, 4, 8), (1, 64, 2, 8), (1, 64, 2, 8))
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out, lse = attend_with_lse(*inputs, PATTERN)
    assert len(saved) == 5
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in (*inputs, out, lse)}
