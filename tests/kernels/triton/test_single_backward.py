"""The backward by one kernel, which adds the gradient of the queries atomically, against the dense oracle."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention_pytorch import DilatedPattern, local_window
from dilated_attention_pytorch.kernels.select import is_interpreted
from dilated_attention_pytorch.kernels.triton import launch, tuning
from dilated_attention_pytorch.kernels.triton.configurations import Configuration
from dilated_attention_pytorch.kernels.triton.plan import plan_of
from dilated_attention_pytorch.kernels.triton.problem import Problem
from support.drawn import DrawnCall, block_calls, calls
from support.oracle import Groups, Rule
from support.planned import with_candidates
from support.triton_calls import DEVICE, SMALL, check, check_drawn_calls

DRAWS = 2


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    if is_interpreted():
        with_candidates(monkeypatch, Configuration(16, 16, 4, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drawn_calls_stay_within_the_error_budget(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, figure: Any
) -> None:
    monkeypatch.setattr(launch, "backward", functools.partial(launch.backward, way="single"))
    check_drawn_calls(
        f"Triton, backward by one kernel, {dtype}",
        DRAWS,
        st.one_of(calls(sizes=SMALL), block_calls(sizes=SMALL)),
        lambda call, used: check(call, dtype, used),
        figure,
    )


@pytest.mark.parametrize("causal", [False, True])
def test_a_sum_with_hidden_keys_and_grouped_heads_stays_within_the_error_budget(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "backward", functools.partial(launch.backward, way="single"))
    summands = (Groups((16, 60), (1, 3)), Rule("window", (5, 2)))
    options: dict[str, Any] = {"key_padding_mask": (torch.arange(37) % 4 == 1)[None]}
    call = DrawnCall(1, 37, 37, 1, 2, 24, summands, 4, causal, None, options)
    check(call, torch.bfloat16 if causal else torch.float32, {})


CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "a slab that begins within a segment": (21, 37, {"query_offset": 29, "key_offset": 11}),
    "packed documents, one of them empty": (
        37,
        37,
        {"cu_seqlens": torch.tensor([0, 3, 20, 20, 37], dtype=torch.int32)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_chosen_calls_stay_within_the_error_budget(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "backward", functools.partial(launch.backward, way="single"))
    queries, keys, options = CASES[case]
    call = DrawnCall(1, queries, keys, 2, 1, 16, (Groups((12, 40), (1, 3)),), 4, True, None, options)
    check(call, torch.float32, {})


def operands(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key, value and the gradient of the output."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((1, 30, 2, 16), (1, 30, 1, 16), (1, 30, 1, 16), (1, 30, 2, 16))
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def both(problem: Problem, grad_out: Tensor) -> None:
    """Hold the gradients by one kernel to those by two."""
    out, lse = launch.forward(problem)
    grad_lse = torch.linspace(-1, 1, lse.numel(), device=DEVICE).view_as(lse)
    pair, single = (launch.backward(problem, out, lse, grad_out, grad_lse, way) for way in tuning.BACKWARDS)
    for a, b in zip(pair, single, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


def test_dropout_is_the_same_for_both() -> None:
    q, k, v, grad_out = operands()
    pattern = DilatedPattern([16, 60], [1, 1]) + local_window(5, 2)
    seed = torch.tensor(7, device=DEVICE)
    both(Problem(q, k, v, pattern.groups, True, 0.25, dropout_seed=seed, dropout_p=0.4, rules=pattern.rules), grad_out)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
def test_hidden_keys_add_nothing_where_all_scores_are_low() -> None:
    """Their own score is 0 here, far above those that the log-sum-exp was taken of: its exponential is infinite."""
    q, k, v, grad_out = operands()
    # Scores are whole numbers from -256 to -64: no sum of products is rounded, whatever its order.
    q, k = 2 + (q.abs() * 100 % 3).floor(), -2 - (k.abs() * 100 % 3).floor()
    mask = (torch.arange(30, device=DEVICE) % 3 == 1)[None]
    both(Problem(q, k, v, DilatedPattern([30], [1]).groups, False, 1.0, key_padding_mask=mask), grad_out)


def test_one_kernel_is_timed_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, grad_out = operands(torch.bfloat16)
    problem = Problem(q, k, v, DilatedPattern([16], [1]).groups, False, 0.25)
    out, lse = launch.forward(problem)
    asked: list[tuple[object, ...]] = []

    def fastest(choice: tuning.Choice[Any], compute: Any) -> Any:
        asked.append(choice.candidates)
        return choice.candidates[-1]

    monkeypatch.setattr(launch, "fastest", fastest)
    plan = plan_of(problem)
    for value, expected in (("0", {"query_gradient", "key_gradient"}), ("1", {"backward", "single_backward"})):
        monkeypatch.setenv("DILATED_ATTENTION_TIME_BACKWARDS", value)
        asked.clear()
        launch.backward(problem, out, lse, grad_out, None)
        assert (tuning.BACKWARDS in asked) == (value == "1")
        assert len(asked) == len(expected)
        assert "single_backward" in vars(plan) or value == "0"


def test_deterministic_algorithms_take_the_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "INTERPRETED", SimpleNamespace(value=False))
    torch.use_deterministic_algorithms(True)
    try:
        assert tuning.fastest(tuning.Choice(tuning.BACKWARDS), lambda way: pytest.fail(f"timed {way}")) == "pair"
    finally:
        torch.use_deterministic_algorithms(False)
