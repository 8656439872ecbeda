"""Laws that hold on every number of ranks; the checks themselves are in checks.py, where the ranks find them."""

from __future__ import annotations

from typing import Any

import pytest

import checks
from ranks import run_ranks

CHECKS: list[checks.Check] = [
    checks.dropout_drops_what_one_process_drops,
    checks.dropout_by_heads_draws_apart_and_keeps_the_mean,
    checks.low_precision_stays_within_the_error_budget,
    checks.inputs_of_any_magnitude_have_the_gradients_of_one_process,
    checks.what_is_not_finite_stays_with_what_sees_it,
    checks.native_kernels_give_the_same,
    checks.what_lies_at_padded_keys_is_never_read,
    checks.the_future_changes_nothing_before_it,
    checks.autocast_casts_as_it_does_locally,
    checks.nothing_is_sent_where_segments_end_with_shards,
    checks.shard_and_unshard_are_inverse,
    checks.positions_and_labels_are_those_of_the_whole,
    checks.a_model_on_packed_documents_is_the_whole_one,
    checks.ranks_may_need_other_gradients,
    checks.autocast_on_some_ranks_is_a_disagreement,
    checks.a_compiled_module_breaks_its_graph_at_the_call,
    checks.modules_are_the_local_ones,
    checks.auto_takes_a_strategy_that_can,
    checks.implementation_reaches_every_strategy,
]


@pytest.fixture(scope="module", params=[4, pytest.param(2, marks=pytest.mark.slow)], ids="{} ranks".format)
def found(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, tuple[str | None, Any]]]]:
    return request.param, run_ranks(request.param, checks.run_checks, CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_law(check: checks.Check, found: tuple[int, list[dict[str, tuple[str | None, Any]]]], figure: Any) -> None:
    world, ranks = found
    for rank, of_rank in enumerate(ranks):
        error, _ = of_rank[check.__name__]
        assert error is None, f"rank {rank}: {error}"
    measured = ranks[0][check.__name__][1]
    if measured is not None:
        figure(f"{world} ranks, {check.__name__.replace('_', ' ')}", measured)
