"""Derivatives beside the gradient: tangents, second and third derivatives, and calls side by side (``vmap``)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

from dilated_attention_pytorch import DilatedPattern, attend, attend_with_lse, local_window
from dilated_attention_pytorch.ops import operators
from dilated_attention_pytorch.ops.call import Call
from dilated_attention_pytorch.ops.implementations import IMPLEMENTATIONS
from support.drawn import SWEEP, DrawnCall, Sizes, block_calls, calls, examples

# PyTorch scripts functions of its own when first asked for a tangent.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

PATTERN = DilatedPattern([7, 16], [1, 3])
SMALL = Sizes(st.integers(1, 30), 2, 3, (1, 2, 5, 8), groups=3, segments=st.integers(1, 35))
DRAWS = 15

Inputs = tuple[Tensor, Tensor, Tensor]


def numbers(like: tuple[Tensor, ...], seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in like)


def inputs(rows: int = 11, *, dtype: torch.dtype = torch.float64) -> Inputs:
    q, k, v = (torch.randn(2, rows, heads, 3, dtype=torch.float64).to(dtype) for heads in (4, 2, 2))
    return q, k, v


def outputs_of(impl: str, **options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Output and log-sum-exp of a call as a function of its tensors; a row without a key counts as 0 in both."""

    def outputs(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(5)  # of dropout: it is a function
        out, lse = attend_with_lse(*tensors, impl=impl, **options)
        return out, torch.where(lse == float("-inf"), 0.0, lse)

    return outputs


def loss_of(outputs: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    def loss(*tensors: Tensor) -> Tensor:
        out, lse = outputs(*tensors)
        return out.sin().sum() + lse.cos().sum()

    return loss


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(itertools.chain.from_iterable(map(flat, result)))


def largest_error(got: Any, want: Any) -> float:
    """Relative to the largest number of a tensor where that is above 1."""
    errors = [0.0]
    for ours, theirs in zip(flat(got), flat(want), strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        if ours.numel():
            errors.append(float((ours - theirs).detach().abs().max() / theirs.detach().abs().max().clamp(min=1.0)))
    return max(errors)


def with_a_graph(loss: Callable[..., Tensor], tensors: Inputs, direction: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A Hessian-vector product by ``create_graph=True``."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    gradients = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    along = sum((x * y).sum() for x, y in zip(gradients, direction, strict=True))
    return torch.autograd.grad(along, leaves)


def every_derivative(impl: str, call: DrawnCall) -> dict[str, Any]:
    q, k, v, grad_out, grad_lse = call.tensors(torch.float64)
    tensors = (q, k, v)
    outputs = outputs_of(impl, pattern=call.pattern, is_causal=call.is_causal, scale=call.scale, **call.options)
    loss, of_all = loss_of(outputs), (0, 1, 2)
    direction = numbers(tensors, call.seed)
    side_by_side = tuple(torch.stack([x, y]) for x, y in zip(tensors, direction, strict=True))
    return {
        "jvp": jvp(outputs, tensors, direction)[1],
        "vjp": vjp(outputs, *tensors)[1]((grad_out, grad_lse)),
        "grad": grad(loss, of_all)(*tensors),
        "vmap": vmap(outputs)(*side_by_side),
        "vmap of grad": vmap(grad(loss, of_all))(*side_by_side),
        "hessian-vector product, forward over reverse": jvp(grad(loss, of_all), tensors, direction)[1],
        "hessian-vector product, reverse over reverse": with_a_graph(loss, tensors, direction),
    }


def test_drawn_calls_have_the_references_derivatives(figure: Any) -> None:
    """Packing, padding, slabs, tails, sums of rules, grouped heads; derivatives of the log-sum-exp included."""
    worst: dict[str, float] = {}
    drawn = 0

    @examples(DRAWS)
    @given(st.one_of(calls(sizes=SMALL), block_calls(sizes=SMALL)))
    def check(call: DrawnCall) -> None:
        nonlocal drawn
        drawn += 1
        ours, theirs = every_derivative("aten", call), every_derivative("reference", call)
        for name in theirs:
            error = largest_error(ours[name], theirs[name])
            assert error <= 1e-10, (name, error)
            worst[name] = max(worst.get(name, 0.0), error)

    check()
    assert drawn >= (10 if SWEEP else 1) * DRAWS
    figure(
        f"derivatives in float64, {drawn} drawn calls, largest differences from the reference",
        {name: f"{error:.1e}" for name, error in worst.items()},
    )


def along(first: Inputs, second: Inputs) -> dict[str, Callable[[Callable[..., Any]], Any]]:
    """Further derivatives of a function of :func:`outputs_of`, along two directions."""
    of_all = (0, 1, 2)

    def product(function: Callable[..., Any], direction: tuple[Tensor, ...]) -> Callable[..., Tensor]:
        return lambda *x: sum((y.sin() * z).sum() for y, z in zip(flat(function(*x)), direction, strict=True))

    def tangent_at(f: Callable[..., Any], direction: Inputs) -> Callable[..., Any]:
        return lambda *x: jvp(f, x, direction)[1]

    def hessian_vector(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *x: vjp(grad(loss_of(f), of_all), *x)[1](first)

    return {
        "linearize": lambda f, *x: linearize(f, *x)[1](*first),
        "of the query alone": lambda f, q, k, v: jvp(lambda q: f(q, k, v), (q,), first[:1])[1],
        "of the key alone": lambda f, q, k, v: jvp(lambda k: f(q, k, v), (k,), first[1:2])[1],
        "of the value alone": lambda f, q, k, v: jvp(lambda v: f(q, k, v), (v,), first[2:])[1],
        "jacfwd": lambda f, *x: jacfwd(f, randomness="same")(*x),
        "jacrev": lambda f, *x: jacrev(f, 1)(*x),
        "reverse over forward": lambda f, *x: grad(loss_of(tangent_at(f, first)), of_all)(*x),
        "forward over forward": lambda f, *x: jvp(tangent_at(f, first), x, second)[1],
        "reverse over reverse over reverse": lambda f, *x: grad(product(hessian_vector(f), second), of_all)(*x),
        "forward over reverse over reverse": lambda f, *x: jvp(hessian_vector(f), x, second)[1],
        "forward three times": lambda f, *x: jvp(tangent_at(tangent_at(f, first), second), x, first)[1],
    }


OPTIONS: dict[str, dict[str, Any]] = {
    "causal and dropped": {"is_causal": True, "dropout_p": 0.3},
    "padded": {"key_padding_mask": torch.arange(6).expand(2, 6) % 4 == 1, "scale": -0.4, "pattern": local_window(3, 2)},
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # PyTorch's own, by linearize
@pytest.mark.parametrize("name", [*along(*(inputs(1),) * 2)])
@pytest.mark.parametrize("extra", [*OPTIONS])
def test_derivatives_of_higher_order_equal_the_references(name: str, extra: str) -> None:
    tensors = inputs(6)
    derivative = along(numbers(tensors, 1), numbers(tensors, 2))[name]
    options = {"pattern": PATTERN, **OPTIONS[extra]}
    ours, theirs = (derivative(outputs_of(impl, **options), *tensors) for impl in ("aten", "reference"))
    assert max(float(x.abs().max()) for x in flat(theirs)) > 0.1
    assert largest_error(ours, theirs) <= 1e-10


def test_a_whole_hessian_is_the_references_and_symmetric() -> None:
    q, k, v = inputs(5)
    ours, theirs = (
        hessian(lambda key, impl=impl: loss_of(outputs_of(impl, pattern=PATTERN))(q, key, v))(k)
        for impl in ("aten", "reference")
    )
    assert largest_error(ours, theirs) <= 1e-10
    matrix = ours.reshape(k.numel(), k.numel())
    torch.testing.assert_close(matrix, matrix.T, rtol=1e-10, atol=1e-10)


def test_dual_numbers_have_the_tangent_that_jvp_has_also_in_a_graph() -> None:
    tensors, outputs = inputs(), outputs_of("aten", pattern=PATTERN, is_causal=True)
    direction = numbers(tensors, 1)
    wanted = jvp(outputs, tensors, direction)[1]
    curvature = jvp(grad(loss_of(outputs), (0, 1, 2)), tensors, direction)[1]
    with forward_ad.dual_level():
        leaves = [x.detach().requires_grad_() for x in tensors]
        duals = [forward_ad.make_dual(x, y) for x, y in zip(leaves, direction, strict=True)]
        got = [forward_ad.unpack_dual(x).tangent for x in outputs(*duals)]
        gradients = torch.autograd.grad(loss_of(outputs)(*duals), leaves)
        moved = [forward_ad.unpack_dual(x).tangent for x in gradients]
        plain = outputs(*tensors)
    assert largest_error(got, wanted) <= 1e-14
    assert largest_error(moved, curvature) <= 1e-14
    assert all(map(torch.equal, plain, outputs(*tensors)))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_operands_and_directions_that_need_no_gradient_are_no_error(name: str) -> None:
    tensors = dict(zip("qkv", inputs(), strict=True))
    leaf = tensors[name].requires_grad_()
    (gradient,) = torch.autograd.grad(attend(*tensors.values(), PATTERN).sin().sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sin().sum(), leaf)
    dense = attend(*tensors.values(), PATTERN, impl="reference")
    (gradient,) = torch.autograd.grad(dense.sin().sum(), leaf, create_graph=True)
    assert largest_error(second, torch.autograd.grad(gradient.sin().sum(), leaf)[0]) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tangents_in_low_precision_are_as_exact_as_the_references(dtype: torch.dtype) -> None:
    tensors = inputs(40, dtype=dtype)
    direction = numbers(tensors, 1)
    exact = jvp(
        outputs_of("reference", pattern=PATTERN),
        tuple(x.double() for x in tensors),
        tuple(x.double() for x in direction),
    )[1]
    results = [jvp(outputs_of(impl, pattern=PATTERN), tensors, direction)[1] for impl in ("aten", "reference")]
    for ours, theirs, want in zip(*results, exact, strict=True):
        assert ours.dtype == theirs.dtype
        # Sums are in float32, and rounded to storage once.
        rounding = torch.finfo(ours.dtype).eps / 2 * want.abs().max() + 100 * torch.finfo(torch.float32).eps
        assert (ours.double() - want).abs().max() <= rounding, "ours"
        assert (theirs.double() - want).abs().max() <= rounding, "the reference's"


def test_vmap_equals_a_loop_whatever_is_shared() -> None:
    masks = torch.rand(3, 2, 11) < 0.3
    many = [torch.randn(3, *x.shape, dtype=x.dtype) for x in inputs()]
    one = inputs()

    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return attend_with_lse(query, key, value, PATTERN, key_padding_mask=mask)

    for got, wanted in (
        (vmap(compute)(*many, masks), [compute(*x) for x in zip(*many, masks, strict=True)]),
        (
            vmap(compute, in_dims=(2, None, None))(many[0].movedim(0, 2), *one[1:]),
            [compute(query, *one[1:]) for query in many[0]],
        ),
        (vmap(compute, in_dims=(None, None, None, 0))(*one, masks), [compute(*one, mask) for mask in masks]),
    ):
        for index, want in enumerate(wanted):
            torch.testing.assert_close(tuple(x[index] for x in got), tuple(want), rtol=1e-12, atol=1e-12)


def test_vmap_of_dropped_calls_draws_as_it_is_told() -> None:
    q, k, v = inputs(40)
    many = q.expand(3, *q.shape)

    def compute(query: Tensor) -> Tensor:
        return attend(query, k, v, PATTERN, dropout_p=0.5)

    same = vmap(compute, randomness="same")(many)
    assert torch.equal(same[0], same[1])
    different = vmap(compute, randomness="different")(many)
    assert not torch.equal(different[0], different[1])
    assert grad(lambda query: vmap(compute, randomness="different")(query).sum())(many).abs().max() > 0


def test_gradients_of_many_outputs_at_a_time_equal_those_one_by_one() -> None:
    """``is_grads_batched`` maps the backward pass alone."""
    tensors = [x.requires_grad_() for x in inputs()]
    out = attend(*tensors, PATTERN)
    many = torch.randn(3, *out.shape, dtype=out.dtype)
    together = torch.autograd.grad(out, tensors, many, is_grads_batched=True, retain_graph=True)
    for index, one in enumerate(many):
        alone = torch.autograd.grad(out, tensors, one, retain_graph=True)
        assert largest_error([x[index] for x in together], alone) <= 1e-12


@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_the_compiler_refuses_the_transforms_that_it_does_not_trace(transform: str) -> None:
    torch._dynamo.reset()
    q, k, v = inputs()

    def compute(query: Tensor) -> Tensor:
        if transform == "grad":
            return grad(lambda x: attend(x, k, v, PATTERN).sum())(query)
        return jvp(lambda x: attend(x, k, v, PATTERN), (query,), (query,))[1]

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"NotImplementedError.*torch.compile cannot trace"):
        torch.compile(compute, fullgraph=True, backend="aot_eager")(q)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(compute, backend="aot_eager")(q), compute(q)), "left out of the graph"


def test_compiled_calls_and_operators_refuse_tangents_that_they_would_lose() -> None:
    torch._dynamo.reset()
    q, k, v = inputs()
    compiled = torch.compile(lambda x: attend(x, k, v, PATTERN), fullgraph=True, backend="aot_eager")
    with forward_ad.dual_level():
        assert torch.equal(compiled(q), attend(q, k, v, PATTERN))
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match=r"tangents .* outside torch\.compile"):
            compiled(dual)
        call = Call(dual, k, v, pattern=PATTERN, scale=0.3, impl=IMPLEMENTATIONS["aten"])
        with pytest.raises(NotImplementedError, match=r"tangents .* call attend"):
            operators.attend(*call.for_operator())
