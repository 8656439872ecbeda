"""Terms of the scores over several ranks: output, log-sum-exp and all gradients are those of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch import Tensor

from dilated_attention_pytorch import DilatedPattern, parallel
from dilated_attention_pytorch.ops import Scores
from drawn_shards import ShardedCase, cases, largest_error
from ranks import mesh_of, run_ranks
from support.drawn import calls, examples
from support.scored_calls import NAMES, ScoredCall, gradients, scored

Case = tuple[ShardedCase, ScoredCall]


def draw_cases(world: int, number: int, kind: str) -> list[Case]:
    found: list[Case] = []

    @examples(number)
    @given(cases(world, kind), scored(calls()))
    def collect(case: ShardedCase, call: ScoredCall) -> None:
        call.call, call.is_in_the_plane = case.call, False
        if case.strategy != "heads":
            call.names = call.names - {"key_bias"}
        found.append((case, call))

    collect()
    return found


def by_ranks(case: ShardedCase, call: ScoredCall) -> dict[str, Tensor]:
    """The results of all ranks, put together on each of them."""
    mesh, layout, drawn = mesh_of(case.mesh), {"layout": case.layout}, call.call
    tensors, *of = call.tensors(torch.float64)
    rows = {"query": drawn.num_queries, "key": drawn.num_keys}
    space = {"q": "query", "out": "query", "lse": "query", "k": "key", "v": "key", "key_bias": "key"}
    options: dict[str, Any] = {**drawn.options, "is_causal": drawn.is_causal, "scale": drawn.scale, **layout}
    if "key_padding_mask" in options:
        options["key_padding_mask"] = parallel.shard(options["key_padding_mask"], mesh, **layout)
    options |= {"mesh": mesh, "strategy": case.strategy}
    options |= {"sequence_length": rows["query"], "key_sequence_length": rows["key"]}

    def compute(leaves: dict[str, Tensor]) -> Any:
        operands = (leaves[name] for name in "qkv")
        return parallel.attend_with_lse(*operands, drawn.pattern, scores=call.scores(leaves), **options)

    parts = {name: parallel.shard(x, mesh, **layout) if name in space else x for name, x in tensors.items()}
    results = gradients(call, parts, compute, *(parallel.shard(x, mesh, **layout) for x in of))
    for name, x in results.items():
        if name in space:
            results[name] = parallel.unshard(x, mesh, sequence_length=rows[space[name]], **layout)
        else:
            dist.all_reduce(x)
    return results


def largest_errors(drawn: list[Case]) -> list[dict[str, float]]:
    found = []
    for case, call in drawn:
        results = by_ranks(case, call)
        if dist.get_rank() == 0:
            tensors, *of = call.tensors(torch.float64)
            expected = gradients(call, tensors, call.oracle, *of)
            assert expected.keys() == results.keys()
            found.append({name: largest_error(results[name], want) for name, want in expected.items()})
    return found


@pytest.mark.parametrize(("world", "kind", "number"), [(2, "groups", 10), (3, "groups", 10), (4, "rules", 10)])
def test_drawn_calls_equal_the_oracle(world: int, kind: str, number: int, figure: Any) -> None:
    drawn = draw_cases(world, number, kind)
    worst: dict[str, float] = {}
    for case, errors in zip(drawn, run_ranks(world, largest_errors, drawn)[0], strict=True):
        for name, error in errors.items():
            assert error <= 1e-10, (name, error, case)
            worst[name] = max(worst.get(name, 0.0), error)
    assert {*NAMES[1:]} - worst.keys() <= {"key_bias"}
    figure(
        f"scores over {world} ranks, {len(drawn)} drawn calls, largest errors",
        {k: f"{v:.1e}" for k, v in worst.items()},
    )


def refusals() -> list[str]:
    mesh, found = mesh_of((2,)), []
    q = torch.zeros(1, 8, 2, 4)
    bias = torch.zeros(1, 8)
    for scores, options in (
        (Scores(key_bias=bias), {"strategy": "ring"}),
        (Scores(slopes=torch.zeros(3)), {}),
        (Scores(softcap=2.0 + dist.get_rank()), {}),
        (Scores(slopes=torch.zeros(2), coordinates=torch.zeros(1, 8, 2)), {}),
    ):
        with pytest.raises((NotImplementedError, ValueError, RuntimeError)) as raised:
            parallel.attend(q, q, q, DilatedPattern([4], [1]), mesh=mesh, scores=scores, **options)
        found.append(str(raised.value))
    return found


def test_wrong_calls() -> None:
    of_keys, of_slopes, of_caps, of_coordinates = run_ranks(2, refusals)[0]
    assert "key_bias of scores does not travel with the rows of strategy='ring': use strategy=\"heads\"" in of_keys
    assert "slopes of scores must be [H] = [2], got [3]" in of_slopes
    assert "scores" in of_caps
    assert "2.0" in of_caps
    assert "3.0" in of_caps
    assert of_coordinates == "coordinates of scores do not travel between ranks: call attend on one rank"
