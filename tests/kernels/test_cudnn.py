"""impl="cudnn" without a GPU: the two operators are stood in for on the CPU, and refuse what cuDNN would refuse."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention_pytorch import DilatedPattern, attend, attend_with_lse, local_window
from dilated_attention_pytorch.kernels import cudnn, partial, select
from dilated_attention_pytorch.ops.remote import RemoteKeys, merge_rows
from kernels.cudnn_contract import on_the_cpu
from support.drawn import LENGTHS, DrawnCall, Sizes, block_calls, calls, examples
from support.error_budget import budget
from support.oracle import dense_attention

WIDE = (torch.float64,)
SIZES = Sizes(LENGTHS, 3, 6, (8, 16, 24))


@pytest.fixture(autouse=True)
def _a_gpu_that_takes_the_call(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "refusal" not in request.node.name:
        monkeypatch.setattr(select, "_cudnn_refusal", lambda *call: None)


def results(out: Tensor, lse: Tensor, inputs: list[Tensor], grad_out: Tensor, grad_lse: Tensor | None) -> list[Tensor]:
    """out, lse with -inf as 0, and the gradients of a loss over both."""
    seen = torch.where(lse == float("-inf"), 0.0, lse)
    loss = (out.double() * grad_out.double()).sum()
    loss = loss if grad_lse is None else loss + (seen * grad_lse).sum()
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [out, seen, *(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True))]


def compute(call: DrawnCall, inputs: list[Tensor], grad_out: Tensor, grad_lse: Tensor | None) -> list[Tensor]:
    out, lse = attend_with_lse(
        *inputs, call.pattern, is_causal=call.is_causal, scale=call.scale, impl="cudnn", **call.options
    )
    return results(out, lse, inputs, grad_out, grad_lse)


def oracle(call: DrawnCall, inputs: list[Tensor], grad_out: Tensor, grad_lse: Tensor | None) -> list[Tensor]:
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, lse = dense_attention(*exact, *call.counts(), scale_of(call))
    return results(out, lse, exact, grad_out.double(), grad_lse)


def scale_of(call: DrawnCall) -> float:
    return 1 / math.sqrt(call.head_dim) if call.scale is None else call.scale


@pytest.mark.parametrize("kind", ["dilated", "blocks and windows"])
def test_it_equals_the_oracle_to_1e_10(kind: str, figure: Any) -> None:
    worst, drawn = 0.0, 0
    with on_the_cpu(dtypes=WIDE) as contract:

        @examples(90 if kind == "dilated" else 40)
        @given(calls(sizes=SIZES) if kind == "dilated" else block_calls(sizes=SIZES))
        def check(call: DrawnCall) -> None:
            nonlocal worst, drawn
            *inputs, grad_out, grad_lse = call.tensors(torch.float64)
            inputs = [x.requires_grad_() for x in inputs]
            weight = grad_lse if call.seed % 4 == 3 else None
            pairs = zip(compute(call, inputs, grad_out, weight), oracle(call, inputs, grad_out, weight), strict=True)
            for got, want in pairs:
                error = float((got - want).detach().abs().max()) if got.numel() else 0.0
                assert error <= 1e-10
                worst = max(worst, error)
            drawn += 1

        check()
    assert min(contract.num_forward, contract.num_backward) > drawn, "hardly a partial went to cuDNN"
    calls_made = f"{contract.num_forward} calls forward, {contract.num_backward} backward"
    figure(f"cuDNN's contract, {kind}: {drawn} draws, {calls_made}", f"largest float64 error {worst:.1e}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_stays_within_the_error_budget(dtype: torch.dtype, figure: Any) -> None:
    used = 0.0
    with on_the_cpu():

        @examples(25)
        @given(calls(sizes=SIZES))
        def check(call: DrawnCall) -> None:
            nonlocal used
            call.summands = tuple(dataclasses.replace(one, tail="ragged") for one in call.summands)
            *inputs, grad_out, _ = call.tensors(dtype)
            inputs = [x.requires_grad_() for x in inputs]
            q, k, v = (x.detach().double() for x in inputs)
            k, v = (x.repeat_interleave(call.ratio, 2) for x in (k, v))
            counts = call.counts()[0].repeat_interleave(call.ratio, 1).double()
            bounds = budget(q, k, v, grad_out.double(), counts, scale_of(call), dtype)
            three = zip(
                compute(call, inputs, grad_out, None), oracle(call, inputs, grad_out, None), bounds, strict=True
            )
            for index, (got, want, bound) in enumerate(three):
                if index > 2:
                    bound = bound.unflatten(2, (-1, call.ratio)).sum(3)
                if got.numel():
                    share = (got.double() - want).abs() / (bound + 64 * torch.finfo(dtype).tiny)
                    assert (share <= 1.0).all()
                    used = max(used, float(share.detach().max()))

        check()
    figure(f"cuDNN's contract, {dtype}: largest part of the error budget used", f"{used:.2f}")


def expanded(x: Tensor) -> Tensor:
    """One head for all, the same memory."""
    return x[:, :, :1].expand(-1, -1, x.shape[2], -1)


def off_by_one(x: Tensor) -> Tensor:
    """Rows that begin one number after a multiple of 16 bytes."""
    padded = torch.zeros(*x.shape[:3], x.shape[3] + 1, dtype=x.dtype)
    padded[..., 1:] = x.detach()
    return padded[..., 1:]


def backwards(x: Tensor) -> Tensor:
    """Heads outside rows."""
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("lay_out", [expanded, off_by_one, backwards])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_rows_that_lie_badly_are_copied_and_the_result_is_the_same(
    lay_out: Callable[[Tensor], Tensor], kv_heads: int
) -> None:
    pattern = DilatedPattern([16, 40], [1, 2])
    q, k, v, grad = (torch.randn(2, 75, heads, 16).bfloat16() for heads in (4, kv_heads, kv_heads, 4))
    with on_the_cpu():
        for index in range(4):
            laid = [lay_out(x) if index in (i, 3) else x.clone() for i, x in enumerate((q, k, v))]
            grad_out = lay_out(grad)
            both = []
            for inputs, g in ((laid, grad_out), ([x.contiguous() for x in laid], grad_out.contiguous())):
                leaves = [x.detach().requires_grad_() for x in inputs]
                out = attend(*leaves, pattern, is_causal=True, impl="cudnn")
                both.append([out.detach(), *torch.autograd.grad(out, leaves, g)])
            for got, want in zip(*both, strict=True):
                assert torch.equal(got, want)


@pytest.mark.parametrize("shared", [None, 0, 1])
def test_more_problems_than_a_call_takes_are_computed_in_parts(
    shared: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def views(rows: int) -> Tensor:
        return torch.randn(3, 7, rows, 8, dtype=torch.float64)

    q, grad_out, k, v = views(5), views(5), views(9), views(9)
    if shared is not None:
        k, v = (x.narrow(shared, 0, 1).expand(x.shape) for x in (k, v))
    results = []
    for most in (65535, 2):
        monkeypatch.setattr(cudnn, "_MOST_PROBLEMS", most)
        with on_the_cpu(dtypes=WIDE) as contract:
            out, lse = cudnn.forward(q, k, v, is_causal=False, scale=0.3)
            grads = cudnn.backward(grad_out, q, k, v, out, lse, is_causal=False, scale=0.3)
        summed = [x if shared is None or i == 0 else x.sum(shared, keepdim=True) for i, x in enumerate(grads)]
        results.append([out, lse, *summed])
    assert contract.num_forward > 1
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-14)


def test_one_query_and_one_key_masks_dropout_and_gradients_of_the_lse_are_products() -> None:
    def num_calls(rows: int, pattern: Any = None, **options: Any) -> tuple[int, int]:
        q, k, v = (torch.randn(1, rows, 2, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        with on_the_cpu() as contract:
            out, lse = attend_with_lse(q, k, v, pattern or DilatedPattern([16], [1]), impl="cudnn", **options)
            (out.float().sum() + (lse.sum() if options.get("dropout_p") is None else 0.0)).backward()
        return contract.num_forward, contract.num_backward

    assert num_calls(16) == (1, 0)  # the log-sum-exp has a gradient
    assert num_calls(17) == (1, 0)  # the last segment has one row
    assert num_calls(16, dropout_p=0.5) == (0, 0)
    assert num_calls(16, key_padding_mask=torch.arange(16).unsqueeze(0) > 12) == (0, 0)
    assert num_calls(64, local_window(20, 3), dropout_p=0.0) == (0, 0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_paper_s_pattern_is_12_calls(is_causal: bool) -> None:
    """A thirty-second of its size: heads of different residues are one call, nothing is gathered."""
    pattern = DilatedPattern([64, 128, 256, 512, 1024], [1, 2, 4, 6, 12])
    q, k, v = (torch.randn(1, 1024, 12, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with on_the_cpu() as contract:
        attend(q, k, v, pattern, is_causal=is_causal, impl="cudnn").sum().backward()
    assert (contract.num_forward, contract.num_backward) == (12, 12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ratio", [1, 3])
def test_the_true_operators_take_what_they_are_given(dtype: torch.dtype, ratio: int) -> None:
    q = torch.empty_strided((2, ratio, 37, 64), (111 * 384, 128, 3 * 384, 1), dtype=dtype, device="meta")
    k = torch.empty_strided((2, ratio, 41, 64), (41 * 192, 0, 192, 1), dtype=dtype, device="meta")
    out, lse = cudnn.forward(q, k, k, is_causal=False, scale=0.1)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, dtype, q.shape[:3], torch.float32)
    grads = cudnn.backward(out, q, k, k, out, lse, is_causal=False, scale=0.1)
    assert [grad.shape for grad in grads] == [q.shape, (2, 1, 41, 64), (2, 1, 41, 64)]


def test_the_operators_have_the_schemas_that_the_calls_are_written_for() -> None:
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention.default._schema
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default._schema
    assert [argument.name for argument in forward.arguments] == [
        "query",
        "key",
        "value",
        "attn_bias",
        "compute_log_sumexp",
        "dropout_p",
        "is_causal",
        "return_debug_mask",
        "scale",
    ]
    assert [argument.name for argument in backward.arguments] == [
        "grad_out", "query", "key", "value", "out", "logsumexp", "philox_seed", "philox_offset", "attn_bias",
        "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "scale",
    ]  # fmt: skip
    q = torch.empty(2, 3, 5, 8, dtype=torch.float16, device="meta")
    lse = torch.ops.aten._scaled_dot_product_cudnn_attention(q, q, q, None, True, 0.0, False, scale=0.1)[1]
    assert (lse.shape, lse.dtype) == ((2, 3, 5, 1), torch.float32)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"dtype": torch.float32}, "float16 and bfloat16, not in torch.float32"),
        ({"head_dim": 60}, "heads of 8, 16, ... 128 numbers, got 60"),
        ({"head_dim": 192}, "heads of 8, 16, ... 128 numbers, got 192"),
        ({"device": "cpu"}, "not for 'cpu' tensors"),
        ({"capability": (7, 5)}, "8.0 to 12.1 to cuDNN's attention, this GPU has 7.5"),
        ({"capability": (13, 0)}, "this GPU has 13.0"),
        ({"version": 91002}, "from version 9.15.1 on (91501), got 91002"),
        ({"version": 0}, "got none"),
        ({"is_deterministic": True}, "are not deterministic"),
        ({"variable": "1"}, "TORCH_CUDNN_SDPA_AVOID_RECOMPILE"),
        ({}, None),
    ],
)
def test_refusal_has_a_sentence_for_everything(
    changed: dict[str, Any], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = {"dtype": torch.bfloat16, "head_dim": 64, "device": "cuda", "capability": (9, 0), "version": 91900} | changed
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: call["capability"])
    monkeypatch.setattr(select, "_cudnn_version", lambda: call["version"])
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: "is_deterministic" in call)
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", call.get("variable", "0"))
    reason = select.refusal("cudnn", torch.device(call["device"]), call["dtype"], call["head_dim"])
    if words is None:
        assert reason is None
        assert select.select("auto", torch.device("cuda"), torch.bfloat16, 64) == "triton"
        return
    assert reason is not None
    assert words in reason
    with pytest.raises(NotImplementedError, match="impl='cudnn' cannot compute this call"):
        select.select("cudnn", torch.device(call["device"]), call["dtype"], call["head_dim"])


def test_the_version_of_cudnn_is_a_constant_of_a_compiled_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    compiled = torch.compile(lambda x: x + select._cudnn_version(), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(2)).tolist() == [91900, 91900]


def test_a_mask_of_its_own_is_not_cudnn_s() -> None:
    query = torch.empty(1, 2, 2, 8, dtype=torch.bfloat16)
    for has_bias, kernel in ((True, "products"), (False, "cudnn")):
        chosen = partial.kernel_of("cudnn", query, has_bias=has_bias, is_dropped=False, is_pair=False)
        assert chosen == kernel


def test_the_operators_are_gone_after_the_test() -> None:
    q = torch.zeros(1, 1, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="_scaled_dot_product_cudnn_attention"):
        cudnn.forward(q, q, q, is_causal=False, scale=1.0)


@examples(100)
@given(st.data())
def test_any_layout_becomes_one_that_every_view_may_have(data: st.DataObject) -> None:
    sizes = [data.draw(st.integers(1, 4)) for _ in range(3)]
    strides = [data.draw(st.sampled_from([0, 1, 7, 8, 24, 64])) for _ in range(3)]
    offset = data.draw(st.sampled_from([0, 1, 4, 8]))
    x = torch.arange(2000, dtype=torch.bfloat16).as_strided([*sizes, 8], [*strides, 1], offset)
    laid = cudnn.laid_out(x)
    assert torch.equal(laid, x)
    assert laid.data_ptr() % 16 == 0
    assert all(
        stride > 0 and stride % 8 == 0 for stride, size in zip(laid.stride()[:3], sizes, strict=True) if size > 1
    )


@pytest.mark.parametrize("lay_out", [off_by_one, backwards])
@pytest.mark.parametrize("ratio", [1, 3])
def test_keys_from_elsewhere_are_merged_as_under_aten(lay_out: Callable[[Tensor], Tensor], ratio: int) -> None:
    query = torch.randn(2, 19, 2, ratio, 16, dtype=torch.float64)
    key, value = (lay_out(torch.randn(2, 33, 2, 16, dtype=torch.float64)) for _ in range(2))
    results = []
    with on_the_cpu(dtypes=WIDE) as contract:
        for impl in ("aten", "cudnn"):
            out, lse = torch.zeros_like(query), torch.full(query.shape[:4], float("-inf"), dtype=torch.float64)
            for some in (slice(0, 20), slice(20, 33)):
                keys = RemoteKeys(key[:, some], value[:, some], None)
                merge_rows(query, keys, out, lse, scale=0.3, impl=impl)
            results.append((out, lse))
    assert contract.num_forward > 0
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-14)
