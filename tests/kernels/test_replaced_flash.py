"""``impl="aten"`` on a GPU whose flash kernel was replaced through ``torch.nn.attention``, on a stand-in of the GPU.

PyTorch's own functions register the implementations: only the package that they import is a stand-in, which computes
densely, aligns a causal mask at the last row and key as FlashAttention does, and refuses views with a stride of 0.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

from dilated_attention_pytorch import DilatedPattern, attend_with_lse
from support.drawn import DrawnCall, Sizes, calls, examples
from support.error_budget import parts_of_budget
from support.oracle import Groups
from support.other_devices import StandIn, expected, results

# PyTorch says once that a kernel of its build for CUDA is overridden.
pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning")

SMALL = Sizes(st.sampled_from([1, 2, 31, 64, 65]), 2, 2, (8, 16), groups=2, summands=(1, 1, 2), ratios=(1, 2, 3))
CALLS = {"forward": 0, "backward": 0}


def scores_of(q: Tensor, k: Tensor, scale: float, *, causal: bool) -> Tensor:
    """``[B, H, N, M]`` in float64 from ``[B, N, H, D]``."""
    scores = scale * torch.einsum("bnhd,bmhd->bhnm", q.double(), k.double())
    if causal:
        scores = scores.masked_fill(
            torch.ones_like(scores, dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1]), -torch.inf
        )
    return scores


def forward(q: Any, k: Any, v: Any, scale: float, *, causal: bool, out: Any) -> Tensor:
    """Write ``out``, and return the log-sum-exp ``[B, H, N]``."""
    assert all(0 not in x.stride() and x.stride(-1) == 1 for x in (q, k, v, out))
    CALLS["forward"] += 1
    scores = scores_of(q.numbers, k.numbers, scale, causal=causal)
    out.numbers.copy_(torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v.numbers.double()))
    return scores.logsumexp(-1).float()


def backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, *, causal: bool) -> list[Tensor]:
    """Gradients under an external ``out`` and ``lse``, as the kernels compute them."""
    assert all(0 not in x.stride() and x.stride(-1) == 1 for x in (dout, q, k, v, out))
    assert lse.is_contiguous()
    CALLS["backward"] += 1
    g, of_q, of_k, of_v = (x.numbers.double() for x in (dout, q, k, v))
    p = torch.exp(scores_of(of_q, of_k, scale, causal=causal) - lse.numbers.double().unsqueeze(-1))
    delta = (g * out.numbers.double()).sum(-1).transpose(1, 2).unsqueeze(-1)
    ds = scale * p * (torch.einsum("bnhd,bmhd->bhnm", g, of_v) - delta)
    grads = torch.einsum("bhnm,bmhd->bnhd", ds, of_k), torch.einsum("bhnm,bnhd->bmhd", ds, of_q)
    return [x.to(q.dtype) for x in (*grads, torch.einsum("bhnm,bnhd->bmhd", p, g))]


def flash_attention_4(device: StandIn) -> ModuleType:
    module = ModuleType("flash_attn.cute.interface")

    def forward_4(q: Any, k: Any, v: Any, *, softmax_scale: float, causal: bool, out: Any, **others: Any) -> Any:
        assert others.pop("return_lse")
        assert others.pop("num_splits", 1) == 1
        others.pop("max_seqlen_q", None), others.pop("max_seqlen_k", None)
        assert set(others.values()) == {None}, others
        return out, device.holding(forward(q, k, v, softmax_scale, causal=causal, out=out))

    def backward_4(
        q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, *, softmax_scale: float, **options: Any
    ) -> Any:
        grads = backward(dout, q, k, v, out, lse, softmax_scale, causal=options["causal"])
        return tuple(map(device.holding, grads))

    module._flash_attn_fwd, module._flash_attn_bwd = forward_4, backward_4  # type: ignore[attr-defined]
    return module


def flash_attention_3(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    def forward_3(q: Any, k: Any, v: Any, *others: Any) -> Any:
        out, scale, causal = others[3], *others[20:22]
        lse = forward(q, k, v, scale, causal=causal, out=out)
        return out, device.holding(lse), None, None

    def backward_3(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *others: Any) -> None:
        scale, causal = others[9:11]
        for into, grad in zip(others[:3], backward(dout, q, k, v, out, lse, scale, causal=causal), strict=True):
            into.numbers.copy_(grad)

    for name, function in (("fwd", forward_3), ("bwd", backward_3)):
        monkeypatch.setattr(torch.ops.flash_attn_3, name, function, raising=False)
    return ModuleType("flash_attn_interface")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    device = StandIn("cuda")
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for module in (flash_attention_4(device), flash_attention_3(device, monkeypatch)):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    CALLS.update(forward=0, backward=0)
    yield device
    restore_flash_attention_impl(_raise_warn=False)


@pytest.mark.parametrize("name", ["FA3", "FA4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_drawn_calls_equal_the_oracle(name: str, dtype: torch.dtype, device: StandIn) -> None:
    activate_flash_attention_impl(name)

    @examples(8, is_shrunk=False)
    @given(calls(with_padding=False, sizes=SMALL))
    def check(call: DrawnCall) -> None:
        ragged = (replace(one, tail="ragged") if isinstance(one, Groups) else one for one in call.summands)
        call.summands = tuple(ragged)
        call.scale = None if call.scale is None else abs(call.scale) or 0.5  # the operator's scale is positive
        *tensors, _ = call.tensors(dtype)
        found = results(device, call, *tensors, impl="aten")
        used = parts_of_budget(call, tensors[:3], tensors[3], found, expected(call, *tensors))
        assert max(used.values()) <= 1, used

    check()
    assert CALLS["forward"] > 0
    assert CALLS["backward"] > 0


@pytest.mark.parametrize(("name", "capability"), [("FA3", (10, 0)), ("FA4", (8, 0))])
def test_an_implementation_for_other_gpus_is_refused(
    name: str, capability: tuple[int, int], device: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    activate_flash_attention_impl(name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    q = device.holding(torch.randn(1, 7, 2, 8, dtype=torch.bfloat16))
    with device, pytest.raises(NotImplementedError, match=rf"activate_flash_attention_impl\(\"{name}\"\).*restore_"):
        attend_with_lse(q, q, q, DilatedPattern([4], [1]), impl="aten")


def test_an_implementation_of_another_name_is_called(device: StandIn) -> None:
    called = []

    class Handle:
        def __init__(self) -> None:
            self.library: Any = torch.library.Library("aten", "IMPL", "CUDA")
            self.library.impl("_scaled_dot_product_flash_attention", self.compute, "CUDA")

        def compute(self, query: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
            called.append(query.shape)
            lse = query.new_zeros(query.shape[:3], dtype=torch.float32)
            return query.new_zeros(query.shape), lse, None, None, 0, 0, lse, lse, lse

        def remove(self) -> None:
            self.library = None

    register_flash_attention_impl("another", register_fn=Handle)
    activate_flash_attention_impl("another")
    q = device.holding(torch.randn(1, 7, 2, 8, dtype=torch.bfloat16))
    with device:
        attend_with_lse(q, q, q, DilatedPattern([4], [1]), impl="aten")
    assert called
