"""Partials by matrix products: few problems at a time, in kept memory, with and without a maximum of the scores."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention_pytorch import Pattern, attend, local_window, random_blocks, strided_blocks
from dilated_attention_pytorch.kernels import blockwise
from dilated_attention_pytorch.kernels.aten import MASKED
from dilated_attention_pytorch.kernels.blockwise import Bias, Scratch
from drawn import examples

SHAPE = (3, 2, 45, 70, 8)
"""Problems, problems, queries, keys, head_dim."""


def operands(factor: float = 1.0) -> list[Tensor]:
    """Query, key and value; the problems along the second axis share their keys."""
    first, second, queries, keys, width = SHAPE
    query = torch.randn(first, queries, second, width, dtype=torch.float64).transpose(1, 2) * factor
    key, value = torch.randn(2, first, 1, keys, width, dtype=torch.float64).expand(2, first, second, keys, width)
    return [query, key, value]


def hidden_keys(num_edges: int) -> tuple[Tensor, list[Bias]]:
    """Pairs hidden at up to two runs of keys, and the biases of these runs, of which query 7 sees nothing."""
    first, second, queries, keys, _ = SHAPE
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    biases = []
    for start, stop in ((1, 20), (33, 70))[:num_edges]:
        run = torch.rand(queries, stop - start) < 0.5
        run[7] = True
        hidden[:, start:stop] = run
        biases.append(Bias((run.double() * MASKED).expand(first, second, -1, -1), start))
    return hidden, biases


def expected(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    scores = query @ key.mT * 0.3
    scores = scores.masked_fill(hidden, float("-inf"))
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ value, lse


@pytest.fixture(params=[64, 1 << 9, 1 << 19], ids=["a row", "some rows", "all"])
def few_scores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "_SCORES_OF_A_CORE", request.param)


@pytest.mark.usefixtures("few_scores")
@pytest.mark.parametrize("num_edges", [0, 1, 2])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("bounded", ["none", "all", "some"])
def test_forward_is_the_softmax(num_edges: int, is_causal: bool, bounded: str) -> None:
    query, key, value = operands()
    is_bounded: bool | Tensor = bounded == "all"
    if bounded == "some":
        is_bounded = torch.rand(SHAPE[:3]) < 0.5
        query = torch.where(is_bounded.unsqueeze(-1), query, query * 100)  # powers of these would overflow
    hidden, biases = hidden_keys(num_edges)
    want = expected(query, key, value, hidden, is_causal=is_causal)
    keywords = {"is_causal": is_causal, "scale": 0.3, "is_bounded": is_bounded}
    scratch = Scratch()
    for _ in range(2):  # what lies in the scratch of an earlier call must not matter
        for results in (None, tuple(torch.full_like(x, float("nan")) for x in want)):
            got = blockwise.blockwise_forward(query, key, value, biases, scratch=scratch, results=results, **keywords)
            assert results is None or got[0].data_ptr() == results[0].data_ptr()
            for one, other in zip(got, want, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-13)


@pytest.mark.parametrize("is_bounded", [False, True])
def test_a_row_that_sees_no_key_weighs_nothing(is_bounded: bool) -> None:
    query, key, value = operands()
    hidden = torch.zeros(SHAPE[2], SHAPE[3], dtype=torch.bool)
    hidden[11:13] = True
    bias = (hidden.double() * MASKED).expand(*SHAPE[:2], -1, -1)
    out, lse = blockwise.blockwise_forward(
        query, key, value, [Bias(bias)], is_causal=False, scale=0.3, is_bounded=is_bounded
    )
    assert out.isfinite().all()
    assert (lse[:, :, 11:13] < MASKED / 2).all()
    assert lse.isfinite().all()
    want, _ = expected(query, key, value, hidden, is_causal=False)
    seen = ~hidden[:, 0]
    torch.testing.assert_close(out[:, :, seen], want[:, :, seen], rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_rounded_to_what_they_are_written_to(dtype: torch.dtype) -> None:
    query, key, value = (x.float() for x in operands())
    want = blockwise.blockwise_forward(query, key, value, (), is_causal=False, scale=0.3)
    results = (torch.empty(want[0].shape, dtype=dtype), torch.empty(want[1].shape))
    for is_bounded in (False, True):
        got = blockwise.blockwise_forward(
            query, key, value, (), is_causal=False, scale=0.3, results=results, is_bounded=is_bounded
        )
        torch.testing.assert_close(got[0], want[0].to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        torch.testing.assert_close(got[1], want[1], rtol=0, atol=1e-6)


@pytest.mark.usefixtures("few_scores")
@pytest.mark.parametrize("num_edges", [0, 2])
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_are_those_of_the_softmax_alone_or_added(num_edges: int, is_causal: bool) -> None:
    leaves = [x.detach().clone().requires_grad_() for x in operands()]
    hidden, biases = hidden_keys(num_edges)
    out, lse = expected(*leaves, hidden, is_causal=is_causal)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    want = torch.autograd.grad([out, lse], leaves, [grad_out, grad_lse])
    out, lse = out.detach(), lse.detach()
    delta = (grad_out * out).sum(-1) - grad_lse
    query, key, value = (x.detach() for x in leaves)
    before = [torch.randn_like(x) for x in want]
    scratch = Scratch()
    for totals in (None, [x.clone() for x in before], None):
        got = blockwise.blockwise_backward(
            grad_out, query, key, value, lse, delta, biases, None, is_causal=is_causal, scale=0.3, scratch=scratch,
            totals=totals,
        )  # fmt: skip
        for index, (one, other) in enumerate(zip(got, want, strict=True)):
            was = 0.0 if totals is None else before[index]
            torch.testing.assert_close(one - was, other, rtol=0, atol=1e-12)


@examples(60)
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 70),
    st.integers(1, 300),
    st.sampled_from([1, 50, 700, 1 << 19]),
)
def test_every_row_of_every_problem_has_one_place(first: int, second: int, rows: int, keys: int, scores: int) -> None:
    seen = torch.zeros(first, second, rows, dtype=torch.int64)
    query = torch.empty(first, second, rows, 1)
    for place in blockwise._places(query, keys, most_scores=scores):
        place.of_queries(seen).add_(1)
        assert place.of_queries(query).dim() == 3
    assert bool((seen == 1).all())


def patterns() -> Sequence[Pattern]:
    return (
        local_window(300, 200),
        random_blocks(0.2, block_size=64),
        strided_blocks(5, block_size=40) + local_window(33),
    )


@pytest.mark.parametrize("pattern", patterns(), ids=["window", "random", "sum"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("factor", "bounded"), [(1e-3, True), (1.0, True), (60.0, False), ("some", None)])
def test_scores_of_any_size_give_what_the_reference_gives(
    pattern: Pattern, is_causal: bool, factor: float | str, bounded: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small scores need no maximum. Large ones would overflow without it, also where most probabilities underflow."""
    seen: list[bool | Tensor] = []
    forward = blockwise.blockwise_forward

    def spied(*operands: Tensor, is_bounded: bool | Tensor, **keywords: object) -> tuple[Tensor, Tensor]:
        seen.append(is_bounded)
        return forward(*operands, is_bounded=is_bounded, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(blockwise, "blockwise_forward", spied)
    for dtype in (torch.float64, torch.float32):
        q, k, v, grad = torch.randn(4, 1, 1100, 2, 16, dtype=dtype)
        of_rows = 1.0 + 99.0 * (torch.rand(1, 1100, 2, 1, dtype=dtype) < 0.3) if factor == "some" else factor
        leaves = [x.detach().requires_grad_() for x in (q * of_rows, k, v)]
        seen.clear()
        found = []
        for impl in ("aten", "reference"):
            of_impl = [x.detach().double().requires_grad_() for x in leaves] if impl == "reference" else leaves
            out = attend(*of_impl, pattern, is_causal=is_causal, impl=impl)
            grads = torch.autograd.grad(out, of_impl, grad.to(out.dtype))
            found.append([out.detach(), *grads])
        assert seen
        for is_bounded in seen:
            if bounded is None or not bounded:  # now and then a query is short
                assert isinstance(is_bounded, Tensor)
                assert bounded is not None or bool(is_bounded.any())
            else:
                assert is_bounded is True
        for got, want in zip(*found, strict=True):
            tolerance = (1e-11 if dtype == torch.float64 else 3e-5) * float(want.abs().max())
            assert float((got.double() - want).abs().max()) <= tolerance


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("offset", [-5, 0, 30])
def test_the_bound_of_scores_holds_for_every_key_that_a_query_may_see(is_causal: bool, offset: int) -> None:
    query, key = torch.randn(2, 20, 6, 8), torch.randn(2, 50, 3, 8) * torch.linspace(0.1, 4, 50).view(-1, 1, 1)
    bounds = blockwise.score_bounds(query, key, -0.7, is_causal=is_causal, offset=offset)
    scores = torch.einsum("bnhd,bmhd->bhnm", query, key.repeat_interleave(2, 2)).abs() * 0.7
    if is_causal:
        scores.masked_fill_(torch.arange(50) > torch.arange(20).view(-1, 1) + offset, 0.0)
    largest = scores.amax(-1).transpose(1, 2)
    assert bool((largest <= bounds * 1.0001).all())
    assert bool((bounds <= 60 * largest.clamp(min=0.1)).all())
    key[0, 30] = float("nan")
    bounds = blockwise.score_bounds(query, key, 0.7, is_causal=is_causal, offset=offset)
    later = torch.arange(20) + offset >= 30 if is_causal else torch.ones(20, dtype=torch.bool)
    assert torch.equal(bounds[0].isnan().all(-1), later)
    assert not bool(bounds[1].isnan().any())


def test_a_query_knows_nothing_of_the_bounds_of_others() -> None:
    """Bit for bit: large keys after it, large queries beside it, another sequence of the batch."""
    q, k, v = torch.randn(3, 2, 700, 2, 16)
    for pattern in patterns():
        out = attend(q, k, v, pattern, is_causal=True)
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[0, 400:] *= 50
        after = attend(*changed, pattern, is_causal=True)
        assert torch.equal(after[0, :400], out[0, :400])
        assert torch.equal(after[1], out[1])
        assert not torch.equal(after[0, 400:], out[0, 400:])
