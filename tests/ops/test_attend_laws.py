"""Laws that attention under a pattern obeys, whatever the numbers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention_pytorch import DilatedPattern, Pattern, attend, attend_with_lse, local_window, merge
from support.drawn import DrawnCall, calls, examples
from support.oracle import Groups, Rule, dense_attention, dense_counts

PATTERN = DilatedPattern([13, 31, 97], [1, 3, 5])
EXACT = {"rtol": 0.0, "atol": 1e-12}


def operands(rows: int = 101, heads: int = 6, kv_heads: int = 3, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(batch, rows, heads, 7, dtype=torch.float64)
    k, v = (torch.randn(batch, rows, kv_heads, 7, dtype=torch.float64) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_changing_the_future_changes_nothing_before_it(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in operands())
    before = attend_with_lse(q, k, v, PATTERN, is_causal=True)
    for now in (0, 1, 12, 13, 50, 96, 97):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, now + 1 :] = torch.randn_like(x[:, now + 1 :]) * 100
        after = attend_with_lse(*changed, PATTERN, is_causal=True)
        assert torch.equal(after.out[:, : now + 1], before.out[:, : now + 1])
        assert torch.equal(after.lse[:, : now + 1], before.lse[:, : now + 1])


def test_the_gradient_of_the_past_ignores_the_future() -> None:
    q, k, v = (x.requires_grad_() for x in operands())
    out = attend(q, k, v, PATTERN, is_causal=True)
    grads = torch.autograd.grad(out[:, :41].sum(), (q, k, v))
    assert all(grad[:, 41:].abs().max() == 0 for grad in grads)


@examples(60)
@given(calls(), st.integers(0, 200), st.integers(0, 200))
def test_slabs_of_queries_and_keys_merge_to_the_whole(call: DrawnCall, query_cut: int, key_cut: int) -> None:
    assume("cu_seqlens" not in call.options and call.summands[0].tail == "ragged")
    q, k, v, *_ = call.tensors(torch.float64)
    mask = call.options.get("key_padding_mask")
    query_start, key_start = call.options.get("query_offset", 0), call.options.get("key_offset", 0)
    whole = attend_with_lse(
        q,
        k,
        v,
        call.pattern,
        is_causal=call.is_causal,
        query_offset=query_start,
        key_offset=key_start,
        key_padding_mask=mask,
    )
    query_cut, key_cut = query_cut % (call.num_queries + 1), key_cut % (call.num_keys + 1)
    rows = []
    for a, b in ((0, query_cut), (query_cut, call.num_queries)):
        partials = [
            attend_with_lse(
                q[:, a:b],
                k[:, c:d],
                v[:, c:d],
                call.pattern,
                is_causal=call.is_causal,
                query_offset=query_start + a,
                key_offset=key_start + c,
                key_padding_mask=None if mask is None else mask[:, c:d],
            )
            for c, d in ((0, key_cut), (key_cut, call.num_keys))
        ]
        rows.append(merge(partials))
    torch.testing.assert_close(torch.cat([row.out for row in rows], 1), whole.out, **EXACT)
    torch.testing.assert_close(torch.cat([row.lse for row in rows], 1), whole.lse, **EXACT)


def test_groups_whose_segments_interleave_are_counted_apart() -> None:
    """Groups of one rate whose segments begin at each other's distances: each keeps its own partials."""
    shifted = DilatedPattern([256], [2], segment_shift=128)
    for pattern, rows, offset in (
        (DilatedPattern([64, 256], [1, 2]) + shifted, 896, 0),
        (DilatedPattern([2, 4], [1, 2]) + DilatedPattern([4], [2], segment_shift=2), 10, 0),
        (DilatedPattern([9, 5, 4], [1, 1, 1], segment_shift=6), 7, 0),
        (DilatedPattern([8, 5, 4], [1, 1, 1]), 7, 6),
    ):
        q, k, v = (x.requires_grad_() for x in operands(rows, heads=2, kv_heads=2, batch=1))
        both = []
        for impl in ("aten", "reference"):
            out, lse = attend_with_lse(q, k, v, pattern, query_offset=offset, key_offset=offset, impl=impl)
            both.append([out, lse, *torch.autograd.grad(out.sin().sum(), (q, k, v))])
        for ours, reference in zip(*both, strict=True):
            torch.testing.assert_close(ours, reference, rtol=0, atol=1e-11)


def test_patterns_add() -> None:
    q, k, v = operands()
    other = DilatedPattern([40], [2], segment_shift=7)
    both = attend_with_lse(q, k, v, PATTERN + other, is_causal=True)
    apart = merge([attend_with_lse(q, k, v, pattern, is_causal=True) for pattern in (PATTERN, other)])
    torch.testing.assert_close(both.out, apart.out, **EXACT)
    torch.testing.assert_close(both.lse, apart.lse, **EXACT)


def test_packed_documents_equal_documents_alone() -> None:
    q, k, v = operands()
    bounds = [0, 1, 38, 38, 90, 101]
    packed = attend(q, k, v, PATTERN, is_causal=True, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    for a, b in itertools.pairwise(bounds):
        if a < b:
            alone = attend(q[:, a:b], k[:, a:b], v[:, a:b], PATTERN, is_causal=True)
            torch.testing.assert_close(packed[:, a:b], alone, **EXACT)


def test_a_padded_key_might_as_well_not_be_there_even_if_it_is_nan() -> None:
    q, k, v = operands()
    mask = torch.rand(2, 101) < 0.4
    clean = [x.requires_grad_() for x in (q, k.clone(), v.clone())]
    expected = attend(*clean, PATTERN, key_padding_mask=mask)
    for x in (k, v):
        x[mask] = float("nan")
    poisoned = [x.detach().requires_grad_() for x in (q, k, v)]
    got = attend(*poisoned, PATTERN, key_padding_mask=mask)
    torch.testing.assert_close(got, expected, **EXACT)
    weight = torch.randn_like(got)
    wanted = torch.autograd.grad((expected * weight).sum(), clean)
    grads = torch.autograd.grad((got * weight).sum(), poisoned)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, **EXACT)
    assert all(grad[mask].abs().max() == 0 for grad in grads[1:])


def test_padding_at_the_end_equals_a_shorter_sequence() -> None:
    q, k, v = operands()
    mask = torch.zeros(2, 101, dtype=torch.bool)
    mask[1, 60:] = True
    padded = attend(q, k, v, PATTERN, key_padding_mask=mask)
    torch.testing.assert_close(padded[1:, :60], attend(q[1:, :60], k[1:, :60], v[1:, :60], PATTERN), **EXACT)


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_without_a_key_is_zero_minus_infinity_and_without_gradient(causal: bool) -> None:
    pattern = DilatedPattern([8], [4])  # one head: three rows of four are in no group
    q, k, v = (x.requires_grad_() for x in operands(rows=17, heads=1, kv_heads=1))
    out, lse = attend_with_lse(q, k, v, pattern, is_causal=causal)
    seen = torch.arange(17) % 8 % 4 == 0
    assert (out[:, ~seen] == 0).all()
    assert (lse[:, ~seen] == float("-inf")).all()
    assert torch.isfinite(lse[:, seen]).all()
    grads = torch.autograd.grad((out * torch.randn_like(out)).sum(), (q, k, v))
    assert all((grad[:, ~seen] == 0).all() and (grad[:, seen] != 0).any() for grad in grads)


def test_zero_is_a_legal_log_sum_exp() -> None:
    q = torch.zeros(1, 5, 1, 4, dtype=torch.float64)
    v = torch.randn(1, 5, 1, 4, dtype=torch.float64)
    out, lse = attend_with_lse(q, q, v, DilatedPattern([1, 1], [1, 2]))
    torch.testing.assert_close(out, v, **EXACT)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(2)), **EXACT)
    assert (attend_with_lse(q, q, v, DilatedPattern([1], [1])).lse == 0).all()


def test_heads_of_one_offset_class_permute_with_the_output() -> None:
    q, k, v = operands(heads=10, kv_heads=10)
    pattern = DilatedPattern([13, 40], [1, 5])
    order = [5, 6, 7, 8, 9, 0, 1, 2, 3, 4]  # g and g + 5 have the same residue
    permuted = attend(q[:, :, order], k[:, :, order], v[:, :, order], pattern)
    torch.testing.assert_close(permuted, attend(q, k, v, pattern)[:, :, order], **EXACT)


def test_every_sequence_of_a_batch_is_computed_alone() -> None:
    q, k, v = operands(batch=5)
    whole = attend(q, k, v, PATTERN)
    for row in range(5):
        alone = attend(*(x[row : row + 1] for x in (q, k, v)), PATTERN)
        torch.testing.assert_close(whole[row : row + 1], alone, **EXACT)


def test_one_segment_of_rate_one_is_dense_attention() -> None:
    q, k, v = operands(heads=3, kv_heads=3)
    dense = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    ours = attend(q, k, v, DilatedPattern([101], [1]), is_causal=True)
    torch.testing.assert_close(ours, dense.transpose(1, 2), **EXACT)


def test_a_shift_of_one_period_is_no_shift_and_a_shifted_slab_is_an_offset() -> None:
    q, k, v = operands()
    shifted = attend(q, k, v, DilatedPattern([12, 24], [2, 3], segment_shift=7))
    moved = attend(q, k, v, DilatedPattern([12, 24], [2, 3]), query_offset=7, key_offset=7)
    torch.testing.assert_close(shifted, moved, **EXACT)
    period = attend(q, k, v, DilatedPattern([12, 24], [2, 3], segment_shift=24))
    torch.testing.assert_close(period, attend(q, k, v, DilatedPattern([12, 24], [2, 3])), **EXACT)


def test_non_contiguous_inputs_equal_contiguous_ones() -> None:
    q, k, v = operands()
    views = [x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for x in (q, k, v)]
    assert all(x.stride(-1) != 1 for x in views)
    torch.testing.assert_close(attend(*views, PATTERN), attend(q, k, v, PATTERN), **EXACT)


def test_an_empty_batch() -> None:
    q, k, v = (x[:0].requires_grad_() for x in operands())
    out, lse = attend_with_lse(q, k, v, PATTERN)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    assert torch.autograd.grad(out.sum(), k)[0].shape == k.shape


@pytest.mark.parametrize("shapes", [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys(shapes: tuple[int, int]) -> None:
    q = torch.randn(2, shapes[0], 2, 4, requires_grad=True)
    k = torch.randn(2, shapes[1], 2, 4, requires_grad=True)
    out, lse = attend_with_lse(q, k, k, PATTERN)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
    assert all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), (q, k)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("impl", ["aten", "reference"])
def test_dropout_drops_merged_probabilities(causal: bool, impl: str) -> None:
    """With v the identity, the output shows each probability: dropped, or scaled by 1 / (1 - p), as a whole."""
    rows, p = 61, 0.3
    pattern = DilatedPattern([20, 61], [1, 2])  # pairs of even rows within 20 count twice
    q, k = (torch.randn(1, rows, 1, rows, dtype=torch.float64) for _ in range(2))
    v = torch.eye(rows, dtype=torch.float64).view(1, rows, 1, rows)
    full = attend(q, k, v, pattern, is_causal=causal)
    dropped = attend(q, k, v, pattern, is_causal=causal, dropout_p=p, impl=impl)
    kept = (dropped - full / (1 - p)).abs() < 1e-12
    gone = dropped.abs() < 1e-15
    assert (kept | gone).all()
    share = (gone & (full > 0)).sum() / (full > 0).sum()
    assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / (full > 0).sum())


@examples(80)
@given(calls())
def test_dropout_is_the_same_whichever_implementation_computes_it(call: DrawnCall) -> None:
    *inputs, grad_out, _ = call.tensors(torch.float64)
    outcomes = []
    for impl in ("aten", "reference"):
        torch.manual_seed(call.seed % 1000)
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attend(*leaves, call.pattern, is_causal=call.is_causal, dropout_p=0.4, impl=impl, **call.options)
        outcomes.append([out, *torch.autograd.grad((out * grad_out).sum(), leaves)])
    for ours, reference in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-10)


def test_dropout_masks_of_places_are_independent() -> None:
    from dilated_attention_pytorch.kernels.dropout import keep_factors

    def place(size: int, dim: int) -> Tensor:
        shape = [1, 1, 1, 1]
        shape[dim] = size
        return torch.arange(size).view(shape)

    seed = torch.tensor(123)
    kept = keep_factors(seed, place(3, 0), place(4, 1), place(200, 2), place(300, 3), 0.25, torch.float32) > 0
    total = kept.double()
    assert abs(total.mean() - 0.75) < 5 * math.sqrt(0.25 * 0.75 / total.numel())
    centred = (total - total.mean()) / total.std()
    for other in (
        centred.roll(1, 0),
        centred.roll(1, 1),
        centred.roll(1, 2),
        centred.roll(1, 3),
        centred.roll((1, 1), (2, 3)),
    ):
        assert abs((centred * other).mean()) < 5 / math.sqrt(total.numel())
    # Rows and columns as a whole are no more alike than chance.
    rows, columns = total.mean(-1), total.mean(-2)
    assert abs(rows.std() - math.sqrt(0.25 * 0.75 / 300)) < 0.1 * rows.std()
    assert abs(columns.std() - math.sqrt(0.25 * 0.75 / 200)) < 0.1 * columns.std()


def test_the_paper_configuration_with_a_rate_that_does_not_divide_its_length() -> None:
    """16384 % 6 != 0 at a sixty-fourth of the size: w = 256 and r = 6, 12 heads, against the oracle."""
    from support.oracle import Groups, dense_counts

    groups = Groups((32, 64, 128, 256, 512), (1, 2, 4, 6, 12))
    q, k, v = (torch.randn(1, 629, 12, 8, dtype=torch.float64) for _ in range(3))
    counts, zero_pad_keys = dense_counts(groups, 629, 629, 12)
    want, _ = dense_attention(q, k, v, counts, zero_pad_keys, 8**-0.5)
    torch.testing.assert_close(attend(q, k, v, DilatedPattern(groups.lengths, groups.rates)), want, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("pattern", "same"),
    [
        (DilatedPattern([13, 31], [1, 3]), Groups((13, 31), (1, 3))),
        (local_window(7, 5), Rule("window", (7, 5))),
    ],
    ids=["dilated", "window"],
)
@pytest.mark.parametrize("are_queries_few", [True, False], ids=["queries", "keys"])
def test_rows_at_another_rate_attend_from_their_positions(
    pattern: Pattern, same: Groups | Rule, are_queries_few: bool
) -> None:
    rate, few, many = 4, 17, 71
    num_queries, num_keys = (few, many) if are_queries_few else (many, few)
    q, k, v = (
        torch.randn(2, rows, heads, 7, dtype=torch.float64, requires_grad=True)
        for rows, heads in ((num_queries, 6), (num_keys, 3), (num_keys, 3))
    )

    def placed(rows: Tensor) -> Tensor:
        return rows.new_zeros(2, few * rate, *rows.shape[2:]).index_copy(1, torch.arange(0, few * rate, rate), rows)

    counts, zeros = dense_counts(same, *((few * rate, many) if are_queries_few else (many, few * rate)), 3, batch=2)
    if are_queries_few:
        counts, zeros = counts[:, :, ::rate], zeros[:, :, ::rate]
        out, lse = (x[:, ::rate] for x in attend_with_lse(placed(q), k, v, pattern))
    else:
        counts = counts[..., ::rate]
        padding = (torch.arange(few * rate) % rate != 0).expand(2, -1)
        out, lse = attend_with_lse(q, placed(k), placed(v), pattern, key_padding_mask=padding)
    expected = dense_attention(q, k, v, counts, zeros, 7**-0.5)
    for found, want in zip((out, lse), expected, strict=True):
        torch.testing.assert_close(found, want, **EXACT)
    grads, of_expected = (torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (out, expected[0]))
    for found, want in zip(grads, of_expected, strict=True):
        torch.testing.assert_close(found, want, **EXACT)
