"""Queries whose position lies on the device: one plan for every position, and at each the result of the integer."""

from __future__ import annotations

import math
from typing import Any

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
    strided_blocks,
)
from dilated_attention_pytorch.kernels.triton import launch
from dilated_attention_pytorch.kernels.triton.configurations import BlockSizes
from dilated_attention_pytorch.kernels.triton.plan import plan_of
from dilated_attention_pytorch.kernels.triton.problem import Problem
from support.planned import planned, with_candidates
from support.triton_calls import DEVICE

ROWS = 131
PATTERNS: dict[str, Pattern] = {
    "groups": DilatedPattern([16, 600], [1, 3]),
    "shifted groups": DilatedPattern([16, 48], [1, 3], segment_shift=(0, 5)),
    "a window and global tokens": local_window(30) + global_tokens(2),
    "groups and blocks": DilatedPattern([16, 48], [1, 3]) + strided_blocks(2, block_size=16),
}


def buffer(num_queries: int, *, num_heads: int = 2, num_kv_heads: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_queries)
    shapes = ((1, num_queries, num_heads, 16), (1, ROWS, num_kv_heads, 16), (1, ROWS, num_kv_heads, 16))
    query, key, value = (torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes)
    return query, key, value


def filled_up_to(stop: int, *tensors: Tensor) -> list[Tensor]:
    """The tensors with NaN in the rows from ``stop`` on, which no step has written yet."""
    return [torch.cat([x[:, :stop], torch.full_like(x[:, stop:], math.nan)], 1) for x in tensors]


def check(
    got: tuple[Tensor, Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    position: int,
    **options: Any,
) -> None:
    """Hold output and log-sum-exp to those of the reference in float64 for the integer."""
    exact = [x.double() for x in (query, key, value)]
    options |= {"is_causal": True, "scale": 0.25, "impl": "reference"}
    for found, want in zip(got, attend_with_lse(*exact, pattern, query_offset=position, **options), strict=True):
        torch.testing.assert_close(found, want.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("num_queries", "num_splits"), [(1, 1), (1, 3), (5, 1)])
@pytest.mark.parametrize("name", PATTERNS)
def test_one_plan_serves_every_position(name: str, num_queries: int, num_splits: int) -> None:
    pattern, position = PATTERNS[name], torch.tensor(0, device=DEVICE)
    query, key, value = buffer(num_queries)
    plans, walks = set(), set[int]()
    for start in (0, 63, ROWS - num_queries) if num_splits == 1 else (1, 100):
        position.fill_(start)
        problem = Problem(
            query,
            *filled_up_to(start + num_queries, key, value),
            pattern.groups,
            True,
            0.25,
            position,
            rules=pattern.rules,
        )
        check(launch.forward(problem, num_splits), query, key, value, pattern, start)
        plan = plan_of(problem)
        plans.add(plan)
        walks.add(id(plan.forward.walk(plan.forward.choice.candidates[0], num_splits)))
    assert len(plans) == len(walks) == 1


def test_a_window_of_rows_is_ordered_wherever_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of a prefill: more rows than a tile, so that the order of rows is made at the position too."""
    with_candidates(monkeypatch, BlockSizes(16, 16, 4, 1))
    pattern, position = PATTERNS["shifted groups"], torch.tensor(0, device=DEVICE)
    query, key, value = buffer(40)
    for start in (7, ROWS - 40):
        position.fill_(start)
        problem = Problem(query, *filled_up_to(start + 40, key, value), pattern.groups, True, 0.25, position)
        assert plan_of(problem).forward.side.is_ordered
        check(launch.forward(problem), query, key, value, pattern, start)


def test_the_call_takes_it_with_grouped_heads_and_padding_and_any_sign_of_the_scale() -> None:
    pattern, position = PATTERNS["groups"], torch.tensor(50, device=DEVICE)
    query, key, value = buffer(2, num_heads=4, num_kv_heads=2)
    padding = torch.arange(ROWS, device=DEVICE)[None] % 3 == 1
    options: dict[str, Any] = {"is_causal": True, "key_padding_mask": padding, "query_offset": position}
    buffers = filled_up_to(52, key, value)
    for impl in ("triton", "reference"):
        got = attend_with_lse(-query, *buffers, pattern, scale=-0.25, impl=impl, **options)
        check(got, query, key, value, pattern, 50, key_padding_mask=padding)


def test_the_keys_may_begin_later_and_the_query_before_them() -> None:
    pattern, position = PATTERNS["a window and global tokens"], torch.tensor(0, device=DEVICE)
    query, key, value = buffer(1)
    options: dict[str, Any] = {"is_causal": True, "scale": 0.25, "impl": "triton", "key_offset": 100}
    for start in (3, 99, 100, 180):
        position.fill_(start)
        got = attend_with_lse(query, key, value, pattern, query_offset=position, **options)
        check(got, query, key, value, pattern, start, key_offset=100)


@pytest.mark.parametrize(("value", "taken"), [(-(2**40), 0), (ROWS, ROWS - 5), (2**62, ROWS - 5)])
def test_a_position_that_is_none_is_taken_for_the_nearest(value: int, taken: int) -> None:
    pattern, position = PATTERNS["groups and blocks"], torch.tensor(value, device=DEVICE)
    query, key, values = buffer(5)
    options: dict[str, Any] = {"is_causal": True, "scale": 0.25}
    at = {"query_offset": position}
    check(
        attend_with_lse(query, key, values, pattern, impl="triton", **at, **options), query, key, values, pattern, taken
    )
    reference = attend(query, key, values, pattern, impl="reference", **at, **options)
    assert torch.equal(reference, attend(query, key, values, pattern, impl="reference", query_offset=taken, **options))
    planned(
        Problem(query, key, values, pattern.groups, True, 0.25, position, rules=pattern.rules), (16,)
    ).check_ranges()


def test_operator() -> None:
    query, key, value = buffer(1)
    padding = torch.arange(ROWS, device=DEVICE)[None] % 3 == 1
    position = torch.tensor(7, device=DEVICE)
    biases = torch.randn(query.shape[2], ROWS, device=DEVICE), torch.randn(key.shape[:3], device=DEVICE)
    value = value[..., :5]
    arguments = (query, key, value, position, padding, *biases, PATTERNS["groups"].spec, 0.25, 0, 2.0)
    torch.library.opcheck(torch.ops.dilated_attention_pytorch.attend_at, arguments)


def test_compiled_without_a_graph_break_it_follows_the_position() -> None:
    torch._dynamo.reset()
    query, key, value = buffer(1)
    position = torch.tensor(0, device=DEVICE)

    def step(query: Tensor, position: Tensor) -> Tensor:
        return attend(query.sin(), key, value, PATTERNS["groups"], is_causal=True, query_offset=position, impl="triton")

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for start in (3, 100):
        position.fill_(start)
        assert torch.equal(compiled(query, position), step(query, position))


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_one_captured_graph_decodes_a_text() -> None:
    query, key, value = buffer(1)
    position = torch.tensor(0, device=DEVICE)
    keys, values = torch.full_like(key, math.nan), torch.full_like(value, math.nan)
    row = [torch.empty_like(key[:, :1]) for _ in range(2)]
    at: dict[str, Any] = {"is_causal": True, "scale": 0.25, "query_offset": position, "impl": "triton"}

    def step() -> Tensor:
        keys.index_copy_(1, position[None], row[0])
        values.index_copy_(1, position[None], row[1])
        return attend(query, keys, values, PATTERNS["groups"], **at)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for start in range(ROWS):
        position.fill_(start)
        for held, whole in zip(row, (key, value), strict=True):
            held.copy_(whole[:, start : start + 1])
        graph.replay()
        assert torch.equal(captured, step())
        lse = attend_with_lse(query, keys, values, PATTERNS["groups"], **at).lse
        check((captured, lse), query, key, value, PATTERNS["groups"], start)


def test_a_gradient_is_refused() -> None:
    query, key, value = buffer(1)
    position = torch.tensor(0, device=DEVICE)
    options: dict[str, Any] = {"is_causal": True, "query_offset": position, "impl": "triton"}
    for wrt in (query, key, value):
        wrt.requires_grad_()
        with pytest.raises(NotImplementedError, match=r"call it under torch.no_grad\(\), or pass query_offset as an"):
            attend(query, key, value, PATTERNS["groups"], **options)
        wrt.requires_grad_(False)
    problem = Problem(query, key, value, PATTERNS["groups"].groups, True, 0.25, position)
    out, lse = launch.forward(problem)
    with pytest.raises(NotImplementedError, match="pass query_offset as an integer"):
        launch.backward(problem, out, lse, out, None)
