"""A slide that several ranks share: embeddings and gradients of all weights are those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from ranks import run_ranks
from slides import rank_checks


@pytest.mark.parametrize(
    ("world", "options", "tiles", "num_slides", "is_recomputed"),
    [
        (2, {"pooling": "mean"}, 100, 2, False),
        (3, {}, 257, 1, True),
        (3, {}, 1, 2, False),
        pytest.param(3, {"pooling": "mean", "tail": "ragged"}, 63, 1, True, marks=pytest.mark.slow),
    ],
)
def test_a_slide_over_ranks_has_the_loss_and_gradients_of_one_process(
    world: int, options: dict[str, Any], tiles: int, num_slides: int, is_recomputed: bool, figure: Any
) -> None:
    of_ranks = run_ranks(world, rank_checks.largest_differences, options, tiles, num_slides, is_recomputed)
    largest = max(map(max, of_ranks))
    figure(f"slide of {tiles} tiles over {world} ranks, largest relative difference in float64", f"{largest:.0e}")
    assert largest < 1e-10


def test_the_gradient_is_that_of_the_mean_of_the_ranks_losses() -> None:
    assert max(run_ranks(2, rank_checks.the_head_of_each_rank_draws_for_itself)) < 1e-11


def test_a_dropped_path_is_dropped_on_all_ranks() -> None:
    assert max(run_ranks(2, rank_checks.paths_are_dropped_for_whole_slides)) < 1e-11


def test_calls_that_ranks_cannot_share_are_refused() -> None:
    run_ranks(2, rank_checks.refused, timeout=60.0)
