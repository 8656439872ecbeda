"""Patterns: the definition, equality, sums, text form, pictures."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch import DilatedPattern
from dilated_attention_pytorch.patterns import pattern_from_spec
from support.drawn import examples
from support.oracle import Groups, dense_counts

RULES = st.sampled_from(["modulo", "block"])


@examples(100)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=3),
    RULES,
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
    st.integers(1, 5),
    st.booleans(),
)
def test_counts_follow_the_definition(
    pairs: list[tuple[int, int]], rule: str, shift: list[int], heads: int, causal: bool
) -> None:
    lengths, rates = zip(*pairs, strict=True)
    pattern = DilatedPattern(lengths, rates, offset_rule=rule, segment_shift=shift)
    got = pattern.counts(torch.arange(37), torch.arange(37), heads, is_causal=causal)
    want, _ = dense_counts(Groups(lengths, rates, rule, "ragged", tuple(shift)), 37, 37, heads, is_causal=causal)
    assert torch.equal(got.long(), want[0])


def test_a_worked_example() -> None:
    """w = 4, r = 2: head 0 takes the even rows of each segment, head 1 the odd ones."""
    counts = DilatedPattern([4], [2]).counts(torch.arange(6), torch.arange(6), 2)
    for head, p, t in itertools.product(range(2), range(6), range(6)):
        assert counts[head, p, t] == (p // 4 == t // 4 and p % 4 % 2 == head and t % 4 % 2 == head)


def test_equal_patterns_are_equal_and_hash_alike() -> None:
    one, other = DilatedPattern([4, 8], [1, 2]), DilatedPattern((4, 8), (1, 2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != DilatedPattern([4, 8], [1, 2], segment_shift=1)
    assert one + one != one


def test_sums_are_flat_and_their_counts_add() -> None:
    a, b, c = DilatedPattern([4], [1]), DilatedPattern([6], [2], offset_rule="block"), DilatedPattern([9], [3])
    assert (a + b) + c == a + (b + c)
    positions = torch.arange(20)
    total = sum(pattern.counts(positions, positions, 3) for pattern in (a, b, c))
    assert torch.equal((a + b + c).counts(positions, positions, 3), total)
    with pytest.raises(TypeError):
        a + 3


@given(st.lists(st.integers(1, 99), min_size=2, max_size=2), RULES, st.sampled_from([0, 7, (1, 2)]))
@examples(30)
def test_the_text_form_reads_back(lengths: list[int], rule: str, shift: int | tuple[int, ...]) -> None:
    pattern = DilatedPattern(lengths, [1, 3], offset_rule=rule, segment_shift=shift, tail="zero_padded")
    assert pattern_from_spec(pattern.spec) == pattern
    both = pattern + DilatedPattern([5], [5])
    assert pattern_from_spec(both.spec) == both


def test_the_picture_shows_the_counts() -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    pattern = DilatedPattern([4, 8], [1, 2])
    axes = pattern.plot(8, num_kv_heads=2, is_causal=True)
    drawn = torch.from_numpy(axes.images[0].get_array().filled(float("nan")))
    counts = pattern.counts(torch.arange(8), torch.arange(8), 2, is_causal=True).float()
    assert torch.equal(drawn[:, :8], counts[0])
    assert torch.equal(drawn[:, 10:], counts[1])
    numbered = {tick: label.get_text() for tick, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)}
    assert numbered == {first + tick: str(tick) for first in (0, 10) for tick in (0, 2, 4, 6)}
    with pytest.raises(ValueError, match="sequence_length must be at least 1, got 0"):
        pattern.plot(0)


def test_the_density_is_the_mean_of_the_counts_at_any_shift_and_length() -> None:
    draw = random.Random(7)
    for _ in range(60):
        lengths, rates = [draw.randint(1, 80) for _ in range(2)], [draw.randint(1, 9) for _ in range(2)]
        shift = [draw.randint(0, 90) for _ in range(draw.randint(1, 2))]
        rule = draw.choice(("modulo", "block"))
        pattern = DilatedPattern(lengths, rates, segment_shift=shift, offset_rule=rule)
        length, heads = draw.choice((1, 2, 7, 63, 101)), draw.randint(1, 3)
        every = torch.arange(length)
        for causal, dense in ((False, length**2), (True, length * (length + 1) // 2)):
            seen = int(pattern.counts(every, every, heads, is_causal=causal).sum())
            assert pattern.density(length, num_kv_heads=heads, is_causal=causal) == seen / (heads * dense)


def test_the_density_of_two_thousand_million_positions_makes_no_list_of_segments() -> None:
    # Every position sees itself alone, in as many segments as positions.
    assert DilatedPattern([1], [1]).density(1 << 31) == 1 / (1 << 31)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads", [(3, 3), (6, 2)])
def test_flops_are_what_pytorch_counts(heads: tuple[int, int], is_causal: bool) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from dilated_attention_pytorch import attend, local_window

    num_heads, num_kv_heads = heads
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": 5, "batch_size": 2}
    query = torch.randn(2, 101, num_heads, 5, requires_grad=True)
    key = torch.randn(2, 101, num_kv_heads, 5, requires_grad=True)
    for pattern in (DilatedPattern([16, 64], [1, 3]), DilatedPattern([7], [1]) + local_window(3)):
        with FlopCounterMode(display=False) as counter:
            out = attend(query, key, key, pattern, is_causal=is_causal)
        assert counter.get_total_flops() == pattern.flops(101, is_causal=is_causal, **sizes)
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        both = pattern.flops(101, is_causal=is_causal, is_training=True, **sizes)
        assert counter.get_total_flops() == both - pattern.flops(101, is_causal=is_causal, **sizes)


def test_wrong_numbers_for_flops_are_named() -> None:
    pattern = DilatedPattern([4], [2])
    with pytest.raises(ValueError, match="num_kv_heads must divide num_heads: got 2 of 3 heads"):
        pattern.flops(8, num_heads=3, num_kv_heads=2, head_dim=4)
    with pytest.raises(ValueError, match="head_dim must be at least 1, got 0"):
        pattern.flops(8, head_dim=0)
    with pytest.raises(TypeError, match=r"batch_size must be an integer, got 1\.5"):
        pattern.flops(8, head_dim=4, batch_size=1.5)  # type: ignore[arg-type]
