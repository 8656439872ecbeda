"""The Triton kernels against the dense oracle, forward and every gradient, in Triton's interpreter or on a GPU.

Operands lie in larger storage full of NaN and every fresh tensor is filled with NaN, so that a row read or left out by
mistake shows.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch import (
    DilatedPattern,
    Pattern,
    attend_with_lse,
    local_window,
    random_blocks,
    strided_blocks,
)
from dilated_attention_pytorch.kernels.select import is_interpreted
from dilated_attention_pytorch.kernels.triton import configurations
from support.drawn import DrawnCall, block_calls, calls
from support.oracle import Groups, Rule
from support.planned import planned, with_candidates
from support.triton_calls import DEVICE, SMALL, check, check_drawn_calls, poisoned

PARTS, DRAWS = 24, 13
IN_EVERY_RUN, FEW_DRAWS = 1, 4
"""Parts that the gate runs too, and their draws: a call takes the interpreter seconds."""
RULED_DRAWS = 3


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of the interpreter's runs: small ones, so that small calls have many tiles and long runs of blocks."""
    if is_interpreted():
        with_candidates(monkeypatch, configurations.BlockSizes(16, 16, 4, 1))


@pytest.mark.parametrize(
    "part", [part if part < IN_EVERY_RUN else pytest.param(part, marks=pytest.mark.slow) for part in range(PARTS)]
)
def test_drawn_calls_stay_within_the_error_budget(part: int, figure: Any) -> None:
    dtype = (torch.float32, torch.bfloat16)[part % 2]

    def check_part(call: DrawnCall, used: dict[str, float]) -> None:
        # derandomize repeats its draws in every part: the part moves seeds, masks and rates.
        call.seed += part
        call.is_causal ^= bool(part % 3)
        call.summands = tuple(
            Groups(g.lengths, tuple(1 + (r + part) % 7 for r in g.rates), g.offset_rule, g.tail, g.shift)
            for g in call.summands
        )
        check(call, dtype, used)

    number = FEW_DRAWS if part < IN_EVERY_RUN else DRAWS
    check_drawn_calls(f"Triton, {dtype}, part {part}", number, calls(sizes=SMALL), check_part, figure)


# fmt: off
CASES = {
    "the paper's pattern, scaled down by 128": (4, 1, 33, 16, Groups((16, 32, 64, 128, 256), (1, 2, 4, 6, 12))),
    "7 heads, rate 6 does not divide 20": (7, 1, 33, 16, Groups((20,), (6,))),
    "the slide encoder's pattern, scaled down": (6, 1, 29, 24, Groups((16, 90, 512), (1, 2, 16), "block")),
    "grouped heads, more than a tile holds": (1, 17, 13, 16, Groups((11, 64), (1, 3))),
    "more groups than the order tells apart": (1, 1, 37, 16, Groups(tuple(range(9, 64, 5)), (*range(1, 12),))),
    "rates beyond every length": (3, 1, 29, 16, Groups((7, 10**9), (50, 10**8))),
}
# fmt: on


def causal_by_turns(cases: dict[str, Any]) -> Any:
    """Every case is causal or not in the gate, and the other one when slow tests run."""
    return pytest.mark.parametrize(
        ("case", "causal"),
        [
            pytest.param(case, causal, marks=[pytest.mark.slow] * (causal == bool(index % 2)))
            for index, case in enumerate(cases)
            for causal in (False, True)
        ],
    )


@causal_by_turns(CASES)
def test_chosen_patterns_stay_within_the_error_budget(case: str, causal: bool) -> None:
    kv_heads, ratio, rows, head_dim, groups = CASES[case]
    call = DrawnCall(1, rows, rows, kv_heads, ratio, head_dim, (groups,), 4, causal, None)
    check(call, torch.float32, {})


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=["float32", "bfloat16"]
)
def test_drawn_windows_blocks_and_sums_stay_within_the_error_budget(dtype: torch.dtype, figure: Any) -> None:
    def check_other_mask(call: DrawnCall, used: dict[str, float]) -> None:
        call.is_causal ^= dtype == torch.bfloat16
        check(call, dtype, used)

    name = f"Triton, {dtype}, block patterns and sums"
    check_drawn_calls(name, RULED_DRAWS, block_calls(sizes=SMALL), check_other_mask, figure)


# fmt: off
RULED = {
    "a window narrower than a tile": (257, 1, (Rule("window", (9, 4)),)),
    "a window wider than a tile": (257, 1, (Rule("window", (100, 30)),)),
    "a window, global tokens and dilation": (
        100, 1, (Rule("window", (20, 0)), Rule("global", (3,)), Groups((32, 128), (1, 5)))
    ),
    "blocks that end in a tile, three heads in it": (63, 3, (Rule("random", (1, 2, 5, 24)),)),
    "half of the heads": (100, 1, (Rule("window", (7, 0), (0, 2)), Rule("hierarchical", (1, 3, 2, 16), (1, 2)))),
}
# fmt: on


@causal_by_turns(RULED)
def test_chosen_windows_and_blocks_stay_within_the_error_budget(
    case: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_interpreted():  # larger tiles than elsewhere: long runs of blocks that need no mask
        with_candidates(monkeypatch, configurations.BlockSizes(64, 32, 4, 1))
    rows, ratio, summands = RULED[case]
    call = DrawnCall(1, rows, rows, 1 if "heads" not in case else 2, ratio, 16, summands, 4, causal, None)
    check(call, torch.float32, {})


PATTERN = DilatedPattern([16, 48, 200], [1, 3, 5])


def tensors(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for _ in range(3)]


def test_splitting_the_keys_changes_nothing() -> None:
    from dilated_attention_pytorch.kernels.triton import launch

    patterns: tuple[Pattern, ...] = (
        PATTERN + DilatedPattern([32], [2], tail="zero_padded"),
        random_blocks(0.5, block_size=12) + local_window(9, 2),
    )
    for pattern in patterns:
        q, k, v = (x.detach() for x in tensors(1, 23, 2, 16))
        problem = launch.Problem(q, k, v, pattern.groups, False, 0.3, rules=pattern.rules)
        with poisoned():
            whole, parts = launch.forward(problem, 1), launch.forward(problem, 3)
        for a, b in zip(whole, parts, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_one_query_after_many_keys_is_split_over_the_grid_and_exact() -> None:
    from dilated_attention_pytorch.kernels.triton import launch
    from dilated_attention_pytorch.kernels.triton.plan import plan_of

    q, k, v = (x.detach() for x in tensors(1, 397, 1, 16))
    everywhere: tuple[Pattern, ...] = (
        DilatedPattern([400, 1000], [1, 3]),
        local_window(300) + strided_blocks(3, block_size=16),
    )
    for pattern in everywhere:
        problem = launch.Problem(q[:, -1:], k, v, pattern.groups, True, 0.25, 396, 0, rules=pattern.rules)
        assert plan_of(problem).forward.num_splits > 1
        options: Any = {"is_causal": True, "scale": 0.25}
        out, lse = attend_with_lse(q[:, -1:], k, v, pattern, query_offset=396, impl="triton", **options)
        want = attend_with_lse(q.double(), k.double(), v.double(), pattern, impl="reference", **options)
        torch.testing.assert_close(out, want.out[:, -1:].float(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse, want.lse[:, -1:].float(), rtol=1e-5, atol=1e-6)


def test_rows_attend_to_rows() -> None:
    from dilated_attention_pytorch.kernels.triton import launch

    q, k, v = (x.detach() for x in tensors(2, 150, 4, 16))
    out, lse = launch.attend_rows(q[:, :1], k[:, :, :2], v[:, :, :2], scale=0.25)
    scores = 0.25 * torch.einsum("bnhd,bmhd->bnhm", q[:, :1], k[:, :, :2].repeat_interleave(2, 2)).double()
    torch.testing.assert_close(lse, scores.logsumexp(-1).float(), rtol=1e-5, atol=1e-5)
    want = torch.einsum("bnhm,bmhd->bnhd", scores.softmax(-1), v[:, :, :2].repeat_interleave(2, 2).double())
    torch.testing.assert_close(out, want.float(), rtol=1e-5, atol=1e-5)


def test_dropout_drops_what_the_other_implementations_drop() -> None:
    q, k, v = tensors(2, 21, 2, 16)
    k, v = (x[:, :, :1] for x in (k, v))
    results = []
    for impl in ("triton", "reference"):
        torch.manual_seed(3)
        out, lse = attend_with_lse(q, k, v, PATTERN + local_window(9), is_causal=True, dropout_p=0.4, impl=impl)  # type: ignore[arg-type]
        results.append((out, lse, *torch.autograd.grad(out.sin().sum(), (q, k, v))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_two_runs_give_equal_bits() -> None:
    q, k, v = tensors(1, *((17, 1) if is_interpreted() else (700, 3)), 16, dtype=torch.bfloat16)
    runs = []
    for _ in range(2):
        out, lse = attend_with_lse(
            q, k, v, DilatedPattern([16, 48], [1, 3]) + local_window(30), is_causal=True, impl="triton"
        )
        runs.append((out, lse, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_padded_key_may_hold_nan() -> None:
    q, k, v = tensors(1, 29, 1, 16)
    mask = torch.zeros(1, 29, dtype=torch.bool, device=DEVICE)
    mask[:, 19:] = True
    bad_k, bad_v = (x.detach().masked_fill(mask[..., None, None], float("nan")).requires_grad_() for x in (k, v))
    runs = []
    for keys, values in ((k, v), (bad_k, bad_v)):
        out, lse = attend_with_lse(q, keys, values, PATTERN, key_padding_mask=mask, impl="triton")
        runs.append((out, lse, *torch.autograd.grad(out.sin().sum(), (q, keys, values))))
    for clean, poisoned_run in zip(*runs, strict=True):
        assert torch.equal(clean, poisoned_run)
    assert not runs[0][3][:, 19:].any()


def test_a_scale_of_zero_gives_the_mean_and_no_gradient_of_the_scores() -> None:
    q, k, v = tensors(1, 20, 2, 16)
    out, _ = attend_with_lse(q, k, v, DilatedPattern([20], [1]), scale=0.0, is_causal=True, impl="triton")
    means = v.cumsum(1) / torch.arange(1, 21, device=DEVICE)[:, None, None]
    torch.testing.assert_close(out, means)
    grads = torch.autograd.grad(out.sum(), (q, k))
    assert not any(grad.any() for grad in grads)


def test_a_scale_of_zero_counts_the_keys_that_are_seen() -> None:
    q, k, v = (x.detach() for x in tensors(1, 37, 1, 16))
    mask = torch.zeros(1, 37, dtype=torch.bool, device=DEVICE)
    mask[:, 5:31] = True
    pattern = DilatedPattern([10, 37], [1, 3]) + local_window(9, 2)
    for causal, padding in ((False, mask), (True, mask), (True, None)):
        options: Any = {"is_causal": causal, "key_padding_mask": padding, "scale": 0.0}
        out, lse = attend_with_lse(q, k, v, pattern, impl="triton", **options)
        want = attend_with_lse(q.double(), k.double(), v.double(), pattern, impl="reference", **options)
        assert (want.lse == float("-inf")).any() == (padding is not None)
        torch.testing.assert_close(out, want.out.float(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse, want.lse.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 27), (torch.bfloat16, 30), (torch.float32, 30)], ids=str)
def test_outputs_are_right_up_to_the_largest_scores_that_a_fused_multiply_add_allows(
    dtype: torch.dtype, bound: int
) -> None:
    """The interpreter does not fuse: it is a GPU that could fail."""
    rows, head_dim = 41, 16
    # Scores of both signs from half the bound on, far from each other: the largest has all of the probability.
    sizes = torch.linspace(0.5, 1.0, rows, dtype=torch.float64)[torch.randperm(rows)]
    signs = torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0)
    base = math.sqrt(2.0**bound / head_dim / 0.25)
    q, k = ((base * x)[None, :, None, None].expand(1, rows, 1, head_dim) for x in (signs, sizes))
    q, k, v = (x.to(DEVICE, dtype) for x in (q, k, torch.randn(1, rows, 1, head_dim)))
    pattern = DilatedPattern([16, 200], [1, 3])
    out, lse = attend_with_lse(q, k, v, pattern, is_causal=True, scale=0.25, impl="triton")
    want = attend_with_lse(q.double(), k.double(), v.double(), pattern, is_causal=True, scale=0.25, impl="reference")
    assert 0.9 < float(want.lse.abs().max()) / 2.0**bound < 1.1
    torch.testing.assert_close(out, want.out.to(dtype))
    torch.testing.assert_close(lse, want.lse.float())


def test_documents_of_one_and_two_rows_under_a_shift_fit_the_table_of_runs() -> None:
    from dilated_attention_pytorch.kernels.triton import launch

    q, k, v = tensors(1, 16, 1, 16)
    for pattern in (DilatedPattern([100], [1], segment_shift=99), DilatedPattern([3, 7], [1, 2], segment_shift=2)):
        for step in (1, 2):
            bounds = torch.arange(0, 17, step, dtype=torch.int32, device=DEVICE)
            options = {"cu_seqlens": bounds, "is_causal": False, "scale": 0.3}
            out, _ = attend_with_lse(q, k, v, pattern, impl="triton", **options)  # type: ignore[arg-type]
            want, _ = attend_with_lse(q, k, v, pattern, impl="reference", **options)  # type: ignore[arg-type]
            torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
            problem = launch.Problem(q, k, v, pattern.groups, False, 0.3, cu_seqlens=bounds)
            planned(problem, (16,)).check_ranges()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_comes_out_as_nan(bad: float) -> None:
    q, k, v = (x.detach() for x in tensors(1, 20, 1, 16))
    q[0, 3] = bad
    for splits in (1, 3):
        from dilated_attention_pytorch.kernels.triton import launch

        out, lse = launch.forward(launch.Problem(q, k, v, PATTERN.groups, False, 0.3), splits)
        assert out[0, 3].isnan().all()
        assert lse[0, 3].isnan().all()
        assert out[0, 4].isfinite().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
def test_what_is_not_finite_stays_in_the_tiles_that_see_it() -> None:
    """What docs/definition.md promises of these kernels, and no more: rows of its own tile before it may be NaN too."""
    found = []
    rows, before, at = (40, 32, 37) if is_interpreted() else (160, 128, 150)
    q, *others = tensors(1, rows, 1, 16)
    for is_spoilt in (False, True):
        k, v = (x.detach().clone() for x in others)
        if is_spoilt:
            k[0, at, 0, 3] = v[0, at, 0, 5] = math.nan
        out, lse = attend_with_lse(q, k, v, DilatedPattern([rows], [1]), is_causal=True, impl="triton")
        grad_query = torch.autograd.grad(out[:, :before].sin().sum(), q)[0]
        found.append([out[:, :before], lse[:, :before], grad_query[:, :before], out[:, at:]])
    for clean, spoilt in zip(found[0][:3], found[1][:3], strict=True):
        assert torch.equal(clean, spoilt)
    assert found[1][3].isnan().all()


@pytest.mark.parametrize("bounds", [[0, 15], [8, 30], [4, 12, 20]])
def test_rows_outside_of_every_document_see_nothing(bounds: list[int]) -> None:
    from dilated_attention_pytorch.kernels.triton import launch

    q, k, v = tensors(1, 30, 1, 16)
    inside = torch.zeros(30, dtype=torch.bool)
    inside[bounds[0] : bounds[-1]] = True
    problem = launch.Problem(
        q.detach(),
        k.detach(),
        v.detach(),
        DilatedPattern([16], [1]).groups,
        False,
        0.3,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=DEVICE),
    )
    out, lse = launch.forward(problem)
    assert torch.equal(lse[0, :, 0].cpu() > float("-inf"), inside)
    grads = launch.backward(problem, out, lse, torch.ones_like(out), None)[:3]
    for x in (out, *grads):
        assert not x[0, ~inside].any()
    torch.testing.assert_close(grads[2].sum(), torch.tensor(16.0 * int(inside.sum()), device=DEVICE))
