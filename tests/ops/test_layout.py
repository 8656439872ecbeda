"""Tensors whose axes look swapped: said once, at every entry, and never of calls that are ordinary."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch import DilatedPattern, attend, attend_with_lse, dilated_attention, parallel
from dilated_attention_pytorch.nn import (
    AdaptiveBlockAttention,
    DilatedAttention,
    DynamicDilatedAttention,
    PatternAttention,
)
from dilated_attention_pytorch.ops import attend_blocks, validation

PATTERN = DilatedPattern([16, 64], [1, 4])
MESSAGE = r"pass query\.transpose\(1, 2\), key\.transpose\(1, 2\) and value\.transpose\(1, 2\)"
BLOCKS = torch.zeros(2, 200, 1, 1, dtype=torch.int64)

ENTRIES: dict[str, Callable[[Tensor], Any]] = {
    "attend": lambda x: attend(x, x, x, PATTERN),
    "attend_with_lse": lambda x: attend_with_lse(x, x, x, PATTERN),
    "dilated_attention": lambda x: dilated_attention(x, x, x, [16], [1]),
    "attend_blocks": lambda x: attend_blocks(x, x, x, BLOCKS, block_size=8),
    "PatternAttention": lambda x: PatternAttention(PATTERN)(x, x, x),
    "DilatedAttention": lambda x: DilatedAttention([16], [1])(x, x, x),
    "DynamicDilatedAttention": lambda x: DynamicDilatedAttention()(x, x, x),
    "AdaptiveBlockAttention": lambda x: AdaptiveBlockAttention(200, 8, scorer_dim=4)(x, x, x),
    "ParallelDilatedAttention": lambda x: parallel.ParallelDilatedAttention([16], [1])(x, x, x),
    "RingDilatedAttention": lambda x: parallel.RingDilatedAttention([16], [1])(x, x, x),
}


@pytest.fixture(autouse=True)
def _not_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "_WARNED", [])


@pytest.mark.parametrize("entry", ENTRIES)
def test_heads_before_the_sequence_are_warned_of_once(entry: str) -> None:
    swapped = torch.randn(2, 8, 200, 8)  # [batch, heads, sequence, head_dim]
    with pytest.warns(UserWarning, match=MESSAGE) as caught:
        ENTRIES[entry](swapped)
    assert len(caught) == 1
    assert "got 200 heads and 8 rows" in str(caught[0].message)
    ENTRIES[entry](swapped)  # warnings are errors: no second one


def test_grouped_heads_before_the_sequence_are_warned_of() -> None:
    q, k = torch.randn(2, 8, 200, 4), torch.randn(2, 2, 200, 4)
    with pytest.warns(UserWarning, match=MESSAGE):
        attend(q, k, k, PATTERN)


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ((1, 32), (1, 32)),  # the first token of a text
        ((1, 128), (1, 128)),
        ((5, 128), (5, 8)),  # a short prompt of a model with many heads
        ((1, 512), (1, 1)),
        ((1, 128), (4000, 8)),  # one decoding step
        ((3, 200), (300, 200)),  # a slab of a sequence
        ((64, 64), (64, 64)),
        ((200, 200), (200, 200)),
        ((0, 4), (0, 4)),
    ],
)
def test_ordinary_calls_are_not_warned_of(queries: tuple[int, int], keys: tuple[int, int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q, k = torch.randn(1, *queries, 4), torch.randn(1, *keys, 4)
        attend(q, k, k, PATTERN, query_offset=max(0, keys[0] - queries[0]))


def test_unequal_lengths_with_the_heads_first_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"got 1 query heads and 200 key/value heads; .*\.transpose\(1, 2\)"):
        attend(torch.randn(1, 8, 1, 4), torch.randn(1, 8, 200, 4), torch.randn(1, 8, 200, 4), PATTERN)


def test_a_compiled_call_is_one_graph_and_not_warned_of() -> None:
    compiled = torch.compile(lambda x: attend(x, x, x, PATTERN), fullgraph=True, backend="eager")
    x = torch.randn(1, 4, 150, 8)
    torch.testing.assert_close(compiled(x), attend_quietly(x))


def attend_quietly(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return attend(x, x, x, PATTERN)
