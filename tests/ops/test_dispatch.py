"""Calls go straight to their kernels where nothing but autograd looks on, else through the dispatcher."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from dilated_attention_pytorch import DilatedPattern, attend_with_lse
from dilated_attention_pytorch.kernels import select
from dilated_attention_pytorch.ops import attend_blocks, derivatives
from dilated_attention_pytorch.ops.derivatives import is_recorded, needs_dispatcher

PATTERN = DilatedPattern([13, 32], [1, 3])


class Subclass(torch.Tensor):
    """A tensor of another kind."""


class Looking(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def leaves(size: int = 2, rows: int = 37) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((size, rows, 2 * size, 8), (size, rows, size, 8), (size, rows, size, 8))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def test_nothing_sees_a_plain_tensor() -> None:
    leaf = torch.zeros(3, requires_grad=True)
    seen = [needs_dispatcher(leaf, None, torch.nn.Parameter(torch.zeros(2)))]
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with context:
            seen += [needs_dispatcher(leaf), needs_dispatcher(torch.zeros(3))]
    assert not any(seen)


def _under(context: Any) -> Callable[[], bool]:
    def ask() -> bool:
        with context:
            return needs_dispatcher(torch.zeros(3))

    return ask


def _within(transform: Callable[..., Any]) -> Callable[[], bool]:
    def ask() -> bool:
        found = []

        def function(x: Tensor) -> Tensor:
            found.append(needs_dispatcher(x))
            return x.sum()

        transform(function)(torch.ones(3, 2))
        return all(found)

    return ask


OBSERVERS = {
    "dispatch mode": _under(FlopCounterMode(display=False)),
    "fake mode": _under(FakeTensorMode()),
    "function mode": _under(Looking()),
    "default device": _under(torch.device("cpu")),
    "forward-mode derivatives": _under(forward_ad.dual_level()),
    "vmap": _within(torch.vmap),
    "grad": _within(torch.func.grad),
    "functionalize": _within(torch.func.functionalize),
    "subclass": lambda: needs_dispatcher(torch.zeros(3).as_subclass(Subclass)),
    "meta": lambda: needs_dispatcher(torch.zeros(3, device="meta")),
    "negative view": lambda: needs_dispatcher(torch.zeros(3), torch.zeros(3, dtype=torch.complex64).conj().imag),
    "fake tensor": lambda: needs_dispatcher(FakeTensorMode().from_tensor(torch.zeros(3))),
}


@pytest.mark.parametrize("ask", OBSERVERS.values(), ids=OBSERVERS)
def test_what_looks_on_sees_a_call(ask: Callable[[], bool]) -> None:
    assert ask()


def test_autograd_records_where_it_is_asked_to() -> None:
    leaf = torch.zeros(3, requires_grad=True)
    assert is_recorded(None, leaf)
    assert not is_recorded(leaf.detach(), None)
    with torch.no_grad():
        assert not is_recorded(leaf)
    with torch._C._AutoDispatchBelowAutograd():  # as within an operator
        assert not is_recorded(leaf)


@pytest.mark.parametrize(("impl", "size", "rows"), [("aten", 2, 37), ("triton", 1, 14)])
def test_both_ways_give_the_same_bits(impl: Any, size: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if select.refusal(impl, torch.device("cpu"), torch.float32, 8) is not None:
        pytest.skip("not on this machine")
    calls = []

    class Recording:
        def __getattr__(self, name: str) -> Any:
            operator = getattr(torch.ops.dilated_attention_pytorch, name).default
            return SimpleNamespace(default=lambda *x: calls.append(name) or operator(*x))

    monkeypatch.setattr(derivatives, "_OPERATORS", Recording())

    def results(inputs: list[Tensor]) -> list[Tensor]:
        out, lse = attend_with_lse(*inputs, PATTERN, is_causal=True, impl=impl)
        assert out.requires_grad
        assert lse.requires_grad
        grads = torch.autograd.grad((out.sin().sum() + lse.cos().sum()), inputs)
        return [out, lse, *grads]

    direct = results(leaves(size, rows))
    assert not calls
    with FlopCounterMode(display=False):
        seen = results(leaves(size, rows))
    assert calls == ["attend", "attend_backward"]
    assert all(torch.equal(a, b) for a, b in zip(direct, seen, strict=True))
    with torch.no_grad():
        out, lse = attend_with_lse(*leaves(size, rows), PATTERN, is_causal=True, impl=impl)
    assert torch.equal(out, direct[0])
    assert torch.equal(lse, direct[1])
    assert not out.requires_grad


def test_listed_blocks_give_the_same_bits_both_ways() -> None:
    gates = torch.randn(2, 2, 5, 3).requires_grad_()
    blocks = torch.randint(5, (2, 2, 5, 3))

    def results() -> list[Tensor]:
        inputs = leaves()
        out, lse = attend_blocks(*inputs, blocks, gates, block_size=8, is_causal=True)
        return [out, lse, *torch.autograd.grad(out.sin().sum() + lse.clamp(min=-9.0).sum(), [*inputs, gates])]

    direct = results()
    with FlopCounterMode(display=False):
        seen = results()
    assert all(torch.equal(a, b) for a, b in zip(direct, seen, strict=True))


def test_a_view_that_stands_for_its_negative_is_read_as_it_is() -> None:
    query, key, value = (x.detach() for x in leaves())
    negative = torch.complex(torch.zeros_like(query), -query).conj().imag
    assert negative.is_neg()
    out, _ = attend_with_lse(negative, key, value, PATTERN)
    assert torch.equal(out, attend_with_lse(query, key, value, PATTERN).out)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "dispatch mode": lambda: FlopCounterMode(display=False),
    "function mode": Looking,
    "forward-mode derivatives": forward_ad.dual_level,
}


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("looks_on", CONTEXTS)
@pytest.mark.parametrize("call", ["attend", "attend_blocks"])
def test_recomputing_under_other_eyes_gives_the_same_gradients(call: str, looks_on: str, where: str) -> None:
    """Activation checkpointing knows saved tensors by their order alone, whichever way a call went."""
    inputs = leaves()
    inputs[0] = inputs[0].detach()[:, :, :2].clone().requires_grad_()  # of the shape of the keys: none is told by it
    gates = torch.randn(2, 2, 5, 2, generator=torch.Generator().manual_seed(4)).requires_grad_()
    blocks = torch.tensor([0, 1]).expand(2, 2, 5, 2)

    def compute(query: Tensor, key: Tensor, value: Tensor, gates: Tensor) -> Tensor:
        if call == "attend":
            out, lse = attend_with_lse(query, key, value, PATTERN, is_causal=True)
            return out.sin().sum() + lse.cos().sum() + 0 * gates.sum()
        out, lse = attend_blocks(query, key, value, blocks, gates, block_size=8)
        return out.sin().sum() + lse.cos().sum()

    tensors = (*inputs, gates)
    expected = torch.autograd.grad(compute(*tensors), tensors)
    contexts = {"forward": contextlib.nullcontext(), "backward": contextlib.nullcontext()}
    contexts[where] = CONTEXTS[looks_on]()
    with contexts["forward"]:
        loss = checkpoint(compute, *tensors, use_reentrant=False)
    with contexts["backward"]:
        found = torch.autograd.grad(loss, tensors)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
