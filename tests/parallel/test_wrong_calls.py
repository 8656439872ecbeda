"""Wrong calls: each message names the argument, what was expected, what came and what to do."""

from __future__ import annotations

import pytest

import wrong_calls
from dilated_attention_pytorch import DilatedPattern, parallel
from ranks import run_ranks


def test_wrong_calls_are_refused_before_anything_is_sent() -> None:
    for rank, found in enumerate(run_ranks(2, wrong_calls.refused)):
        assert not found, f"rank {rank}: " + "\n".join(found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((1, 8, 2), 2), r"shape must be \(batch, rows, query heads, head_dim\), each at least 1, got \(1, 8, 2\)"),
        (((1, 8, 2, 4), 0), r"mesh must be one or two numbers of ranks, each at least 1, got \(0,\)"),
        (((1, 8, 2, 4), (2, 2, 2)), r"mesh must be one or two numbers of ranks"),
    ],
)
def test_wrong_plans(arguments: tuple[tuple[int, ...], int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parallel.plan_parallel(DilatedPattern([4], [1]), *arguments)


def test_a_plan_that_no_strategy_can_compute_says_why() -> None:
    with pytest.raises(NotImplementedError, match=r'tail="zero_padded" needs whole sequences'):
        parallel.plan_parallel(DilatedPattern([4], [1], tail="zero_padded"), (1, 8, 2, 4), 4)


def test_modules_refuse_what_they_cannot_honour() -> None:
    with pytest.raises(ValueError, match="sequence_parallel and model_parallel are both False"):
        parallel.DistributedDilatedAttention([4], [1], sequence_parallel=False)
