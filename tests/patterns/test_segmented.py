"""Segments cut where the text breaks: the definition, attention under it, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch import DilatedPattern, attend, local_window
from dilated_attention_pytorch.models.cache_index import CacheIndex
from dilated_attention_pytorch.patterns import SegmentedPattern, pattern_from_spec
from support.drawn import examples
from support.oracle import dense_attention


@st.composite
def segmented(draw: st.DrawFn) -> tuple[SegmentedPattern, int]:
    inner = st.lists(st.integers(1, 139), max_size=8, unique=True)
    number = draw(st.integers(1, 3))
    boundaries = [[0, *sorted(draw(inner))] for _ in range(number)]
    rates = [draw(st.integers(1, 5)) for _ in range(number)]
    rule = draw(st.sampled_from(["modulo", "block"]))
    return SegmentedPattern(boundaries, rates, offset_rule=rule), draw(st.integers(1, 130))


def counts_of(pattern: SegmentedPattern, length: int, heads: int, *, is_causal: bool) -> torch.Tensor:
    p = np.arange(length)
    counts = np.zeros((heads, length, length), dtype=np.int64)
    for g in range(heads):
        for boundaries, r in zip(pattern.boundaries, pattern.dilation_rates, strict=True):
            offset = g % r if pattern.offset_rule == "modulo" else g // int(np.ceil(heads / r))
            segment = np.searchsorted(boundaries, p, side="right") - 1
            selected = (p - np.array(boundaries)[segment]) % r == offset
            counts[g] += (segment[:, None] == segment) & selected[:, None] & selected
    return torch.from_numpy(np.tril(counts) if is_causal else counts)


@examples(120)
@given(segmented(), st.integers(1, 3), st.booleans(), st.integers(0, 2**31))
def test_attention_under_ragged_segments_equals_the_oracle(
    drawn: tuple[SegmentedPattern, int], heads: int, causal: bool, seed: int
) -> None:
    pattern, length = drawn
    counts = counts_of(pattern, length, heads, is_causal=causal)
    assert torch.equal(
        pattern.counts(torch.arange(length), torch.arange(length), heads, is_causal=causal).long(), counts
    )
    dense = heads * (length * (length + 1) // 2 if causal else length**2)
    assert pattern.density(length, num_kv_heads=heads, is_causal=causal) == int(counts.sum()) / dense
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randn(2, length, number, 4, generator=generator, dtype=torch.float64).requires_grad_()
        for number in (2 * heads, heads, heads)
    ]
    zero_pad_keys = counts.new_zeros(1, heads, length)
    expected, _ = dense_attention(*inputs, counts[None].expand(2, -1, -1, -1), zero_pad_keys.expand(2, -1, -1), 0.5)
    out = attend(*inputs, pattern, is_causal=causal)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    for got, want in zip(*(torch.autograd.grad(x, inputs, grad) for x in (out, expected)), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


def test_regular_boundaries_are_the_dilated_pattern() -> None:
    every = torch.arange(50)
    ragged = SegmentedPattern([range(0, 50, 7), range(0, 50, 20)], [1, 3])
    assert torch.equal(ragged.counts(every, every, 4), DilatedPattern([7, 20], [1, 3]).counts(every, every, 4))


def test_the_text_form_reads_back_and_heads_are_picked() -> None:
    pattern = SegmentedPattern([[0, 4, 9], [0]], [2, 3], offset_rule="block")
    for one in (pattern, pattern + local_window(2), pattern.for_heads([2, 0], 3)):
        assert pattern_from_spec(one.spec) == one
    every = torch.arange(12)
    assert torch.equal(pattern.for_heads([2, 0], 3).counts(every, every, 2), pattern.counts(every, every, 3)[[2, 0]])


def test_what_counts_in_segments_of_one_length_refuses() -> None:
    pattern = SegmentedPattern([[0, 3]], [1]) + local_window(2)
    q = torch.randn(1, 8, 2, 4)
    with pytest.raises(NotImplementedError, match='impl="aten" computes a SegmentedPattern'):
        attend(q, q, q, pattern, impl="triton")
    with pytest.raises(NotImplementedError, match=r"a SegmentedPattern has ragged ones: got .* decode with attend"):
        CacheIndex(pattern, 2, torch.device("cpu"))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([[0, 3]], [1, 2]), ValueError, "got 1 lists of boundaries and 2 dilation rates"),
        (([[1, 3]], [1]), ValueError, r"boundaries must ascend from 0 on, got \[1, 3\]"),
        (([[0, 3, 3]], [1]), ValueError, r"boundaries must ascend from 0 on, got \[0, 3, 3\]"),
        (([[]], [1]), ValueError, "boundaries must hold at least one integer"),
        (([[0, 2.5]], [1]), TypeError, "boundaries must hold integers, got 2.5"),
    ],
)
def test_what_is_wrong_is_said(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SegmentedPattern(*arguments)
