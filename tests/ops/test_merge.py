"""The merge of partials."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import AttentionOutput, merge


def partials(number: int) -> list[AttentionOutput]:
    shape = (2, 11, 3)
    return [
        AttentionOutput(
            torch.randn(*shape, 5, dtype=torch.float64, requires_grad=True),
            torch.randn(shape, dtype=torch.float64, requires_grad=True),
        )
        for _ in range(number)
    ]


def test_merging_is_a_weighted_mean_whose_weights_have_gradients() -> None:
    parts = partials(3)
    flat = [x for part in parts for x in part]
    assert torch.autograd.gradcheck(lambda *x: tuple(merge(list(zip(x[::2], x[1::2], strict=True)))), flat)
    out, lse = merge(parts)
    weights = torch.stack([part.lse for part in parts]).exp()
    torch.testing.assert_close(lse, weights.sum(0).log())
    torch.testing.assert_close(
        out, (weights.unsqueeze(-1) * torch.stack([p.out for p in parts])).sum(0) / weights.sum(0).unsqueeze(-1)
    )


def test_order_and_nesting_do_not_matter() -> None:
    a, b, c = partials(3)
    for other in (merge([c, a, b]), merge([merge([a, b]), c]), merge([a, merge([b, c])])):
        torch.testing.assert_close(other.out, merge([a, b, c]).out)
        torch.testing.assert_close(other.lse, merge([a, b, c]).lse)


def test_partials_without_a_key_change_nothing_and_rows_without_any_key_are_zero() -> None:
    a, b = partials(2)
    dead = torch.full_like(b.lse, float("-inf"))
    torch.testing.assert_close(merge([a, (b.out, dead)]).out, a.out)
    empty = [
        AttentionOutput(a.out, dead.clone().requires_grad_()),
        AttentionOutput(b.out, dead.clone().requires_grad_()),
    ]
    out, lse = merge(empty)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
    grads = torch.autograd.grad(out.sum(), [x for part in empty for x in part], allow_unused=True)
    assert all(grad is None or (grad == 0).all() for grad in grads)


def test_low_precision_partials_merge_in_float32() -> None:
    parts = [AttentionOutput(part.out.bfloat16(), part.lse.float()) for part in partials(2)]
    out, lse = merge(parts)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    exact = merge([AttentionOutput(part.out.double(), part.lse.double()) for part in parts])
    torch.testing.assert_close(out.double(), exact.out, rtol=2**-8, atol=1e-6)


def test_wrong_partials_are_refused() -> None:
    a, b = partials(2)
    with pytest.raises(ValueError, match="at least one partial"):
        merge([])
    with pytest.raises(ValueError, match=r"partial 1 with out \(2, 10, 3, 5\)"):
        merge([a, (b.out[:, 1:], b.lse)])
