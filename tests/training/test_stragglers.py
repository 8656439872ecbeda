"""The rank that the others wait for."""

from __future__ import annotations

import time

import pytest
import torch

from dilated_attention_pytorch.training.stragglers import OwnTime, is_straggler, slowest


@pytest.mark.parametrize(
    ("seconds", "step", "rank", "is_slow"),
    [
        ((1.0, 1.0, 1.6, 1.0), 1.7, 2, True),
        ((1.0, 1.4), 1.5, 1, False),  # less than one and a half times as long
        ((0.004, 0.001, 0.001), 1.0, 0, False),  # four times as long, of a step that takes a second
        ((0.0, 0.3), 0.4, 1, True),  # what the other does is nothing
        ((9.0, 1.0, 9.0, 9.0), 9.5, 0, False),  # one is fast
    ],
)
def test_a_rank_is_slow_beside_the_median_of_the_others(
    seconds: tuple[float, ...], step: float, rank: int, is_slow: bool
) -> None:
    found = slowest(seconds)
    assert found.rank == rank
    assert is_straggler(found, step) == is_slow


def test_waiting_does_not_count() -> None:
    own = OwnTime(torch.device("cpu"))
    own.mark()  # before it starts there is nothing
    own.start()
    time.sleep(0.02)
    own.mark()
    time.sleep(0.02)
    own.mark()
    time.sleep(0.3)
    own.stop()
    own.mark()
    assert 0.04 <= own.take() < 0.3
    assert own.take() == 0
