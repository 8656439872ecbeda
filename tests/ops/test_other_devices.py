"""GPUs of Apple and Intel, and AMD's: what `attend` computes there, on stand-ins, equals the definition."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch import DilatedPattern, attend_with_lse, local_window
from dilated_attention_pytorch.integrations.xpos import XPos, attend_with_xpos
from dilated_attention_pytorch.kernels.select import select
from dilated_attention_pytorch.models.rotary import rotary
from dilated_attention_pytorch.ops import Scores, attend_blocks
from support.drawn import DrawnCall, Sizes, block_calls, calls, examples
from support.error_budget import parts_of_budget
from support.oracle import Groups
from support.other_devices import StandIn, expected, on_cpu, placed, results
from support.scored_calls import NAMES, ScoredCall, scored

OPERATORS = torch.ops.dilated_attention_pytorch
KINDS = ["mps", "xpu"]
SMALL = Sizes(st.sampled_from([1, 2, 7, 31, 64, 65]), 2, 3, (1, 5, 8), groups=2, summands=(1, 1, 2), ratios=(1, 2, 3))


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch looks for the driver of Intel's GPUs when a tensor is made."""
    monkeypatch.setattr(torch.xpu, "_lazy_init", lambda: None)


@pytest.mark.parametrize(
    ("kind", "dtype", "drawn"),
    [
        ("mps", torch.float32, calls(sizes=SMALL)),
        ("mps", torch.float32, block_calls(sizes=SMALL)),
        ("mps", torch.bfloat16, calls(sizes=SMALL)),
        ("mps", torch.float16, block_calls(sizes=SMALL)),
        ("xpu", torch.float32, calls(sizes=SMALL)),
        ("xpu", torch.bfloat16, block_calls(sizes=SMALL)),
    ],
    ids=["mps-float32-groups", "mps-float32-blocks", "mps-bfloat16", "mps-float16", "xpu-float32", "xpu-bfloat16"],
)
def test_drawn_calls_and_their_gradients_equal_the_oracle(kind: str, dtype: torch.dtype, drawn: Any) -> None:
    device = StandIn(kind)

    @examples(10, is_shrunk=False)
    @given(drawn)
    def check(call: DrawnCall) -> None:
        ragged = (replace(one, tail="ragged") if isinstance(one, Groups) else one for one in call.summands)
        call.summands = tuple(ragged)
        call.scale = None if call.scale is None else abs(call.scale) or 0.5  # the operator's scale is positive
        *tensors, _ = call.tensors(dtype)
        used = parts_of_budget(call, tensors[:3], tensors[3], results(device, call, *tensors), expected(call, *tensors))
        assert max(used.values()) <= 1, used

    check()
    assert "bmm" in device.seen
    assert not any("attention" in name for name in device.seen)


@pytest.mark.parametrize("kind", KINDS)
def test_terms_of_the_scores_equal_the_oracle_and_their_gradients_those_on_the_cpu(kind: str) -> None:
    device = StandIn(kind)

    @examples(10, is_shrunk=False)
    @given(scored(calls(sizes=SMALL)))
    def check(call: ScoredCall) -> None:
        call.call.scale = 0.7
        tensors, of_out, _ = call.tensors(torch.float32)
        places = call.coordinates()
        q, k, v, *terms = (placed(device, tensors.get(name)) for name in ("q", "k", "v", *NAMES[1:]))
        coordinates = None if places is None else device.holding(places.float())
        options = {"is_causal": call.call.is_causal, "scale": 0.7, **placed(device, call.call.options)}
        with device:
            scores = Scores(call.softcap, *terms, coordinates=coordinates)
            out, lse = attend_with_lse(q, k, v, call.call.pattern, scores=scores, **options)
            operands = device.operands
            found = OPERATORS.attend(*operands)
            grads = OPERATORS.attend_backward(device.holding(of_out), None, *found, *operands)
        exact_out, exact_lse = call.oracle({name: x.double() for name, x in tensors.items()})
        torch.testing.assert_close(out.numbers.double(), exact_out, rtol=1e-4, atol=1e-4)  # type: ignore[attr-defined]
        torch.testing.assert_close(lse.numbers.double(), exact_lse, rtol=1e-4, atol=1e-4)  # type: ignore[attr-defined]
        same = OPERATORS.attend_backward(of_out, None, *on_cpu(found), *on_cpu(operands))
        torch.testing.assert_close(on_cpu(grads), same, rtol=1e-4, atol=1e-4)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_listed_blocks_and_weighted_sums_equal_those_on_the_cpu(kind: str) -> None:
    device = StandIn(kind)
    q, k, v, g = torch.randn(2, 70, 4, 8), *torch.randn(2, 2, 70, 2, 8), torch.randn(2, 70, 4, 8)
    blocks, gates = torch.randint(-1, 5, (2, 2, 5, 3)), torch.randn(2, 2, 5, 3)
    pattern = DilatedPattern([16, 64], [1, 4], tail="zero_padded") + local_window(5, 3)
    inputs = placed(device, (q, k, v))

    def compute(name: str) -> None:
        if name == "dropout":
            attend_with_lse(*inputs, pattern, dropout_p=0.4)
        else:
            attend_blocks(*inputs, *placed(device, (blocks, gates)), block_size=16, is_causal=True, dropout_p=0.4)

    for name in ("dropout", "blocks"):
        with device:
            compute(name)
            operands = device.operands
            found = OPERATORS.attend(*operands)
            grads = OPERATORS.attend_backward(device.holding(g), device.holding(g.sum(-1)), *found, *operands)
            values = (inputs[1], [inputs[0], inputs[1], None], found[1])
            total = OPERATORS.weighted_sum("queries", *values, *operands)
        seed = on_cpu(operands)[9]
        assert seed.dtype == torch.int64
        same = OPERATORS.attend(*on_cpu(operands))
        torch.testing.assert_close(on_cpu(found), same)
        torch.testing.assert_close(on_cpu(grads), OPERATORS.attend_backward(g, g.sum(-1), *same, *on_cpu(operands)))
        own = on_cpu(values)
        torch.testing.assert_close(on_cpu(total), OPERATORS.weighted_sum("queries", *own, *on_cpu(operands)))


def test_long_sums_of_products_are_cut() -> None:
    device, long = StandIn("mps"), 33_000
    for num_queries, num_keys in ((3, long), (long, 3)):
        q, g = torch.randn(2, 1, num_queries, 1, 2)
        k, v = torch.randn(2, 1, num_keys, 1, 2)
        with device:
            out, lse = attend_with_lse(*placed(device, (q, k, v)), local_window(long, long))
            grads = OPERATORS.attend_backward(device.holding(g), None, out, lse, *device.operands)
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        same = attend_with_lse(*exact, local_window(long, long), impl="aten").out
        torch.testing.assert_close(on_cpu(out).double(), same, rtol=1e-4, atol=1e-4)
        of_exact = torch.autograd.grad(same, exact, g.double())
        torch.testing.assert_close([x.double() for x in on_cpu(grads)[:3]], list(of_exact), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_rotary_angles_are_computed_in_float64_on_the_cpu(kind: str) -> None:
    device, positions = StandIn(kind), torch.arange(1_000_000, 1_000_100)
    with device:
        found = rotary(device.holding(positions), 8, 10_000.0, torch.float32)
    assert found.cos.device.type == kind
    torch.testing.assert_close(on_cpu(found), rotary(positions, 8, 10_000.0, torch.float32), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [70, 500])
def test_xpos_equals_that_on_the_cpu(kind: str, num_rows: int) -> None:
    device, xpos = StandIn(kind), XPos(8, scale_base=8.0)
    assert (num_rows > xpos.num_rows_within(torch.float32)) == (num_rows == 500)
    inputs = list(torch.randn(3, 1, num_rows, 2, 8))
    pattern = DilatedPattern([16, 64], [1, 4])
    with device:
        found = attend_with_xpos(*placed(device, inputs), pattern, xpos, is_causal=True)
    torch.testing.assert_close(on_cpu(found), attend_with_xpos(*inputs, pattern, xpos, is_causal=True))


def test_auto_is_aten_on_gpus_that_nobody_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        assert select("auto", torch.device(kind), torch.bfloat16, 64) == "aten"
    cuda = torch.device("cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(gcnArchName="gfx942"))
    assert select("triton", cuda, torch.bfloat16, 64) == "triton"
    assert select("auto", cuda, torch.bfloat16, 64) == "aten"


def test_the_stand_in_refuses_what_the_device_does() -> None:
    device = StandIn("mps")
    x = device.holding(torch.randn(2, 3, 3))
    with device:
        for wrong, message in (
            (lambda: x.double(), "no float64"),
            (lambda: x + torch.ones(3), "mixes mps and the CPU"),
            (lambda: torch.bmm(x[:1].expand(2, 3, 3), x), "a stride of 0"),
            (lambda: x.baddbmm_(x, x), "written into a view"),
            (lambda: torch.randint(2**31, (), device="mps:0"), "32 bits"),
            (lambda: torch.geqrf(x), "no kernel for MPS"),
        ):
            with pytest.raises(AssertionError, match=message):
                wrong()
        scores = torch.baddbmm(torch.empty(2, 3, 3, device="mps:0"), x, x, beta=0)
    assert on_cpu(scores).isnan().all()
