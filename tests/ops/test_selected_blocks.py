"""Gated attention to listed blocks: equals one dense softmax over the scores and log-gates, in value and gradient."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dilated_attention_pytorch import AttentionOutput, attend_with_lse, merge
from dilated_attention_pytorch.kernels.compilation import refusal_to_load
from dilated_attention_pytorch.ops import attend_blocks, operators
from dilated_attention_pytorch.ops.call import Call
from dilated_attention_pytorch.ops.implementations import IMPLEMENTATIONS
from dilated_attention_pytorch.patterns import local_window
from support.drawn import examples

NO_KERNELS = refusal_to_load()
needs_kernels = pytest.mark.skipif(NO_KERNELS is not None, reason=str(NO_KERNELS))
IMPLS = ["aten", pytest.param("native", marks=needs_kernels)]
EXACTEST = {"aten": torch.float64, "native": torch.float32}
"""The dtype with the smallest errors that an implementation computes in."""
BUDGETS = {torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Norm of an error over that of the result and of a 1 for each number of it: what gradients are sums of cancels."""


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    log_gates: Tensor | None,
    *,
    block_size: int,
    query_block_size: int,
    is_causal: bool = False,
    scale: float | None = None,
    query_offset: int = 0,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> AttentionOutput:
    """The definition, pair by pair: every listed block adds ``exp(s + e)`` for each of its keys."""
    assert dropout_p == 0.0
    num_queries, heads, width = q.shape[1:]
    num_keys, kv_heads = k.shape[1:3]
    p, t = torch.arange(num_queries), torch.arange(num_keys)
    lists = blocks[:, :, p // query_block_size]  # [B, G, N, k]
    listed = lists.unsqueeze(-1) == t // block_size  # [B, G, N, k, M]
    if is_causal:
        listed = listed & (t <= p[:, None] + query_offset)[:, None]
    if key_padding_mask is not None:
        listed = listed & ~key_padding_mask[:, None, None, None]
    e = torch.zeros(lists.shape, dtype=q.dtype) if log_gates is None else log_gates[:, :, p // query_block_size]
    weights = torch.where(listed, e.exp().unsqueeze(-1), 0.0).sum(3).repeat_interleave(heads // kv_heads, 1)
    k, v = (x.repeat_interleave(heads // kv_heads, 2) for x in (k, v))
    s = torch.einsum("bnhd,bmhd->bhnm", q, k) * (width**-0.5 if scale is None else scale)
    total = (weights * s.exp()).sum(-1)
    dead = total == 0
    probabilities = weights * s.exp() / torch.where(dead, 1.0, total).unsqueeze(-1)
    lse = torch.where(dead, float("-inf"), torch.where(dead, 1.0, total).log())
    return AttentionOutput(torch.einsum("bhnm,bmhd->bnhd", probabilities, v), lse.transpose(1, 2))


@dataclasses.dataclass
class Case:
    """One call."""

    tensors: list[Tensor]
    """Query, key, value, and log-gates if there are any."""
    blocks: Tensor
    options: dict[str, Any]

    def run(self, compute: Any, dtype: torch.dtype = torch.float64, **options: Any) -> AttentionOutput:
        q, k, v, *gates = (x.to(dtype) if i < 3 else x for i, x in enumerate(self.tensors))
        return compute(q, k, v, self.blocks, gates[0] if gates else None, **self.options, **options)

    def outcome(self, compute: Any, dtype: torch.dtype = torch.float64, **options: Any) -> list[Tensor]:
        """Output, log-sum-exp and gradients, in double precision, of operands that are exact in ``dtype``."""
        generator = torch.Generator().manual_seed(0)
        tensors = [x.to(dtype).double() if i < 3 else x for i, x in enumerate(self.tensors)]
        case = dataclasses.replace(self, tensors=[x.detach().requires_grad_() for x in tensors])
        torch.manual_seed(7)
        out, lse = case.run(compute, **options) if compute is dense else case.run(compute, dtype, **options)
        seen = lse.masked_fill(lse == -math.inf, 0.0)
        of_outputs = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (out, lse)]
        of_outputs = [of_outputs[0].to(dtype).to(out.dtype), of_outputs[1].float().to(lse.dtype)]
        grads = torch.autograd.grad((out, seen), case.tensors, of_outputs)
        return [x.detach().double() for x in (out, lse, *grads)]


def assert_close(found: list[Tensor], expected: list[Tensor], budget: float) -> None:
    for number, (got, want) in enumerate(zip(found, expected, strict=True)):
        is_seen = want.isfinite()
        assert torch.equal(got.isfinite(), is_seen), number
        got, want = got[is_seen], want[is_seen]
        assert float((got - want).norm()) <= budget * (float(want.norm()) + want.numel() ** 0.5), number


@st.composite
def cases(draw: st.DrawFn, *, sizes: tuple[int, ...] = (1, 2, 5, 8, 16)) -> Case:
    batch, kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    heads, width = kv_heads * draw(st.sampled_from([1, 2, 3, 9])), draw(st.sampled_from([1, 3, 8, 33]))
    num_queries, num_keys = draw(st.integers(1, 40)), draw(st.integers(1, 70))
    block_size, query_block_size = draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num_blocks = -(-num_keys // block_size)
    shape = (batch, kv_heads, -(-num_queries // query_block_size), draw(st.integers(1, 5)))
    # -1 and blocks that are listed twice among them.
    blocks = torch.randint(-1, num_blocks, shape, generator=generator)
    q, k, v = (
        torch.randn(batch, rows, number, width, generator=generator, dtype=torch.float64)
        for rows, number in ((num_queries, heads), (num_keys, kv_heads), (num_keys, kv_heads))
    )
    gates = [torch.randn(shape, generator=generator, dtype=torch.float64)] if draw(st.integers(0, 3)) else []
    if gates and draw(st.booleans()):
        gates[0][torch.rand(shape, generator=generator) < 0.2] = -math.inf
    options: dict[str, Any] = {
        "block_size": block_size,
        "query_block_size": query_block_size,
        "is_causal": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, 0.7, -0.3])),
        "query_offset": draw(st.sampled_from([0, 0, 1, 33])),
    }
    if draw(st.integers(0, 2)) == 0:
        options["key_padding_mask"] = torch.rand(batch, num_keys, generator=generator) < 0.5
    return Case([q, k, v, *gates], blocks, options)


@examples(60)
@given(cases())
def test_equals_the_dense_softmax_over_scores_and_gates(case: Case) -> None:
    case.tensors = [x.requires_grad_() for x in case.tensors]
    results = []
    for compute in (attend_blocks, dense):
        out, lse = case.run(compute)
        alive = lse != float("-inf")
        loss = out.sin().sum() + lse[alive].cos().sum()
        results.append((out, lse, *torch.autograd.grad(loss, case.tensors)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_drawn_calls_stay_within_the_budget(impl: str, dtype: torch.dtype) -> None:
    @examples(25)
    @given(cases(sizes=(1, 5, 16, 24, 33)))
    def check(case: Case) -> None:
        rounded = dataclasses.replace(case, tensors=[x.to(dtype).double() for x in case.tensors[:3]] + case.tensors[3:])
        assert_close(case.outcome(attend_blocks, dtype, impl=impl), rounded.outcome(dense), BUDGETS[dtype])

    check()


@needs_kernels
@pytest.mark.parametrize(
    ("block_size", "width"),
    [
        *[(1, 9), (100, 151), (128, 256), (1500, 9)],
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((16, 64), (200, 64), (200, 151))),
    ],
)
def test_blocks_of_any_size_on_any_number_of_threads(block_size: int, width: int) -> None:
    """More keys than are one piece of work, blocks that its pieces would cut, one sequence and head, and more."""
    generator = torch.Generator().manual_seed(block_size)
    for kv_heads, is_causal in ((1, True), (2, False)):
        num_blocks = -(-2900 // block_size)
        tensors = [
            torch.randn(1, rows, heads, width, generator=generator, dtype=torch.float64)
            for rows, heads in ((150, 2), (2900, kv_heads), (2900, kv_heads))
        ]
        blocks = torch.randint(-1, num_blocks, (1, kv_heads, 3, 4), generator=generator)
        gates = torch.randn(blocks.shape, generator=generator, dtype=torch.float64)
        options = {"block_size": block_size, "query_block_size": 60, "is_causal": is_causal, "query_offset": 2700}
        case = Case([*tensors, gates], blocks, options)
        rounded = dataclasses.replace(case, tensors=[x.float().double() for x in tensors] + [gates])
        expected = rounded.outcome(attend_blocks, dropout_p=0.2)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found = case.outcome(attend_blocks, torch.float32, impl="native", dropout_p=0.2)
            assert_close(found, expected, BUDGETS[torch.float32])
            again = case.outcome(attend_blocks, torch.float32, impl="native", dropout_p=0.2)
            assert all(map(torch.equal, found, again))


# PyTorch scripts functions of its own when first asked for a tangent.
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_every_other_derivative_equals_the_dense_softmaxs(figure: Any) -> None:
    """Tangents, second derivatives and a third one, of query, key, value and log-gates together."""
    worst: dict[str, float] = {}

    @examples(8)
    @given(cases())
    def check(case: Case) -> None:
        tensors, of_all = tuple(case.tensors), tuple(range(len(case.tensors)))
        torch.manual_seed(len(of_all))
        first, second = (tuple(torch.randn_like(x) for x in tensors) for _ in range(2))

        def derivatives(compute: Any) -> dict[str, tuple[Tensor, ...]]:
            def outputs(*changed: Tensor) -> tuple[Tensor, Tensor]:
                out, lse = dataclasses.replace(case, tensors=list(changed)).run(compute)
                return out, torch.where(lse == float("-inf"), 0.0, lse)

            def loss(*changed: Tensor) -> Tensor:
                out, lse = outputs(*changed)
                return out.sin().sum() + lse.cos().sum()

            gradient = torch.func.grad(loss, of_all)
            return {
                "jvp": torch.func.jvp(outputs, tensors, first)[1],
                "vmap": torch.func.vmap(outputs)(*(torch.stack([x, y]) for x, y in zip(tensors, first, strict=True))),
                "forward over reverse": torch.func.jvp(gradient, tensors, first)[1],
                "reverse over reverse": torch.func.vjp(gradient, *tensors)[1](first),
                "forward over forward": torch.func.jvp(
                    lambda *x: torch.func.jvp(outputs, x, first)[1], tensors, second
                )[1],
                "reverse over forward over reverse": torch.func.vjp(
                    lambda *x: torch.func.jvp(gradient, x, first)[1], *tensors
                )[1](second),
            }

        ours, theirs = derivatives(attend_blocks), derivatives(dense)
        for name, wanted in theirs.items():
            for got, want in zip(ours[name], wanted, strict=True):
                error = float((got - want).abs().max() / want.abs().max().clamp(min=1.0))
                assert error <= 1e-10, (name, error)
                worst[name] = max(worst.get(name, 0.0), error)

    check()
    figure("listed blocks, derivatives in float64, largest differences", {k: f"{v:.1e}" for k, v in worst.items()})


@examples(20)
@given(cases())
def test_chunks_add_up_to_the_whole(case: Case) -> None:
    from dilated_attention_pytorch.ops import lists

    case.tensors = [x.requires_grad_() for x in case.tensors]
    results, before = [], lists._ELEMENTS_AT_ONCE
    for limit in (before, 1):
        lists._ELEMENTS_AT_ONCE = limit
        try:
            out = case.run(attend_blocks).out
            results.append((out, *torch.autograd.grad(out.sin().sum(), case.tensors)))
        finally:
            lists._ELEMENTS_AT_ONCE = before
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def drawn(rows: int = 37, *, heads: int = 4, kv_heads: int = 2, width: int = 5, size: int = 8, listed: int = 3) -> Case:
    generator = torch.Generator().manual_seed(3)
    num_blocks = -(-rows // size)
    tensors = [
        torch.randn(2, rows, number, width, generator=generator, dtype=torch.float64)
        for number in (heads, kv_heads, kv_heads)
    ]
    blocks = torch.randint(0, num_blocks, (2, kv_heads, num_blocks, listed), generator=generator)
    gates = torch.randn(blocks.shape, generator=generator, dtype=torch.float64)
    return Case([*tensors, gates], blocks, {"block_size": size})


def test_gradcheck() -> None:
    case = drawn(11, size=4, width=2)
    case.options["is_causal"] = True
    case.blocks[:, :, :, 0] = torch.arange(3)  # every row sees a key
    tensors = [x.requires_grad_() for x in case.tensors]

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(attend_blocks(*tensors[:3], case.blocks, tensors[3], **case.options))

    assert torch.autograd.gradcheck(call, tensors)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_stays_within_the_budget(dtype: torch.dtype, impl: str) -> None:
    case = drawn(100, width=16, size=16)
    case.tensors = [x.to(dtype).double().requires_grad_() for x in case.tensors[:3]] + case.tensors[3:]
    case.options["query_block_size"] = 16
    exact, got = case.run(dense), case.run(attend_blocks, dtype, impl=impl)
    grads = [torch.autograd.grad(out.double().sin().sum(), case.tensors[:3]) for out in (exact.out, got.out)]
    for want, have in zip((exact.out, *grads[0]), (got.out, *grads[1]), strict=True):
        # float32 sums, then one rounding of every result, and of the incoming gradient.
        assert (have.double() - want).norm() <= 3 * torch.finfo(dtype).eps * want.norm()


def test_merges_with_a_static_pattern_into_one_softmax() -> None:
    case = drawn()
    case.tensors = [x.requires_grad_() for x in case.tensors]
    q, k, v, gates = case.tensors
    window = attend_with_lse(q, k, v, local_window(5), is_causal=True)
    merged = merge([case.run(lambda *a, **o: attend_blocks(*a, **o, is_causal=True)), window])
    p, t = torch.arange(37)[:, None], torch.arange(37)
    lists = case.blocks[:, :, torch.arange(37) // 8]
    listed = (lists.unsqueeze(-1) == t // 8) & (t <= p)[:, None]
    weights = torch.where(listed, gates[:, :, torch.arange(37) // 8].exp().unsqueeze(-1), 0.0).sum(3)
    weights = (weights + ((t <= p) & (t >= p - 5))).repeat_interleave(2, 1)
    s = torch.einsum("bnhd,bmhd->bhnm", q, k.repeat_interleave(2, 2)) * 5**-0.5
    terms = weights * s.exp()
    want = torch.einsum("bhnm,bmhd->bnhd", terms / terms.sum(-1, keepdim=True), v.repeat_interleave(2, 2))
    torch.testing.assert_close(merged.out, want, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(out.sin().sum(), case.tensors) for out in (merged.out, want)]
    for got, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


def test_dropout_keeps_the_mean_and_its_gradient_is_that_of_what_was_kept() -> None:
    case = drawn()
    q, k, v, gates = (x.requires_grad_() for x in case.tensors)
    whole = attend_blocks(q, k, v, case.blocks, gates, block_size=8)
    draws = []
    for seed in range(400):
        torch.manual_seed(seed)
        draws.append(attend_blocks(q, k, v, case.blocks, gates, block_size=8, dropout_p=0.3))
    mean = torch.stack([draw.out for draw in draws]).mean(0)
    assert (mean - whole.out).abs().max() < 0.25
    torch.testing.assert_close(draws[0].lse, whole.lse)

    small = drawn(9, size=4, width=1, listed=2)

    def call(*tensors: Tensor) -> Tensor:
        torch.manual_seed(5)
        return attend_blocks(*tensors[:3], small.blocks, tensors[3], block_size=4, dropout_p=0.3).out

    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in small.tensors])


@needs_kernels
def test_operands_in_storage_of_nan_give_the_same_bits() -> None:
    @examples(15)
    @given(cases(sizes=(5, 16, 33)))
    def check(case: Case) -> None:
        for dtype in (torch.float32, torch.bfloat16):

            def apart(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> AttentionOutput:
                tensors = []
                for x in (q, k, v):
                    batch, rows, heads, width = x.shape
                    room = torch.full((batch, 2 * rows + 3, heads + 2, width + 5), math.nan, dtype=x.dtype)
                    place = (slice(None), slice(1, 1 + 2 * rows, 2), slice(1, -1), slice(2, 2 + width))
                    room[place] = x
                    tensors.append(room[place])
                return attend_blocks(*tensors, *rest, **options)

            found, expected = (case.outcome(compute, dtype, impl="native") for compute in (apart, attend_blocks))
            assert all(map(torch.equal, found, expected))

    check()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("is_gated", [False, True])
def test_pairs_are_dropped_by_their_place_alone(is_gated: bool, impl: str) -> None:
    """Every value is a column of its own, so that an output is 0 where its pair is dropped."""
    rows, seed = 200, 11
    query, key = torch.zeros(2, rows, 4, rows), torch.zeros(2, rows, 2, rows)
    value = torch.eye(rows)[None, :, None].expand(2, rows, 2, rows)
    blocks = torch.tensor([3, 0, -1, 6, 3, 1]).expand(2, 2, 13, 6)
    gates = torch.randn(2, 2, 13, 6) if is_gated else None
    results = []
    for name, dtype in ((impl, torch.float32), ("aten", torch.float64)):
        torch.manual_seed(seed)
        results.append(
            attend_blocks(
                *(x.to(dtype) for x in (query, key, value)),
                blocks,
                gates,
                block_size=30,
                query_block_size=16,
                query_offset=5,
                is_causal=True,
                dropout_p=0.37,
                impl=name,
            ).out
        )
    assert torch.equal(results[0] > 0, results[1] > 0)
    assert 0.2 < float((results[0] > 0).float().mean()) < 0.4
    torch.testing.assert_close(results[0].double(), results[1], rtol=1e-5, atol=0)


@needs_kernels
@pytest.mark.parametrize("gate", [-50.0, -1e4, -1e12, -1e33, 50.0, 1e4])
def test_gates_of_any_size_are_as_under_products(gate: float) -> None:
    """Of a row that sees such a block alone, and beside others."""
    case = drawn(100, width=16, size=16)
    assert case.tensors[3].shape[3] == 3
    case.tensors[3][:, :, ::2] = gate
    case.tensors[3][:, :, 1::2, 1] = gate
    found, expected = (case.outcome(attend_blocks, torch.float32, impl=impl) for impl in ("native", "aten"))
    assert_close(found, expected, BUDGETS[torch.float32] * max(1.0, abs(gate) / 16))


@needs_kernels
def test_the_gradient_of_large_scores_is_that_of_products() -> None:
    for size, gate in ((1e4, 0.0), (1.0, 1e4)):
        case = drawn(100, width=16, size=16)
        case.tensors[0] *= size
        case.tensors[3] += gate
        found, expected = (case.outcome(attend_blocks, torch.float32, impl=impl) for impl in ("native", "aten"))
        assert_close(found[:2], expected[:2], 1e-3 if gate else 1e-6)
        assert all(map(torch.equal, found[2:], expected[2:]))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_scale_of_zero_counts_the_keys(impl: str) -> None:
    case = drawn(100, width=16, size=16)
    found = case.outcome(attend_blocks, torch.float32, impl=impl, scale=0.0, is_causal=True)
    assert_close(found, case.outcome(attend_blocks, scale=0.0, is_causal=True), BUDGETS[torch.float32])


@needs_kernels
def test_auto_is_native_where_that_computes_and_key_blocks_are_large_enough() -> None:
    for size, dtype, chosen in (
        (16, torch.float32, "native"),
        (16, torch.float64, "aten"),
        (15, torch.float32, "aten"),
    ):
        case = drawn(100, width=16, size=size)
        auto, named = (case.outcome(attend_blocks, dtype, impl=impl) for impl in ("auto", chosen))
        assert all(map(torch.equal, auto, named))


@needs_kernels
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_derivatives_beside_the_gradient_of_native_outputs() -> None:
    case = drawn(width=16)
    first = tuple(torch.randn_like(x) for x in case.tensors)

    def derivatives(impl: str, dtype: torch.dtype) -> list[Tensor]:
        tensors, tangents = (tuple(x.to(dtype) for x in some) for some in (case.tensors, first))

        def outputs(*changed: Tensor) -> tuple[Tensor, Tensor]:
            return tuple(attend_blocks(*changed[:3], case.blocks, changed[3], block_size=8, impl=impl))

        gradient = torch.func.grad(lambda *x: sum(y.sin().sum() for y in outputs(*x)), (0, 1, 2, 3))
        found = [
            *torch.func.jvp(outputs, tensors, tangents)[1],
            *torch.func.jvp(gradient, tensors, tangents)[1],
            *torch.func.vjp(gradient, *tensors)[1](tangents),
            *torch.func.vmap(outputs)(*(torch.stack([x, y]) for x, y in zip(tensors, tangents, strict=True))),
        ]
        return [x.double() for x in found]

    assert_close(derivatives("native", torch.float32), derivatives("aten", torch.float64), 1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_nan_at_a_padded_key_reaches_nothing(impl: str) -> None:
    case = drawn()
    dtype = EXACTEST[impl]
    padding = torch.zeros(2, 37, dtype=torch.bool)
    padding[:, 20:] = True
    clean = case.run(attend_blocks, dtype, key_padding_mask=padding, impl=impl)
    for x in case.tensors[1:3]:
        x[:, 20:] = float("nan")
    tensors = [x.requires_grad_() for x in case.tensors]
    out, lse = case.run(attend_blocks, dtype, key_padding_mask=padding, impl=impl)
    assert torch.equal(out, clean.out)
    assert torch.equal(lse, clean.lse)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sin().sum(), tensors))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("rows", [0, 37])
def test_an_empty_batch_or_sequence_is_no_error(rows: int, impl: str) -> None:
    q = torch.randn(2 if rows == 0 else 0, rows, 4, 5, requires_grad=True)
    blocks = torch.zeros(q.shape[0], 4, -(-rows // 8), 2, dtype=torch.int64)
    gates = torch.zeros(blocks.shape, requires_grad=True)
    out = attend_blocks(q, q, q, blocks, gates, block_size=8, impl=impl).out
    assert out.shape == q.shape
    assert [x.shape for x in torch.autograd.grad(out.sum(), (q, gates))] == [q.shape, gates.shape]


@pytest.mark.parametrize("impl", IMPLS)
def test_lists_of_nothing_give_nothing(impl: str) -> None:
    case = drawn()
    case.blocks.fill_(-1)
    out, lse, *grads = case.outcome(attend_blocks, torch.float32, impl=impl)
    assert bool((lse == -math.inf).all())
    assert not any(bool(x.any()) for x in (out, *grads))


@pytest.mark.parametrize("impl", IMPLS)
def test_one_graph_under_the_compiler_and_opcheck(impl: str) -> None:
    torch._dynamo.reset()
    case = drawn()
    tensors = [x.to(EXACTEST[impl]).requires_grad_() for x in case.tensors]

    def call(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        out, lse = attend_blocks(q, k, v, case.blocks, gates, block_size=8, is_causal=True, impl=impl)
        return out.sin().sum() + lse.clamp(min=-9).sum()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for got, want in zip(
        torch.autograd.grad(compiled(*tensors), tensors), torch.autograd.grad(call(*tensors), tensors), strict=True
    ):
        torch.testing.assert_close(got, want)
    q, k, v, gates = tensors
    arguments = Call(
        *tensors,
        blocks=case.blocks,
        block_sizes=(8, 8),
        is_causal=True,
        scale=0.5,
        impl=IMPLEMENTATIONS[impl],
    ).for_operator()
    torch.library.opcheck(operators.attend, arguments)
    q, k, v, gates = tensors
    lse = torch.randn(q.shape[:3], dtype=q.dtype)
    with torch.no_grad():
        grads = (torch.randn_like(q), torch.randn_like(lse), torch.randn_like(q), lse)
        torch.library.opcheck(operators.attend_backward, (*grads, *arguments))
        for axis, values in (("queries", v), ("keys", q), ("blocks", None)):
            of_sum = (axis, values, [q, k, None, None, None, gates], lse)
            torch.library.opcheck(operators.weighted_sum, (*of_sum, *arguments))


def test_operations_are_counted() -> None:
    case = drawn(32)
    case.tensors = [x.requires_grad_() for x in case.tensors]
    with FlopCounterMode(display=False) as counter:
        case.run(attend_blocks).out.sum().backward()
    pairs = 2 * 4 * 32 * 3 * 8
    assert counter.get_total_flops() == (4 + 10) * 5 * pairs


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
    ({"block_size": 2.0}, TypeError, "block_size must be an integer, got 2.0"),
    ({"query_block_size": True}, TypeError, "query_block_size must be an integer, got True"),
    ({"blocks": torch.zeros(2, 2, 5, 3)}, TypeError, "blocks must be an int64 tensor .* got torch.float32"),
    ({"blocks": torch.zeros(2, 4, 5, 3, dtype=torch.int64)}, ValueError, r"blocks must have the shape .*2, 2, 5"),
    ({"blocks": torch.full((2, 2, 5, 3), 5)}, ValueError, "numbers of the 5 key blocks .* got 5 to 5"),
    ({"log_gates": torch.zeros(2, 2, 5, 3, dtype=torch.int64)}, TypeError, "log_gates must be a floating tensor"),
    ({"log_gates": torch.zeros(2, 2, 5, 2)}, ValueError, "log_gates must have the shape and device of blocks"),
    ({"scale": float("inf")}, ValueError, "scale must be a finite number"),
    ({"dropout_p": 1.0}, ValueError, "dropout_p must be a probability"),
    ({"impl": "reference"}, ValueError, "must be one of 'auto', 'native', 'aten', got 'reference'"),
    ({"impl": "native"}, NotImplementedError, "impl='native' cannot compute this call: .* accumulate in float32"),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG)
def test_a_wrong_call_says_what_was_expected_and_what_came(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    case = drawn()
    call = {"blocks": case.blocks, "log_gates": case.tensors[3], **case.options, **change}
    with pytest.raises(error, match=message):
        attend_blocks(*case.tensors[:3], **call)
