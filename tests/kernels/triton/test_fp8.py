"""The forward in e4m3 against the dense oracle: of the operands as they are, and as they are rounded."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention_pytorch import DilatedPattern, attend, attend_with_lse, local_window
from dilated_attention_pytorch.kernels.select import is_interpreted, select
from dilated_attention_pytorch.kernels.triton.configurations import Configuration
from dilated_attention_pytorch.kernels.triton.fp8 import quantized
from dilated_attention_pytorch.kernels.triton.plan import plan_of
from dilated_attention_pytorch.kernels.triton.problem import Problem
from dilated_attention_pytorch.ops import library
from support.drawn import DrawnCall, block_calls, calls
from support.error_budget import e4m3_budget
from support.oracle import Groups, Rule, dense_attention
from support.planned import with_candidates
from support.triton_calls import DEVICE, SMALL, check_drawn_calls, poisoned, surrounded

DRAWS = 3
PATTERN = DilatedPattern([16, 48], [1, 3])


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    if is_interpreted():
        with_candidates(monkeypatch, Configuration(16, 16, 4, 1))
    elif torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no products of e4m3 numbers")


def as_rounded(x: Tensor) -> Tensor:
    """``x`` as the kernel has it, in float64."""
    numbers, scales = quantized(x)
    return numbers.double() * scales.double().transpose(1, 2)[..., None]


def check(call: DrawnCall, dtype: torch.dtype, used: dict[str, float]) -> None:
    """One call within both budgets: of all roundings, and of that of the weights alone."""
    inputs = call.tensors(dtype)[:3]
    here = [surrounded(x).detach() for x in inputs]
    options = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in call.options.items()}
    with poisoned():
        out, lse = attend_with_lse(
            *here, call.pattern, is_causal=call.is_causal, scale=call.scale, impl="triton-fp8", **options
        )
    assert out.dtype == dtype
    scale = 1 / math.sqrt(call.head_dim) if call.scale is None else call.scale
    counts, zero_pad_keys = call.counts()
    # The budget sees the zero-padding keys as what they are: keys of score and value 0.
    most = int(zero_pad_keys.max()) if zero_pad_keys.numel() else 0
    filled = torch.cat([counts, (torch.arange(most) < zero_pad_keys.unsqueeze(-1)).to(counts)], -1)
    filled = filled.repeat_interleave(call.ratio, 1).double()
    operands = {"all": [x.double() for x in inputs], "weights": [as_rounded(x).cpu() for x in here]}
    for which, (q, k, v) in operands.items():
        want_out, want_lse = dense_attention(q, k, v, counts, zero_pad_keys, scale)
        dead = want_lse == float("-inf")
        assert torch.equal(lse.cpu() == float("-inf"), dead)
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, most)).repeat_interleave(call.ratio, 2) for x in (k, v))
        bounds = e4m3_budget(q, k, v, filled, scale, dtype, are_rounded=which == "weights")
        got = (out.cpu().double(), torch.where(dead, 0.0, lse.cpu()))
        wanted = (want_out, torch.where(dead, 0.0, want_lse))
        for name, x, y, bound in zip(("out", "lse"), got, wanted, bounds, strict=True):
            bound = bound + torch.finfo(dtype).tiny * 64
            assert ((x - y).abs() <= bound).all(), (which, name, ((x - y).abs() / bound).max().item())
            if x.numel():
                key = f"{name}, {which}"
                used[key] = max(used.get(key, 0.0), ((x - y).abs() / bound).max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drawn_calls_stay_within_the_error_budget(dtype: torch.dtype, figure: Any) -> None:
    check_drawn_calls(
        f"Triton in e4m3, {dtype}",
        DRAWS,
        st.one_of(calls(sizes=SMALL), block_calls(sizes=SMALL)),
        lambda call, used: check(call, dtype, used),
        figure,
    )


# fmt: off
CASES: dict[str, tuple[int, int, int, int, tuple[Groups | Rule, ...], bool, dict[str, Any]]] = {
    "the paper's pattern, scaled down by 256": (
        1, 1, 67, 64, (Groups((8, 16, 32, 64, 128), (1, 2, 4, 6, 12)),), True, {}),
    "a window and grouped heads": (1, 3, 33, 24, (Rule("window", (33, 2)),), False, {}),
    "packed documents": (1, 1, 40, 16, (Groups((16, 40), (1, 3)),), True,
                         {"cu_seqlens": torch.tensor([0, 3, 30, 30, 40], dtype=torch.int32)}),
    "hidden keys": (2, 1, 33, 16, (Groups((16, 40), (1, 3)),), False,
                    {"key_padding_mask": (torch.arange(33) % 4 == 1)[None]}),
    "zero-padding keys": (2, 1, 33, 16, (Groups((16, 40), (2, 3), tail="zero_padded"),), False, {}),
}
# fmt: on


@pytest.mark.parametrize("case", CASES)
def test_chosen_calls_stay_within_the_error_budget(case: str) -> None:
    kv_heads, ratio, rows, head_dim, summands, causal, options = CASES[case]
    call = DrawnCall(1, rows, rows, kv_heads, ratio, head_dim, summands, 4, causal, None, options)
    check(call, torch.float16, {})


def test_rows_are_rounded_as_pytorch_rounds_numbers_within_448() -> None:
    x = torch.randn(2, 37, 3, 24) * torch.exp(4 * torch.randn(2, 37, 3, 1))
    x[0, 0], x[0, 1], x[0, 2, 0, :3] = 0.0, 1e-30, torch.tensor([448.0, 2.0**-10, 1.5 * 2.0**-9])
    x = x.to(DEVICE).transpose(1, 2).contiguous().transpose(1, 2)
    numbers, scales = quantized(x)
    assert torch.equal(scales.log2(), scales.log2().round())
    largest = x.abs().amax(-1).clamp(min=2.0**-64).transpose(1, 2) / scales
    assert (largest <= 448).all()
    assert (largest > 224).all()
    want = (x / scales.transpose(1, 2)[..., None]).to(torch.float8_e4m3fn)
    assert torch.equal(numbers.float(), want.float())
    shard = quantized(x[:, 5:9])
    assert torch.equal(shard[0].view(torch.uint8), numbers[:, 5:9].view(torch.uint8))
    assert torch.equal(shard[1], scales[:, :, 5:9])


def test_later_keys_change_no_bit_before_them() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 70, 2, 16, device=DEVICE) for _ in range(3))
    later_k, later_v = k.clone(), v.clone()
    later_k[:, 37:] *= 1e4
    later_v[:, 37:] *= 1e6
    pattern = PATTERN + local_window(9)
    runs = [attend_with_lse(q, *kv, pattern, is_causal=True, impl="triton-fp8") for kv in ((k, v), (later_k, later_v))]
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a[:, :37], b[:, :37])


def test_rows_of_all_sizes_are_within_the_error_budget() -> None:
    """Values from 2^-30 to 2^30, the largest scores at keys whose value is 0."""
    torch.manual_seed(1)
    rows, groups = 60, (Groups((60,), (1,)),)
    call = DrawnCall(1, rows, rows, 1, 1, 32, groups, 1, True, None)
    q, k, v = (torch.randn(1, rows, 1, 32) for _ in range(3))
    v *= 2.0 ** torch.linspace(-30, 30, rows)[torch.randperm(rows)][:, None, None]
    k[:, ::7] *= 8
    v[:, ::7] = 0
    call.tensors = lambda dtype: (q, k, v)  # type: ignore[assignment,method-assign,return-value]
    check(call, torch.float32, {})


def test_a_scale_of_zero_counts_the_keys_that_are_seen() -> None:
    q, k, v = (torch.randn(1, 37, 1, 16, device=DEVICE) for _ in range(3))
    out, lse = attend_with_lse(q, k, torch.ones_like(v), PATTERN, is_causal=True, scale=0.0, impl="triton-fp8")
    want = attend_with_lse(q, k, v, PATTERN, is_causal=True, scale=0.0, impl="reference")
    torch.testing.assert_close(lse, want.lse)
    assert torch.equal(out, torch.ones_like(out))


def test_one_query_after_many_keys_is_split_over_the_grid() -> None:
    q, k, v = (torch.randn(1, rows, 1, 16, device=DEVICE) for rows in (1, 397, 397))
    pattern = DilatedPattern([400, 1000], [1, 3])
    problem = Problem(*(quantized(x)[0] for x in (q, k, v)), pattern.groups, True, 0.25, 396)
    assert plan_of(problem).forward.num_splits > 1
    out, lse = attend_with_lse(q, k, v, pattern, is_causal=True, query_offset=396, scale=0.25, impl="triton-fp8")
    want = attend_with_lse(
        *(as_rounded(x) for x in (q, k, v)), pattern, is_causal=True, query_offset=396, scale=0.25, impl="reference"
    )
    torch.testing.assert_close(lse, want.lse.float(), rtol=1e-5, atol=1e-5)
    spread = attend(
        *(as_rounded(x) for x in (q, k)),
        as_rounded(v).abs(),
        pattern,
        is_causal=True,
        query_offset=396,
        scale=0.25,
        impl="reference",
    )
    assert ((out - want.out).abs() <= 2.0**-4 * spread).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("operand", [0, 1, 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_comes_out_as_nan(bad: float, operand: int) -> None:
    tensors = [torch.randn(1, 40, 1, 16, device=DEVICE) for _ in range(3)]
    tensors[operand][0, 35, 0, 3] = bad
    out, _ = attend_with_lse(*tensors, DilatedPattern([40], [1]), is_causal=True, impl="triton-fp8")
    assert out[0, 35].isnan().any()
    assert out[0, :32].isfinite().all()


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch.func loads the compiler
def test_it_computes_no_derivative_and_no_dropout_and_is_taken_by_name_only() -> None:
    q, k, v = (torch.randn(1, 20, 1, 16, device=DEVICE) for _ in range(3))
    sentence = r'impl="triton-fp8" computes the forward alone, and a gradient is asked for: call it under torch.no_grad'

    def total(query: Tensor) -> Tensor:
        return attend(query, k, v, PATTERN, impl="triton-fp8").sum()

    with pytest.raises(NotImplementedError, match=sentence):
        total(q.clone().requires_grad_())
    with pytest.raises(NotImplementedError, match=sentence):
        torch.func.grad(total)(q)
    with pytest.raises(NotImplementedError, match=sentence):
        torch.func.jvp(total, (q,), (q,))
    operands = (q, k, v, None, None, None, PATTERN.spec, False, 0.25, 0, 0, 0.0, "triton-fp8")
    out, lse = library.attend(*operands)
    with pytest.raises(NotImplementedError, match=sentence):
        library.attend_backward(q, None, out, lse, *operands)
    with torch.no_grad():
        assert torch.equal(total(q.clone().requires_grad_()), total(q))
    with pytest.raises(NotImplementedError, match='it has no dropout, as it is for calls without gradients; impl="tri'):
        attend(q, k, v, PATTERN, dropout_p=0.5, impl="triton-fp8")
    assert select("auto", q.device, q.dtype, 16) != "triton-fp8"
