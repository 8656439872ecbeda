"""Caps, biases and values of their own width in the Triton kernels, against the dense oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention_pytorch import DilatedPattern, attend, attend_with_lse
from dilated_attention_pytorch.kernels.select import Impl, is_interpreted
from dilated_attention_pytorch.kernels.triton import configurations, launch
from dilated_attention_pytorch.kernels.triton.terms import tanh
from dilated_attention_pytorch.ops import Scores
from support.drawn import SWEEP, DrawnCall, Sizes, block_calls, calls, examples
from support.oracle import Groups, Rule
from support.planned import with_candidates
from support.scored_calls import ScoredCall, check_budget, scored
from support.triton_calls import DEVICE, poisoned, surrounded

PATTERN = DilatedPattern([100], [1])
IMPLS: tuple[Impl, ...] = ("triton", "reference")
DRAWS = 30
"""500 in the sweep."""
TINY = Sizes(
    st.sampled_from([1, 7, 13, 15, 16, 17, 19]),
    batch=2,
    kv_heads=2,
    head_dims=(5, 16, 20),
    groups=1,
    summands=(1,),
    segments=st.one_of(st.integers(5, 40), st.sampled_from([8, 16])),
    ratios=(1, 1, 2),
)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    if is_interpreted():
        with_candidates(monkeypatch, configurations.BlockSizes(16, 16, 4, 1))


def placed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """On the device; query, key, value and the gradient of the output in storage that is NaN elsewhere."""
    return {
        name: surrounded(x).detach() if name in ("q", "k", "v", "of_out") else x.to(DEVICE)
        for name, x in tensors.items()
    }


@pytest.mark.filterwarnings("ignore:the Triton kernels add up the gradient of a bias by distance:UserWarning")
def test_drawn_calls_stay_within_the_error_budget(figure: Any) -> None:
    used: dict[str, float] = {}
    drawn = 0

    @examples(50 if SWEEP else DRAWS, is_shrunk=False)
    @given(
        scored(st.one_of(calls(sizes=TINY), calls(sizes=TINY), calls(sizes=TINY), block_calls(sizes=TINY))),
        st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        st.integers(0, 2**31),
    )
    def check(call: ScoredCall, dtype: torch.dtype, seed: int) -> None:
        nonlocal drawn
        drawn += 1
        call.call.seed = seed
        # The gradients of padded keys are dropped once they are computed: their probabilities may overflow.
        with poisoned(warn_only=True), np.errstate(over="ignore"):
            check_budget(call, dtype, "triton", used, placed)

    check()
    assert drawn >= DRAWS
    figure(
        f"Triton, terms of the scores, {drawn} drawn calls, part of the error budget",
        {k: f"{v:.2f}" for k, v in used.items()},
    )


IN_THE_PLANE = {
    "queries between keys": DrawnCall(
        *(2, 7, 19, 1, 2, 16),
        summands=(Groups((16,), (1,)),),
        seed=1,
        is_causal=True,
        scale=None,
        options={"query_offset": 14, "key_offset": 5},
    ),
    "packed, padded, 3 heads in a tile": DrawnCall(
        *(1, 13, 13, 1, 3, 5),
        summands=(Groups((4, 8), (1, 2)),),
        seed=2,
        is_causal=False,
        scale=0.7,
        options={
            "cu_seqlens": torch.tensor([0, 6, 13], dtype=torch.int32),
            "key_padding_mask": torch.arange(13)[None] % 5 == 1,
        },
    ),
    "a window": DrawnCall(
        *(1, 17, 33, 2, 1, 20),
        summands=(Rule("window", (9, 4)),),
        seed=3,
        is_causal=False,
        scale=None,
        options={"query_offset": 12, "key_offset": 0},
    ),
}


@pytest.mark.parametrize("name", IN_THE_PLANE)
def test_chosen_calls_in_the_plane_stay_within_the_error_budget(name: str) -> None:
    in_the_plane = frozenset({"slopes", "key_bias"})
    with poisoned():
        check_budget(
            ScoredCall(IN_THE_PLANE[name], 8, 3.0, in_the_plane, 0, is_in_the_plane=True),
            torch.float32,
            "triton",
            {},
            placed,
        )


def call(rows: int = 19, value_dim: int = 5, **terms: Any) -> tuple[list[Tensor], Scores]:
    """Query, key, value and, where ``terms`` has not others, one of each term."""
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE).requires_grad_()

    operands = [draw(1, rows, 2, 16), draw(1, rows, 1, 16), draw(1, rows, 1, value_dim)]
    given = {"softcap": 2.0, "slopes": draw(2), "distance_bias": draw(2, 11), "key_bias": draw(1, rows, 1)}
    return operands, Scores(**{**given, **terms})


def results(operands: list[Tensor], scores: Scores, impl: Impl, **options: Any) -> list[Tensor]:
    leaves = [*operands, *(x for x in scores.tensors if x is not None and x.requires_grad)]
    torch.manual_seed(3)
    out, lse = attend_with_lse(*operands, PATTERN, is_causal=True, scores=scores, impl=impl, **options)
    return [out, lse, *torch.autograd.grad(out.sin().sum() + lse.cos().sum(), leaves)]


def test_dropout_drops_what_the_reference_drops() -> None:
    operands, scores = call()
    found, expected = (results(operands, scores, impl, dropout_p=0.4) for impl in ("triton", "reference"))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_step_of_decoding_has_the_biases_of_its_position(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from dilated_attention_pytorch.kernels.triton.plan import KernelPlan

    monkeypatch.setattr(KernelPlan, "num_splits", splits)
    operands, scores = call(50)
    with torch.no_grad():
        whole, step = operands, [operands[0][:, :1], *operands[1:]]
        expected = attend_with_lse(*whole, PATTERN, is_causal=True, scores=scores, impl="reference")
        for position in (0, 41):
            at = torch.tensor(position, device=DEVICE)
            step[0] = operands[0][:, position : position + 1]
            found = attend_with_lse(*step, PATTERN, is_causal=True, scores=scores, query_offset=at, impl="triton")
            for got, want in zip(found, expected, strict=True):
                torch.testing.assert_close(got, want[:, position : position + 1], rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="pass query_offset as an integer"):
        attend_with_lse(
            *(x.detach() for x in step), PATTERN, is_causal=True, scores=scores, query_offset=at, impl="aten"
        )


def test_a_launch_that_was_timed_before_adds_nothing_to_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(choice: Any, launched: Any) -> Any:
        launched(choice.candidates[0])
        return choice.candidates[0]

    operands, scores = call(9)
    alone = results(operands, scores, "triton")
    monkeypatch.setattr(launch, "fastest", timed)
    torch.testing.assert_close(results(operands, scores, "triton"), alone)


def test_deterministic_algorithms_refuse_the_gradient_of_a_bias_by_distance_on_a_gpu() -> None:
    gpu = torch.device("cuda")
    launch._check_determinism(gpu)
    try:
        torch.use_deterministic_algorithms(True)
        launch._check_determinism(torch.device("cpu"))
        with pytest.raises(RuntimeError, match=r'set warn_only=True, detach the bias .* or use impl="aten"'):
            launch._check_determinism(gpu)
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="in an order that varies from run to run"):
            launch._check_determinism(gpu)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_bias_that_is_not_trained_is_not_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError("atomic additions")

    operands, scores = call(9, softcap=None, distance_bias=None, key_bias=None)
    assert scores.slopes is not None
    expected = results(operands, scores, "triton")
    monkeypatch.setattr(launch, "_check_determinism", refuse)
    found = results(operands, Scores(slopes=scores.slopes.detach()), "triton")
    assert all(torch.equal(got, want) for got, want in zip(found, expected[:-1], strict=True))
    with pytest.raises(RuntimeError, match="atomic additions"):
        results(operands, scores, "triton")


def in_the_plane(slopes: Tensor, places: Tensor) -> Scores:
    return Scores(2.0, slopes=slopes, coordinates=places)


def test_slopes_in_the_plane_are_trained_under_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> None:
        raise AssertionError("atomic additions")

    monkeypatch.setattr(launch, "_check_determinism", refuse)
    operands, _ = call(19)
    slopes, places = torch.tensor([0.5, 0.25], device=DEVICE, requires_grad=True), torch.randn(1, 19, 2, device=DEVICE)
    expected = results(operands, in_the_plane(slopes, places), "reference")
    found = results(operands, in_the_plane(slopes, places), "triton")
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    fixed = results(operands, in_the_plane(slopes.detach(), places), "triton")
    assert all(torch.equal(got, want) for got, want in zip(fixed, found[:-1], strict=True))


def test_moving_the_plane_changes_no_bit() -> None:
    operands, _ = call(9)
    places, slopes = torch.randint(40, (1, 9, 2)) / 8.0, torch.tensor([0.5, 0.25], device=DEVICE)
    with torch.no_grad():
        moved = [in_the_plane(slopes, (places + by).to(DEVICE)) for by in (0, 2**20)]
        near, far = (attend(*operands, PATTERN, scores=scores, impl="triton") for scores in moved)
    assert torch.equal(near, far)


def test_a_bias_is_trained_under_a_transform() -> None:
    operands, scores = call(9)
    assert scores.slopes is not None

    def loss(slopes: Tensor) -> Tensor:
        return attend(*operands, PATTERN, scores=Scores(slopes=slopes), impl="triton").sin().sum()

    want = torch.autograd.grad(loss(scores.slopes), scores.slopes)[0]
    found = torch.func.grad(loss)(scores.slopes.detach())
    torch.testing.assert_close(found, want)
    assert want.abs().min() > 0


def test_values_that_are_too_wide_are_refused_by_name() -> None:
    operands, scores = call(3, value_dim=257)
    with pytest.raises(NotImplementedError, match=r'up to 256 wide, got 257; use impl="aten"'):
        attend_with_lse(*operands, PATTERN, scores=scores, impl="triton")


@triton.jit
def _tanh_kernel(X, Y, NUMBERS: tl.constexpr):
    index = tl.arange(0, NUMBERS)
    tl.store(Y + index, tanh(tl.load(X + index)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
def test_the_cap_keeps_small_scores_signs_and_nan() -> None:
    sizes = torch.cat([torch.logspace(-30, 2, 508), torch.tensor([0.0, 0.6249999, 0.625, math.inf])])
    x = torch.cat([sizes, -sizes]).to(DEVICE)
    y = torch.empty_like(x)
    _tanh_kernel[(1,)](x, y, x.numel())
    exact = torch.tanh(x.double())
    error = ((y - exact).abs() / exact.abs()).nan_to_num(0.0)
    assert float(error.max()) < 4 * 2.0**-24
    assert torch.equal(y.sign(), x.sign())
    x.fill_(math.nan)
    _tanh_kernel[(1,)](x, y, x.numel())
    assert y.isnan().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # as above
def test_a_tiny_cap_makes_all_scores_equal() -> None:
    operands, _ = call(3)
    query = operands[0].detach().clone()
    query[:, 1] = 0.0
    found, expected = (attend(query, *operands[1:], PATTERN, scores=Scores(softcap=1e-42), impl=impl) for impl in IMPLS)
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected)
