"""Partials by matrix products: a few problems and rows at a time, whatever is masked, dropped or large."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention_pytorch import Pattern, attend, local_window, random_blocks, strided_blocks
from dilated_attention_pytorch.kernels import products
from support.drawn import examples

SHAPE = (3, 2, 45, 70, 8)
"""Problems, problems, queries, keys, head_dim."""


def operands(factor: float = 1.0) -> list[Tensor]:
    """Query, key and value; the problems along the second axis share their keys."""
    first, second, queries, keys, width = SHAPE
    query = torch.randn(first, queries, second, width, dtype=torch.float64).transpose(1, 2) * factor
    key, value = torch.randn(2, first, 1, keys, width, dtype=torch.float64).expand(2, first, second, keys, width)
    return [query, key, value]


def hidden_pairs(*, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Pairs that are hidden, all of query 7 among them, and the bias that hides them."""
    first, second, queries, keys, _ = SHAPE
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if not has_bias:
        return hidden, None
    hidden = torch.rand(queries, keys) < 0.4
    hidden[:, 0] = False
    bias = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill_(hidden, float("-inf"))
    return hidden, bias.expand(first, second, -1, -1)


def expected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor,
    *,
    is_causal: bool,
    kept: Tensor | None = None,
    of_keys: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    scores = query @ key.mT * 0.3
    scores = scores if of_keys is None else scores + of_keys.unsqueeze(2)
    scores = scores.masked_fill(hidden, float("-inf"))
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    lse = scores.logsumexp(-1)
    probabilities = (scores - lse.unsqueeze(-1)).exp()
    return (probabilities if kept is None else probabilities * kept) @ value, lse


@pytest.fixture(params=[64, 1 << 9, 1 << 19], ids=["a row", "some rows", "all"])
def few_scores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_SCORES_OF_A_CORE", request.param)


def keep(block: products.ScoreBlock) -> Tensor:
    """Dropout factors that depend on the place of a pair alone."""
    pairs = torch.arange(SHAPE[2]).view(-1, 1) * 13 + torch.arange(SHAPE[3]) * 7
    factors = (pairs % 5 > 0).double() / 0.8
    return block.of_queries(factors.expand(*SHAPE[:2], -1, -1))


def all_kept() -> Tensor:
    return keep(products.ScoreBlock(0, 0, slice(0, 1), None))[0]


@pytest.mark.usefixtures("few_scores")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_dropped", [False, True])
@pytest.mark.parametrize("factor", [1.0, 300.0])
def test_forward_is_the_softmax(has_bias: bool, is_causal: bool, is_dropped: bool, factor: float) -> None:
    query, key, value = operands(factor)
    hidden, bias = hidden_pairs(has_bias=has_bias)
    want = expected(query, key, value, hidden, is_causal=is_causal, kept=all_kept() if is_dropped else None)
    for is_pair in (False, True):
        out, lse, rest = products.forward(
            query, key, value, bias, keep if is_dropped else None, is_causal=is_causal, scale=0.3, is_pair=is_pair
        )
        assert (rest is not None) == is_pair
        lse = lse if rest is None else (lse + rest) / products.LOG2_E
        for got, one in ((out, want[0]), (lse, want[1])):
            torch.testing.assert_close(got, one, rtol=1e-14, atol=1e-12)


def test_a_row_that_sees_no_key_is_zero_with_a_log_sum_exp_of_minus_infinity() -> None:
    query, key, value = operands()
    hidden = torch.zeros(SHAPE[2], SHAPE[3], dtype=torch.bool)
    hidden[11:13] = True
    bias = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, float("-inf")).expand(*SHAPE[:2], -1, -1)
    out, lse, _ = products.forward(query, key, value, bias, is_causal=False, scale=0.3)
    assert not out[:, :, 11:13].any()
    assert torch.equal(lse == float("-inf"), hidden.all(-1).expand(lse.shape))
    want, _ = expected(query, key, value, hidden, is_causal=False)
    seen = ~hidden[:, 0]
    torch.testing.assert_close(out[:, :, seen], want[:, :, seen], rtol=0, atol=1e-13)


@pytest.mark.usefixtures("few_scores")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_dropped", [False, True])
@pytest.mark.parametrize("is_pair", [False, True])
def test_gradients_are_those_of_the_softmax(has_bias: bool, is_causal: bool, is_dropped: bool, is_pair: bool) -> None:
    leaves = [x.detach().clone().requires_grad_() for x in operands()]
    of_keys = torch.zeros(*SHAPE[:2], SHAPE[3], dtype=torch.float64, requires_grad=True)
    hidden, bias = hidden_pairs(has_bias=has_bias)
    kept = all_kept() if is_dropped else None
    out, lse = expected(*leaves, hidden, is_causal=is_causal, kept=kept, of_keys=of_keys)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    want = torch.autograd.grad([out, lse], [*leaves, of_keys], [grad_out, grad_lse])
    query, key, value = (x.detach() for x in leaves)
    keywords = {"is_causal": is_causal, "scale": 0.3}
    keep_factors = keep if is_dropped else None
    rest: Tensor | None = None
    if is_pair:
        _, lse, rest = products.forward(query, key, value, bias, keep_factors, **keywords, is_pair=True)
    delta = (grad_out * out.detach()).sum(-1) - grad_lse
    got = products.backward(
        grad_out, query, key, value, lse.detach(), rest, delta, bias, keep_factors, **keywords, needs_bias=True
    )
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@examples(60)
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 70),
    st.integers(1, 300),
    st.sampled_from([1, 50, 700, 1 << 19]),
    st.booleans(),
)
def test_every_row_of_every_problem_has_one_place(
    first: int, second: int, rows: int, keys: int, scores: int, is_dropped: bool
) -> None:
    seen = torch.zeros(first, second, rows, dtype=torch.int64)
    query = torch.empty(first, second, rows, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "_MOST_SCORES" if is_dropped else "_SCORES_OF_A_CORE", scores)
        blocks = list(products._score_blocks(query, keys, is_dropped=is_dropped))
    for block in blocks:
        block.of_queries(seen).add_(1)
        assert block.of_queries(query).dim() == 3
    assert bool((seen == 1).all())


def patterns() -> Sequence[Pattern]:
    return (
        local_window(300, 200),
        random_blocks(0.2, block_size=64),
        strided_blocks(5, block_size=40) + local_window(33),
    )


@pytest.mark.parametrize("pattern", patterns(), ids=["window", "random", "sum"])
@pytest.mark.parametrize(
    ("factor", "is_causal"), [(1e-3, True), (1.0, False), (60.0, True), ("some", False), ("some", True)]
)
def test_scores_of_any_size_give_what_the_reference_gives(
    pattern: Pattern, is_causal: bool, factor: float | str
) -> None:
    """Large scores would overflow without a maximum, also where most probabilities underflow."""
    for dtype in (torch.float64, torch.float32):
        q, k, v, grad = torch.randn(4, 1, 1100, 2, 16, dtype=dtype)
        of_rows = 1.0 + 99.0 * (torch.rand(1, 1100, 2, 1, dtype=dtype) < 0.3) if factor == "some" else factor
        leaves = [x.detach().requires_grad_() for x in (q * of_rows, k, v)]
        found = []
        for impl in ("aten", "reference"):
            of_impl = [x.detach().double().requires_grad_() for x in leaves] if impl == "reference" else leaves
            out = attend(*of_impl, pattern, is_causal=is_causal, impl=impl)
            grads = torch.autograd.grad(out, of_impl, grad.to(out.dtype))
            found.append([out.detach(), *grads])
        for got, want in zip(*found, strict=True):
            # A score has an error of its own rounding, which is the relative error of its probability.
            rounding = (
                torch.finfo(torch.float32).eps * float((q * of_rows).norm(dim=-1).max() * k.norm(dim=-1).max()) / 4
            )
            tolerance = (1e-11 if dtype == torch.float64 else max(3e-5, rounding)) * float(want.abs().max())
            assert float((got.double() - want).abs().max()) <= tolerance


def test_a_query_knows_nothing_of_the_scores_of_others() -> None:
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
