"""xPos without overflow: equal to the naive form where that is finite, right where it is not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from integrations.adopting import adopted, assert_equal, draw
from integrations.torchscale_layer import DilatedAttention, layer


def dense_xpos_attention(q: Tensor, k: Tensor, v: Tensor, base: float, *, is_causal: bool) -> Tensor:
    """Attention of all to all in float64 from the product of the factors, ``zeta^((p - t) / base)``, for every pair."""
    length, dim = q.shape[1], q.shape[3]
    pairs = torch.arange(dim // 2, dtype=torch.float64)
    zeta = ((2 * pairs.float() + 0.4 * dim) / (1.4 * dim)).double()
    p = torch.arange(length, dtype=torch.float64)
    frequency = 1.0 / (10000 ** (torch.arange(dim // 2) / (dim // 2)))
    phase = torch.polar(torch.ones(length, dim // 2).double(), (p.float()[:, None] * frequency).double())[:, None]
    turned_q, turned_k = (torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * phase for x in (q, k))
    distance = p[:, None] - p
    if is_causal:
        distance = distance.clamp(min=0)
    s = torch.zeros(q.shape[0], q.shape[2], length, length, dtype=torch.float64)
    for j in range(dim // 2):
        product = torch.einsum("bph,bth->bhpt", turned_q[..., j], turned_k[..., j].conj()).real
        s = s + product * zeta[j] ** (distance / base)
    s = s * dim**-0.5
    if is_causal:
        s = s.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
    return torch.einsum("bhpt,bthd->bphd", s.softmax(-1), v)


def bare(base: float, length: int, head_dim: int, num_heads: int) -> DilatedAttention:
    """A layer without projections, whose one segment holds everything."""
    theirs = layer([length], [1], embed_dim=num_heads * head_dim, num_heads=num_heads, xpos_scale_base=base)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        theirs.add_module(name, nn.Identity())
    return theirs


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [1, 7, 63, 257])
def test_xpos_equals_the_naive_form_where_that_does_not_overflow(length: int, is_causal: bool) -> None:
    theirs = bare(64, length, 6, 3)
    q, k, v = draw(3, 2, length, 18)
    expected, _ = theirs(q, k, v, is_causal=is_causal)
    assert_equal([adopted(theirs)(q, k, v, is_causal=is_causal)[0]], [expected])
    heads = [x.unflatten(-1, (3, 6)) for x in (q, k, v)]
    assert_equal([dense_xpos_attention(*heads, 64, is_causal=is_causal).flatten(-2)], [expected])


@pytest.mark.parametrize(
    ("dtype", "base", "ulps"),
    [(torch.float64, 0.5, 1e5), (torch.float32, 1, 64), (torch.bfloat16, 1, 8), (torch.float16, 2, 8)],
)
def test_causal_xpos_is_right_at_lengths_where_the_naive_form_overflows(
    dtype: torch.dtype, base: float, ulps: float
) -> None:
    length = 613
    theirs = bare(base, length, 6, 3)
    ours = adopted(theirs)
    q, k, v = (x.to(dtype) for x in draw(3, 1, length, 18))
    naive, _ = theirs.to(dtype)(q, k, v, is_causal=True)
    assert not naive.isfinite().all()
    out, _ = ours(q, k, v, is_causal=True)
    heads = [x.double().unflatten(-1, (3, 6)) for x in (q, k, v)]
    expected = dense_xpos_attention(*heads, base, is_causal=True).flatten(-2)
    error = (out.double() - expected).abs().max() / expected.abs().max()
    assert error < ulps * torch.finfo(dtype).eps


def test_gradients_of_causal_xpos_are_exact_over_several_centres() -> None:
    ours = adopted(bare(0.25, 300, 4, 2))
    inputs = [x.requires_grad_() for x in draw(3, 1, 300, 8)]
    grad_out = draw(1, 300, 8, seed=1)
    gradients = torch.autograd.grad(ours(*inputs, is_causal=True)[0], inputs, grad_out)
    heads = [x.unflatten(-1, (2, 4)) for x in inputs]
    out = dense_xpos_attention(*heads, 0.25, is_causal=True).flatten(-2)
    assert_equal(list(gradients), list(torch.autograd.grad(out, inputs, grad_out)))


def test_xpos_without_causality_in_float16_is_computed_in_float32_where_float16_is_too_narrow() -> None:
    ours = adopted(bare(64, 613, 6, 3))
    q, k, v = (x.half() for x in draw(3, 1, 613, 18))
    out, _ = ours(q, k, v)
    assert out.dtype == torch.float16
    wide, _ = ours(q.float(), k.float(), v.float())
    torch.testing.assert_close(out, wide.half(), rtol=0, atol=0)


def test_xpos_without_causality_names_the_length_that_it_can_hold() -> None:
    ours = adopted(bare(2, 613, 6, 3))
    x = draw(1, 613, 18).float()
    with pytest.raises(ValueError, match=r"sequences of at most 110 rows, got 613; pass is_causal=True"):
        ours(x, x, x)
    assert ours(x[:, :110], x[:, :110], x[:, :110])[0].isfinite().all()
