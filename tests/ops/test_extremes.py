"""Numbers of any size: finite and right wherever the reference is, and a NaN stays with what is in relation with it."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch import (
    DilatedPattern,
    Pattern,
    attend,
    attend_with_lse,
    global_tokens,
    local_window,
    random_blocks,
)
from dilated_attention_pytorch.kernels.select import refusal
from dilated_attention_pytorch.nn import AdaptiveBlockAttention
from dilated_attention_pytorch.ops import attend_blocks, merge
from support.error_budget import budget
from support.oracle import dense_attention

NAMES = ("out", "lse", "grad_query", "grad_key", "grad_value")
ROWS, HEADS, KV_HEADS, WIDTH = 97, 4, 2, 16
PATTERNS: dict[str, Pattern] = {
    "dilated": DilatedPattern([16, 50, 128], [1, 2, 3]),
    "zero-padded": DilatedPattern([16, 50], [1, 3], tail="zero_padded"),
    "window": local_window(20, 3),
    "blocks": random_blocks(0.3, block_size=16, seed=1),
    "sum": local_window(9) + global_tokens(3) + DilatedPattern([64], [2]),
}
MAGNITUDES = (1e-6, 1.0, 1e2, 1e4, 1e8)


def draw(dtype: torch.dtype, query: float, key: float, value: float) -> list[Tensor]:
    """Query, key and value of these magnitudes, and the gradient of the output."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((HEADS, query), (KV_HEADS, key), (KV_HEADS, value), (HEADS, 1.0))
    return [
        (torch.randn(1, ROWS, heads, WIDTH, generator=generator, dtype=torch.float64) * size).to(dtype)
        for heads, size in shapes
    ]


def counts_of(pattern: Pattern, *, is_causal: bool, mask: Tensor | None = None) -> Tensor:
    positions = torch.arange(ROWS)
    counts = pattern.counts(positions, positions, KV_HEADS, is_causal=is_causal)[None]
    return counts if mask is None else counts * ~mask[:, None, None]


def skip_unless_here(impl: str) -> None:
    if reason := refusal(impl, torch.device("cpu"), torch.float32, WIDTH):
        pytest.skip(reason)


def results(operands: list[Tensor], pattern: Pattern, **options: Any) -> list[Tensor]:
    *leaves, grad = (x.clone() for x in operands)
    leaves = [x.requires_grad_() for x in leaves]
    torch.manual_seed(7)
    out, lse = attend_with_lse(*leaves, pattern, **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", PATTERNS)
def test_inputs_of_any_magnitude_have_the_results_and_gradients_of_exact_arithmetic(
    name: str, dtype: torch.dtype, figure: Any
) -> None:
    """Within the error budget, and never finite less often than the reference in the same dtype."""
    impls = [impl for impl in ("aten", "native") if refusal(impl, torch.device("cpu"), dtype, WIDTH) is None]
    pattern, largest = PATTERNS[name], torch.finfo(dtype).max
    used = dict.fromkeys(impls, 0.0)
    for size in MAGNITUDES:
        for index, sizes in enumerate(((size, size, 1.0), (size, size, size), (size, 1.0, size), (1.0, 1.0, size))):
            if max(sizes) * 6 > largest:
                continue
            operands = draw(dtype, *sizes)
            is_causal = index % 2 == 1
            mask = torch.arange(ROWS)[None] % 5 == 1 if index > 1 and name != "zero-padded" else None
            options = {"is_causal": is_causal, "key_padding_mask": mask}
            reference = results(operands, pattern, impl="reference", **options)
            found = {impl: results(operands, pattern, impl=impl, **options) for impl in impls}
            for impl, of_impl in found.items():
                for what, mine, theirs in zip(NAMES, of_impl, reference, strict=True):
                    assert bool((mine.isfinite() | ~theirs.isfinite()).all()), (impl, what, sizes)
            if name == "zero-padded":  # the budget knows no keys of score 0
                continue
            exact = results([x.double() for x in operands], pattern, impl="reference", **options)
            counts = counts_of(pattern, is_causal=is_causal, mask=mask).repeat_interleave(HEADS // KV_HEADS, 1)
            q, k, v, grad = (x.double() for x in operands)
            k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
            bounds = list(budget(q, k, v, grad, counts.double(), WIDTH**-0.5, dtype))
            bounds[3:] = [x.unflatten(2, (KV_HEADS, -1)).sum(3) for x in bounds[3:]]
            for impl, of_impl in found.items():
                for what, mine, want, bound in zip(NAMES, of_impl, exact, bounds, strict=True):
                    is_held = want.isfinite() & (want.abs() + bound < largest)
                    error = (mine.double() - want).abs()[is_held]
                    bound = bound[is_held] + torch.finfo(dtype).tiny * 64
                    assert bool((error <= bound).all()), (impl, what, sizes, float((error / bound).max()))
                    used[impl] = max(used[impl], float((error / bound).max())) if error.numel() else used[impl]
    figure(
        f"magnitudes 1e-6 to 1e8, {name} patterns, {dtype}, largest part of the error budget used",
        {impl: f"{part:.2f}" for impl, part in used.items()},
    )


def oracle(operands: list[Tensor], pattern: Pattern, scale: float, **options: Any) -> list[Tensor]:
    """What :func:`results` finds, by the dense oracle."""
    *leaves, grad = (x.double() for x in operands)
    leaves = [x.requires_grad_() for x in leaves]
    counts = counts_of(pattern, **options)
    out, lse = dense_attention(*leaves, counts, torch.zeros(1, KV_HEADS, ROWS), scale)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("impl", ["reference", "aten", "native"])
def test_a_scale_of_zero_gives_the_mean_of_the_visible_keys(impl: str, dtype: torch.dtype) -> None:
    """Each key as often as it counts; a scale that float32 rounds to zero does the same."""
    if refusal(impl, torch.device("cpu"), dtype, WIDTH) is not None:
        pytest.skip("not in this dtype, or not on this machine")
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 40 * torch.finfo(dtype).eps}
    for name in ("dilated", "window", "blocks", "sum"):
        for index, scale in enumerate((0.0, -0.0, 1e-300, -1e-45)):
            options = {"is_causal": index % 2 == 0}
            mask = torch.arange(ROWS)[None] % 5 == 1 if index > 1 else None
            operands = draw(dtype, 1.0, 1.0, 1.0)
            found = results(operands, PATTERNS[name], scale=scale, key_padding_mask=mask, impl=impl, **options)
            expected = oracle(operands, PATTERNS[name], scale, mask=mask, **options)
            for what, mine, want in zip(NAMES, found, expected, strict=True):
                torch.testing.assert_close(mine.double(), want, **tolerance, msg=f"{what} of {name} at {scale}")
            if scale == 0.0:
                assert not found[2].any()
                assert not found[3].any()


@pytest.mark.parametrize("impl", ["reference", "aten", "native"])
def test_an_infinite_key_is_no_mean_at_a_scale_of_zero(impl: str) -> None:
    skip_unless_here(impl)
    operands = draw(torch.float32, 1.0, 1.0, 1.0)
    operands[1][0, 50, 0, 3] = math.inf
    out = results(operands, local_window(20, 3), scale=0.0, impl=impl)[0]
    sees = (counts_of(local_window(20, 3), is_causal=False)[0, 0, :, 50] > 0).nonzero().flatten()
    assert out[0, sees, :2].isnan().all()
    assert out[0, :, 2:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [-1e36, -1e30, 1e30])
@pytest.mark.parametrize("impl", ["aten", "native"])
def test_scores_of_either_sign_up_to_the_end_of_float32_hide_no_key_and_show_none(
    impl: str, size: float, dtype: torch.dtype
) -> None:
    """All scores of a row have one sign and lie far apart: the best key that is seen has all the probability."""
    if refusal(impl, torch.device("cpu"), dtype, WIDTH) is not None:
        pytest.skip("not in this dtype, or not on this machine")
    root = abs(size) ** 0.5
    for name, pattern in PATTERNS.items():
        for is_causal in (False, True):
            query, key, value, grad = draw(dtype, 1.0, 1.0, 1.0)
            query, key = query.abs() * root, key.abs() * math.copysign(root, size)
            mask = torch.arange(ROWS)[None] % 5 == 1 if is_causal and name != "zero-padded" else None
            mask = mask if mask is None else mask | (torch.arange(ROWS)[None] < 4)  # the first rows see no key
            options = {"is_causal": is_causal, "scale": 0.25}
            if name == "zero-padded":
                operands = [x.double() for x in (query, key, value, grad)]
                expected = results(operands, pattern, impl="reference", **options)
            else:
                expected = oracle([query, key, value, grad], pattern, 0.25, is_causal=is_causal, mask=mask)
            found = results([query, key, value, grad], pattern, key_padding_mask=mask, impl=impl, **options)
            eps = max(torch.finfo(dtype).eps, 1e-15)
            torch.testing.assert_close(found[0].double(), expected[0], rtol=4 * eps, atol=4 * eps)
            torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found[4].double(), expected[4], rtol=64 * eps, atol=64 * eps)
            for what in (2, 3):
                assert float((found[what] - expected[what]).abs().max()) <= 64 * eps * root * 10


def test_a_scale_beyond_the_numbers_of_the_scores_is_refused() -> None:
    q = torch.ones(1, 7, 1, 8)
    for scale in (1e38, -1e300):
        with pytest.raises(ValueError, match=r"scale must be .* got -?1e\+"):
            attend(q, q, q, local_window(2), scale=scale)
    out = attend(q.double(), q.double(), q.double(), local_window(2), scale=1e300)
    assert torch.equal(out, q.double())


def test_values_get_the_gradients_of_the_keys_that_are_chosen() -> None:
    """Scores of 1e16: every row sees one key, in whichever groups, and the budget would hide a factor of two."""
    for pattern in PATTERNS.values():
        for is_causal in (False, True):
            operands = draw(torch.float32, 1e8, 1e8, 1.0)
            found = results(operands, pattern, is_causal=is_causal)
            exact = results([x.double() for x in operands], pattern, is_causal=is_causal, impl="reference")
            torch.testing.assert_close(found[4].double(), exact[4], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found[0].double(), exact[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sizes", [(1e20, 1e-9), (1e-9, 1e20), (3e37, 1e-25), (1e-25, 3e37)])
def test_rows_whose_squares_overflow_or_vanish_have_the_gradients_of_their_scores(sizes: tuple[float, float]) -> None:
    """Scores are 1e11 to 1e12 here: the norm of one side is infinite in float32, that of the other 0 at 1e-25."""
    for pattern in PATTERNS.values():
        operands = draw(torch.float32, *sizes, 1.0)
        found = results(operands, pattern, is_causal=True)
        exact = results([x.double() for x in operands], pattern, is_causal=True, impl="reference")
        for index in (0, 4):
            torch.testing.assert_close(found[index].double(), exact[index], rtol=1e-5, atol=1e-5)
        for index, size in ((2, sizes[1]), (3, sizes[0])):
            assert float((found[index] - exact[index]).abs().max()) <= 1e-4 * size


@pytest.mark.parametrize("name", PATTERNS)
def test_dropout_of_large_scores_is_that_of_the_reference(name: str) -> None:
    for size in (1.0, 1e5, 1e8):
        operands = draw(torch.float32, size, size, 1.0)
        found, expected = (
            results(x, PATTERNS[name], dropout_p=0.4, is_causal=True, impl=impl)
            for x, impl in ((operands, "auto"), ([x.double() for x in operands], "reference"))
        )
        for index in (0, 4):
            torch.testing.assert_close(found[index].double(), expected[index], rtol=1e-4, atol=1e-4)
        for index in (2, 3):  # products of rounded ones with rows of that size
            assert float((found[index] - expected[index]).abs().max()) <= 1e-4 * max(1.0, size)


@pytest.mark.parametrize("impl", ["aten", "native"])
@pytest.mark.parametrize("size", [1e-6, 1e2, 1e5, 1e8])
def test_chosen_blocks_of_any_magnitude_have_the_gradients_of_the_reference(
    size: float, impl: Literal["aten", "native"]
) -> None:
    skip_unless_here(impl)
    *operands, grad = draw(torch.float32, size, size, 1.0)
    blocks = torch.tensor([[0, 2], [1, 3], [2, -1], [3, 5], [4, 4], [5, 0], [6, 1]]).expand(1, KV_HEADS, 7, 2)
    gates = torch.randn(1, KV_HEADS, 7, 2)
    both = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in (*operands, gates)]
        if dtype == torch.float32:
            out, _ = attend_blocks(*leaves[:3], blocks, leaves[3], block_size=16, is_causal=True, impl=impl)
        else:
            out = dense_blocks(*leaves, blocks)
        both.append([out.detach().double(), *(x.double() for x in torch.autograd.grad(out, leaves, grad.to(dtype)))])
    # A score has an error of its own rounding, which is the relative error of its probability. Where scores are so
    # large that this is more than 1, a row has one probability of 1 and the others vanish.
    largest = float(math.prod(x.detach().norm(dim=-1).max() for x in operands[:2]) * WIDTH**-0.5)
    rounding = torch.finfo(torch.float32).eps * largest / 4
    tolerance = max(3e-4, rounding if rounding < 0.1 else 0.0)
    for found, want, factor in zip(*both, (1.0, size, size, 1.0, 1.0), strict=True):
        assert bool(found.isfinite().all())
        assert float((found - want).abs().max()) <= tolerance * max(1.0, factor)


def dense_blocks(query: Tensor, key: Tensor, value: Tensor, gates: Tensor, blocks: Tensor) -> Tensor:
    """Blocks of 16 by one dense softmax over the keys of every list, in double precision."""
    rows = torch.arange(ROWS)
    outs = []
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        powers = []
        for place in range(blocks.shape[3]):
            listed = blocks[0, kv, rows // 16, place]
            is_seen = (listed[:, None] == rows // 16) & (rows <= rows[:, None])
            scores = query[0, :, head] @ key[0, :, kv].mT * WIDTH**-0.5 + gates[0, kv, rows // 16, place][:, None]
            powers.append(scores.masked_fill(~is_seen, -math.inf))
        outs.append(torch.cat(powers, -1).softmax(-1) @ value[0, :, kv].repeat(blocks.shape[3], 1))
    return torch.stack(outs, 1)[None]


# What is not finite, and how far it reaches.

VALUES = (math.nan, math.inf, -math.inf)
BOUNDARIES = torch.tensor([0, 40, 41, ROWS], dtype=torch.int32)


def seen_from(counts: Tensor, keys: Tensor) -> Tensor:
    """Rows ``[B, N, H]`` that see any of the marked keys ``[B, M, G]``."""
    seen = torch.einsum("bgnm,bmg->bng", counts.double(), keys.double()) > 0
    return seen.repeat_interleave(HEADS // KV_HEADS, 2)


def reached_by(counts: Tensor, rows: Tensor) -> Tensor:
    """Keys ``[B, M, G]`` that any of the marked rows ``[B, N, H]`` sees."""
    of_heads = rows.unflatten(2, (KV_HEADS, -1)).any(3)
    return torch.einsum("bgnm,bng->bmg", counts.double(), of_heads.double()) > 0


def check_reach(found: list[Tensor], clean: list[Tensor], bad_rows: Tensor, reached: Tensor) -> None:
    """What is in no relation with anything bad is as it is without it."""
    for what, mine, want in zip(NAMES, found, clean, strict=True):
        is_good = ~(reached if what in ("grad_key", "grad_value") else bad_rows)
        torch.testing.assert_close(mine[is_good], want[is_good], rtol=1e-5, atol=1e-4, msg=what)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("name", "is_packed"),
    [*((name, False) for name in ("dilated", "window", "blocks", "sum")), ("dilated", True), ("sum", True)],
)
@pytest.mark.parametrize("impl", ["aten", "native"])
def test_what_is_not_finite_reaches_the_rows_and_keys_that_are_in_relation_with_it_alone(
    impl: str, name: str, is_causal: bool, is_packed: bool
) -> None:
    skip_unless_here(impl)
    pattern = PATTERNS[name]
    counts = counts_of(pattern, is_causal=is_causal)
    if is_packed:
        positions = [torch.arange(b - a) for a, b in zip(BOUNDARIES.tolist(), BOUNDARIES.tolist()[1:], strict=False)]
        parts = [pattern.counts(p, p, KV_HEADS, is_causal=is_causal) for p in positions]
        counts = torch.stack([torch.block_diag(*(part[head] for part in parts)) for head in range(KV_HEADS)])[None]
    options = {"is_causal": is_causal, "cu_seqlens": BOUNDARIES if is_packed else None, "impl": impl}
    for index, value in enumerate(VALUES):
        for kind in range(4):  # query, key, value, gradient of the output
            operands = draw(torch.float32, 1.0, 1.0, 1.0)
            bad_keys = torch.zeros(1, ROWS, KV_HEADS, dtype=torch.bool)
            bad_rows = torch.zeros(1, ROWS, HEADS, dtype=torch.bool)
            row, head = 31 + 13 * index, 1
            (bad_keys if kind in (1, 2) else bad_rows)[0, row, head] = True
            bad_rows |= seen_from(counts, bad_keys)
            spoilt = [x.clone() for x in operands]
            spoilt[kind][0, row, head, 5] = value
            found = results(spoilt, pattern, **options)
            # Rows in relation with it give no gradient to compare with.
            operands[3] = operands[3].masked_fill(bad_rows.unsqueeze(-1), 0.0)
            clean = results(operands, pattern, **options)
            if kind == 3:
                clean[0], clean[1] = found[0], found[1]
            check_reach(found, clean, bad_rows, reached_by(counts, bad_rows) | bad_keys)
            if math.isnan(value) and kind in (0, 1) and bool(bad_rows.any()):
                assert bool(found[0][bad_rows].isnan().all()), "it does reach what sees it"


@pytest.mark.parametrize("name", ["dilated", "window", "sum"])
@pytest.mark.parametrize("impl", ["aten", "native"])
def test_a_key_of_scores_of_minus_infinity_gets_no_gradient_that_is_finite_and_not_zero(impl: str, name: str) -> None:
    skip_unless_here(impl)
    operands = draw(torch.float32, 1.0, 1.0, 1.0)
    operands[0][..., 5].abs_()
    operands[1][0, 31, 1, 5] = -math.inf
    out, _, _, *of_keys = results(operands, PATTERNS[name], is_causal=False, impl=impl)
    assert bool(out.isfinite().all()), "its probability is 0"
    for grad in of_keys:
        of_key = grad[0, 31, 1]
        assert bool((of_key.isnan() | (of_key == 0)).all())


@pytest.mark.parametrize("impl", ["aten", "native", "reference"])
def test_nothing_that_lies_at_a_padded_key_reaches_a_result_or_a_gradient(impl: str) -> None:
    skip_unless_here(impl)
    for pattern in (PATTERNS["dilated"], PATTERNS["sum"], PATTERNS["blocks"]):
        mask = torch.arange(ROWS)[None] % 4 == 2
        operands = draw(torch.float32, 1.0, 1.0, 1.0)
        clean = results(operands, pattern, key_padding_mask=mask, is_causal=True, impl=impl)
        for value in VALUES:
            for kind in (1, 2):
                operands[kind][mask] = value
        found = results(operands, pattern, key_padding_mask=mask, is_causal=True, impl=impl)
        for mine, want in zip(found, clean, strict=True):
            assert torch.equal(mine, want)
        assert all(bool((grad[mask] == 0).all()) for grad in found[3:])


def test_the_reference_lets_it_reach_rows_of_its_own_sequence_and_head_alone() -> None:
    q, k, v = (torch.randn(2, 30, 2, 4) for _ in range(3))
    pattern = DilatedPattern([30], [2])  # head 0 selects even positions
    clean = attend(q, k, v, pattern, impl="reference")
    v[1, 7, 0] = k[1, 7, 0] = math.nan
    assert torch.equal(attend(q, k, v, pattern, impl="reference"), clean)
    v[1, 8, 0] = math.nan
    spoilt = attend(q, k, v, pattern, impl="reference")
    assert torch.equal(spoilt[0], clean[0])
    assert torch.equal(spoilt[1, :, 1], clean[1, :, 1])
    assert spoilt[1, ::2, 0].isnan().all()


def test_a_future_that_is_not_finite_changes_no_chosen_block_before_it() -> None:
    """Nor does what lies at padded keys, and a gate's gradient is that of its own rows."""
    *operands, grad = draw(torch.float32, 1.0, 1.0, 1.0)
    blocks = torch.tensor([[0, -1], [1, 0], [2, 1], [3, 0], [4, 1], [5, 0], [6, 1]]).expand(1, KV_HEADS, 7, 2)
    gates, mask = torch.randn(1, KV_HEADS, 7, 2), torch.zeros(1, ROWS, dtype=torch.bool)
    mask[0, 20], start = True, 85
    grad[:, start:] = 0.0
    both = []
    for is_spoilt in (False, True):
        leaves = [x.clone() for x in (*operands, gates)]
        if is_spoilt:
            for kind in (1, 2):
                leaves[kind][:, start:] = math.nan
                leaves[kind][:, 20] = math.inf
        leaves = [x.requires_grad_() for x in leaves]
        out, lse = attend_blocks(*leaves[:3], blocks, leaves[3], block_size=16, is_causal=True, key_padding_mask=mask)
        grads = torch.autograd.grad(out, leaves, grad)
        # Blocks 0, 1 and 5 are seen by rows that see the future.
        both.append(
            [x[:, :start] for x in (out, lse, grads[0])] + [x[:, 32:80] for x in grads[1:3]] + [grads[3][:, :, :5]]
        )
        assert bool(out[:, start:].isnan().all()) == is_spoilt
    for mine, want in zip(both[1], both[0], strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-5)


def test_an_adaptive_layer_keeps_a_spoilt_future_from_its_past() -> None:
    attention = AdaptiveBlockAttention(
        HEADS, WIDTH, num_kv_heads=KV_HEADS, blocks_per_query=3, block_size=8, scorer_dim=4, pattern=local_window(5)
    )
    q, k, v, _ = draw(torch.float32, 1.0, 1.0, 1.0)
    before = attention(q, k, v, is_causal=True)
    for x in (q, k, v):
        x[:, 50:] = math.nan
    torch.testing.assert_close(attention(q, k, v, is_causal=True)[:, :48], before[:, :48], rtol=1e-5, atol=1e-5)


def test_partials_of_a_spoilt_slab_merge_to_what_the_whole_call_gives() -> None:
    q, k, v, _ = draw(torch.float32, 1.0, 1.0, 1.0)
    pattern = PATTERNS["dilated"]
    want = attend(q, k, v, pattern, is_causal=True)
    k[:, 60] = v[:, 60] = math.nan
    halves = [
        attend_with_lse(q, x, y, pattern, is_causal=True, key_offset=start)
        for x, y, start in ((k[:, :50], v[:, :50], 0), (k[:, 50:], v[:, 50:], 50))
    ]
    torch.testing.assert_close(merge(halves).out[:, :60], want[:, :60], rtol=1e-5, atol=1e-5)


def test_the_oracle_itself_holds_at_every_magnitude() -> None:
    """It is compared with: its probabilities sum to 1 where ``exp(s - L)`` would not."""
    q, k, v, _ = (x.double() for x in draw(torch.float32, 1e8, 1e8, 1.0))
    counts = counts_of(PATTERNS["dilated"], is_causal=False)
    out, _ = dense_attention(q, k, torch.ones_like(v), counts, torch.zeros(1, KV_HEADS, ROWS), 0.25)
    assert bool(((out == 1) | (out == 0)).all())


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # PyTorch's own
def test_where_one_key_has_all_probability_a_tangent_is_that_of_its_value() -> None:
    q, k = (1e4 * torch.randn(1, 23, 3, 5) for _ in range(2))
    value, tangent = torch.randn(2, 1, 23, 3, 5)

    def output(value: Tensor) -> Tensor:
        return attend(q, k, value, DilatedPattern([23], [1]))

    best = torch.einsum("bnhd,bmhd->bnhm", q.double(), k.double()).argmax(-1)
    expected = tangent.gather(1, best.unsqueeze(-1).expand(tangent.shape))  # row best[b, n, h] of its head
    torch.testing.assert_close(torch.func.jvp(output, (value,), (tangent,))[1], expected, rtol=1e-5, atol=1e-5)
