"""The rank that the others wait for."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from dilated_attention_pytorch.training.stragglers import OwnTime, stragglers


def entry(seconds: tuple[float, ...], step: float) -> dict[str, float]:
    return {f"own_seconds_of_rank_{rank}": own for rank, own in enumerate(seconds)} | {"step_seconds": step}


@pytest.mark.parametrize(
    ("seconds", "step", "slow"),
    [
        ((1.0, 1.0, 1.6, 1.0), 1.7, [2]),
        ((1.0, 1.4), 1.5, []),  # less than one and a half times as long
        ((0.004, 0.001, 0.001), 1.0, []),  # four times as long, of a step that takes a second
        ((0.0, 0.3), 0.4, [1]),  # what the other does is nothing
        ((9.0, 1.0, 9.0, 9.0), 9.5, []),  # one is fast
        ((3.0,), 3.0, []),
    ],
)
def test_a_rank_is_slow_by_the_median_of_the_others(seconds: tuple[float, ...], step: float, slow: list[int]) -> None:
    assert [found.rank for found in stragglers([entry(seconds, step)] * 2)] == slow


def test_a_rank_is_slow_in_two_entries_in_a_row_and_named_once() -> None:
    first, second, even = (entry(own, 3.0) for own in ((2.0, 1.0), (1.0, 2.0), (1.0, 1.0)))
    evaluation = {"step": 4, "eval_bits_per_byte": 2.0}
    assert stragglers([first, second, first, even, first]) == []
    assert [found.rank for found in stragglers([first, evaluation, first, first, second, second])] == [0, 1]
    assert [found.rank for found in stragglers([first, evaluation, first])] == [0]
    (found,) = stragglers([first, first])
    assert found.describe() == (
        "rank 0 works 2 s by itself in a step, the others 1 s (median), and they wait for it, 33% of a step"
    )


def own_time(world_size: int) -> Any:
    class Arguments:
        device = torch.device("cpu")

    Arguments.world_size = world_size
    return OwnTime(Arguments())


def test_waiting_is_part_of_a_step_and_not_of_own_work() -> None:
    own = own_time(2)
    own.mark()  # nothing has begun
    for _ in range(2):
        own.begin_step()
        time.sleep(0.02)
        own.mark()
        time.sleep(0.02)
        own.mark()
        time.sleep(0.3)
        own.stop()
        own.mark()
        own.on_step_end(TrainingArguments(use_cpu=True), TrainerState(), TrainerControl())
    seconds, step = own.take()
    assert 0.04 <= seconds < 0.3 <= step
    assert own.take() == (0.0, 0.0)


def test_a_single_rank_keeps_no_times_of_its_own() -> None:
    own = own_time(1)
    for _ in range(3):
        own.begin_step()
        own.mark()
    assert own.take()[0] == 0.0
    assert own._spans == []
