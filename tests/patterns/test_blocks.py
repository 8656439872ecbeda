"""Windows, blocks and global tokens: the definition, text form, density, spans, heads, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch import (
    DilatedPattern,
    Pattern,
    attend,
    from_block_mask,
    global_tokens,
    hierarchical,
    local_window,
    per_head,
    random_blocks,
    strided_blocks,
)
from dilated_attention_pytorch.patterns import blocks, pattern_from_expression, pattern_from_spec
from dilated_attention_pytorch.patterns.expression import pattern_from_text, text_of
from dilated_attention_pytorch.patterns.rules import NO_END
from support.drawn import block_calls, examples, pattern_of, rules
from support.oracle import Rule, dense_counts


@st.composite
def sized_rules(draw: st.DrawFn) -> tuple[Rule, int, int]:
    length, heads = draw(st.integers(1, 120)), draw(st.integers(1, 4))
    return draw(rules(length, heads)), length, heads


@examples(150)
@given(sized_rules(), st.booleans())
def test_counts_and_density_follow_the_definition(drawn: tuple[Rule, int, int], causal: bool) -> None:
    rule, length, heads = drawn
    pattern = pattern_of(rule)
    want, _ = dense_counts(rule, length, length, heads, is_causal=causal)
    assert torch.equal(
        pattern.counts(torch.arange(length), torch.arange(length), heads, is_causal=causal), want[0].int()
    )
    dense = heads * (length * (length + 1) // 2 if causal else length**2)
    assert pattern.density(length, num_kv_heads=heads, is_causal=causal) == int(want.sum()) / dense


@examples(150)
@given(sized_rules(), st.tuples(*[st.integers(0, 120)] * 4))
def test_spans_hold_what_the_rule_shows_once_and_the_band_the_rest(
    drawn: tuple[Rule, int, int], bounds: tuple[int, int, int, int]
) -> None:
    rule, length, heads = drawn
    a, b, c, d = (min(bound, length) for bound in bounds)
    queries, keys = (min(a, b), max(a, b)), (min(c, d), max(c, d))
    (ruled,) = pattern_of(rule).rules[:1] if rule.of_heads[1] == 1 else pattern_of(rule).rules[rule.of_heads[0] :][:1]
    for head in range(heads):
        got = torch.zeros(length, length, dtype=torch.int64)
        for q0, q1, k0, k1 in zip(*(x.tolist() for x in ruled.spans(head, heads, queries, keys)), strict=True):
            assert queries[0] <= q0 < q1 <= queries[1]
            assert keys[0] <= k0 < k1 <= keys[1]
            got[q0:q1, k0:k1] += 1
        assert got.max() <= 1
        distance = torch.arange(length) - torch.arange(length)[:, None]
        before, after = ruled.band(is_causal=False)
        got *= (distance >= -(length if before is None else before)) & (
            distance <= (length if after is None else after)
        )
        every = torch.arange(length)
        want = ruled.sees(head, heads, every[:, None], every[None, :]).long()
        inside = torch.zeros_like(want)
        inside[queries[0] : queries[1], keys[0] : keys[1]] = 1
        assert torch.equal(got, want * inside)


@examples(100)
@given(sized_rules())
def test_no_query_sees_a_key_after_the_last_one_said_to(drawn: tuple[Rule, int, int]) -> None:
    rule, length, heads = drawn
    every = torch.arange(length)
    for ruled in pattern_of(rule).rules:
        for head in range(heads):
            seen = ruled.sees(head, heads, every[:, None], every[None, :])
            last = (seen * (every[:, None] + 1)).amax(0) - 1
            said = ruled.last_query(head, heads, every)
            assert (said >= last).all()
            if rule.name == "window" and ruled.kind(head, heads) is not None:
                assert torch.equal(said.clamp(max=length - 1), last)


@examples(60)
@given(block_calls(with_padding=False))
def test_the_text_form_reads_back_and_heads_are_picked(call: Any) -> None:
    pattern = call.pattern
    again = pattern_from_spec(pattern.spec)
    assert again == pattern
    assert hash(again) == hash(pattern)
    heads, every = [call.kv_heads - 1, 0], torch.arange(min(call.num_queries, call.num_keys))
    whole = pattern.counts(every, every, call.kv_heads)
    part = pattern.for_heads(heads, call.kv_heads)
    assert torch.equal(part.counts(every, every, 2), whole[heads])
    assert pattern_from_spec(part.spec) == part
    for one in (pattern, part):
        assert pattern_from_text(text_of(one)) == one
    assert text_of(part) == part.spec
    assert text_of(pattern) != pattern.spec or "from_block_mask" in repr(pattern)
    turned = part.for_heads([1], 2)
    assert torch.equal(turned.counts(every, every, 1), whole[:1])


def test_two_lists_of_patterns_per_head_are_not_written_as_one() -> None:
    both = per_head([local_window(1), local_window(2)]) + per_head([local_window(3), local_window(4)])
    assert text_of(both) == both.spec
    assert pattern_from_text(both.spec) == both


@pytest.mark.parametrize("density", [1 / 20, 0.1, 0.2, 0.3, 0.5, 1.0])
def test_the_density_asked_for_is_the_density_got(density: float) -> None:
    """Where the number of blocks is a multiple of the P of which every query block sees m."""
    pattern = random_blocks(density, block_size=4, seed=3)
    assert pattern.density(4 * 60, num_kv_heads=2) == pytest.approx(density, rel=1e-12)
    every = torch.arange(240)
    assert (pattern.counts(every, every, 2).sum(-1) == round(density * 240)).all()  # of every row, not in the mean
    assert strided_blocks(5, block_size=4).density(240) == pytest.approx(0.2)


def test_random_blocks_do_not_depend_on_the_length_and_differ_by_head_and_seed() -> None:
    short, long = torch.arange(96), torch.arange(960)
    pattern = random_blocks(0.25, block_size=8, seed=1)
    counts = pattern.counts(long, long, 3)
    assert torch.equal(counts[:, :96, :96], pattern.counts(short, short, 3))
    assert not torch.equal(counts[0], counts[1])
    assert not torch.equal(counts, random_blocks(0.25, block_size=8, seed=2).counts(long, long, 3))
    # Every key block is drawn about equally often: 120 query blocks draw 1 of 4, binomial.
    of_block = counts[0, ::8, ::8].sum(0).float()
    assert abs(of_block.mean() - 30) < 1e-6
    assert of_block.std() < 2 * (120 * 0.25 * 0.75) ** 0.5


def test_a_mask_is_kept_as_it_was() -> None:
    mask = torch.rand(2, 3, 3) < 0.5
    pattern = from_block_mask(mask, 2)
    before = pattern.counts(torch.arange(5), torch.arange(5), 2)
    mask.fill_(False)
    assert torch.equal(pattern.counts(torch.arange(5), torch.arange(5), 2), before)


def test_a_pattern_is_printed_as_the_call_that_makes_it() -> None:
    for text in (
        "DilatedPattern([8, 16], [1, 2])",
        "DilatedPattern([8], [2], offset_rule='block', tail='zero_padded', segment_shift=3)",
        "local_window(3)",
        "local_window(3, 1)",
        "global_tokens(2)",
        "global_tokens(1, beyond=0)",
        "global_tokens(3, beyond=7)",
        "strided_blocks(4, block_size=32)",
        "random_blocks(0.3333333333333333, seed=5, block_size=128)",
        "hierarchical(2, levels=3, factor=2, block_size=128)",
        "local_window(3) + global_tokens(2) + DilatedPattern([8], [1])",
    ):
        pattern = pattern_from_expression(text)
        assert repr(pattern) == text
        assert pattern_from_expression(repr(pattern)) == pattern
    assert (
        repr(from_block_mask(torch.eye(3, dtype=torch.bool)[None], 2))
        == "from_block_mask(<bool [1, 3, 3]>, block_size=2)"
    )
    mixed = per_head([local_window(0), local_window(1)])
    assert repr(mixed) == "local_window(0) for heads g mod 2 == 0 + local_window(1) for heads g mod 2 == 1"
    assert repr(global_tokens(1).for_heads([2], 4)) == "global_tokens(1) (heads [2] of 4)"


def test_the_picture_shows_sums() -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    pattern = local_window(2) + global_tokens(1) + DilatedPattern([4], [2])
    axes = pattern.plot(9)
    drawn = torch.from_numpy(axes.images[0].get_array().filled(float("nan")))
    assert torch.equal(drawn, pattern.counts(torch.arange(9), torch.arange(9), 1)[0].float())


def test_no_row_of_keys_is_needed_that_the_pattern_does_not_show() -> None:
    """NaN wherever nobody looks."""
    q, k, v = torch.randn(3, 1, 200, 2, 8, dtype=torch.float64).unbind()
    pattern = from_block_mask(torch.eye(13, dtype=torch.bool)[None].roll(1, 2) * (torch.arange(13) < 9)[:, None], 16)
    expected = attend(q, k, v, pattern)
    hidden = pattern.counts(torch.arange(200), torch.arange(200), 2).sum((0, 1)) == 0
    assert hidden.any()
    k[:, hidden] = v[:, hidden] = float("nan")
    assert torch.equal(attend(q, k, v, pattern), expected)


MASK = torch.ones(1, 2, 2, dtype=torch.bool)
WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: local_window(-1), ValueError, "before must be at least 0 and below 2\\^31, got -1"),
    (lambda: local_window(2**63 - 1), ValueError, "before must be at least 0 and below .* got 9223372036854775807"),
    (lambda: hierarchical(1, levels=100), ValueError, r"must stay below 2\^31, got 1 \* 2\^99; take fewer levels"),
    (lambda: local_window(1).density(1.5), TypeError, "sequence_length must be an integer, got 1.5"),
    (lambda: per_head(local_window(1)), TypeError, "put it in a list"),
    (lambda: local_window(2.0), TypeError, "before must be an integer, got 2.0 of type float"),
    (lambda: global_tokens(0), ValueError, "num_tokens must be at least 1 and below 2\\^31, got 0"),
    (lambda: global_tokens(1, beyond=-1), ValueError, "beyond must be at least 0 and below 2\\^31, got -1"),
    (lambda: global_tokens(257, beyond=1), ValueError, "num_tokens must be at most 256 with beyond, got 257"),
    (lambda: strided_blocks(0), ValueError, "stride must be at least 1 .*got 0"),
    (lambda: strided_blocks(2, block_size=0), ValueError, "block_size must be at least 1 .*got 0"),
    (lambda: random_blocks(0.0), ValueError, "density must be at least 1/128 and at most 1 .* got 0.0"),
    (lambda: random_blocks(1.5), ValueError, "density .* got 1.5"),
    (lambda: random_blocks("0.1"), TypeError, "density must be a number, got '0.1' of type str"),
    (lambda: random_blocks(0.1, seed=1 << 63), ValueError, "seed must be at least 0 .* got 9223372036854775808"),
    (lambda: hierarchical(1, factor=1), ValueError, "factor must be at least 2 .*got 1"),
    (lambda: hierarchical(levels=0), ValueError, "levels must be at least 1 .*got 0"),
    (lambda: from_block_mask(MASK.int()), TypeError, "mask must be a bool tensor .* got torch.int32"),
    (lambda: from_block_mask(MASK[0]), ValueError, r"mask must have the shape .* got \(2, 2\)"),
    (lambda: from_block_mask(MASK, 2).density(5), ValueError, "covers 4 positions .* got 5; make a mask of 3 blocks"),
    (lambda: call(from_block_mask(MASK, 2), 5), ValueError, "covers 4 positions .* got 5"),
    (
        lambda: call(from_block_mask(MASK, 2), 9, cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32)),
        ValueError,
        "covers 4 positions .* got 5; make a mask of 3 blocks",
    ),
    (lambda: call(from_block_mask(MASK, 2), 4, query_offset=1), ValueError, "covers 4 positions .* got 5"),
    (lambda: call(from_block_mask(MASK.expand(3, 2, 2), 2), 4), ValueError, "has 3 heads, got a call with 2"),
    (lambda: call(local_window(1).for_heads([0], 2), 4), ValueError, "is for 1 key/value heads, got 2"),
    (lambda: local_window(1).for_heads([2], 2), ValueError, r"heads must be some of .* 0 to 1, got \[2\]"),
    (lambda: per_head([]), ValueError, "patterns must hold at least one pattern, got none"),
    (lambda: per_head([DilatedPattern([4], [1])]), ValueError, "add a dilated pattern to the result of per_head"),
    (lambda: per_head([3]), TypeError, "patterns must hold patterns, got 3 of type int"),
    (lambda: local_window(1) + 3, TypeError, "unsupported operand"),
    (lambda: local_window(1).density(0), ValueError, "sequence_length must be at least 1, got 0"),
    (lambda: local_window(1).density(10**10), ValueError, "sequence_length must be at most 2,147,483,648, .* 64 bits"),
    (lambda: strided_blocks(2, block_size=2).density(10**6), ValueError, "make 250,000,000,000 pairs of blocks"),
]


def call(pattern: Pattern, rows: int, **options: Any) -> Any:
    x = torch.randn(1, rows, 2, 4)
    return attend(x, x, x, pattern, **options)


@pytest.mark.parametrize("row", WRONG, ids=[message for _, _, message in WRONG])
def test_what_is_wrong_is_said(row: tuple[Callable[[], Any], type[Exception], str]) -> None:
    wrong, error, message = row
    with pytest.raises(error, match=message):
        wrong()


@pytest.mark.parametrize("after", [0, 9])
@pytest.mark.parametrize("number", [1, 4, 23])
def test_first_tokens_beyond_a_window_add_no_pair_twice(number: int, after: int) -> None:
    positions = torch.arange(40)
    both = local_window(9, after) + global_tokens(number, beyond=9)
    p, t = positions[:, None], positions
    seen = (t >= p - 9) & (t <= p + after) | ((p < number) | (t < number)) & ((p - t).abs() > 9)
    found = both.counts(positions, positions, 1)[0]
    assert torch.equal(found, seen.to(found.dtype))
    assert torch.equal(
        found.tril(), (local_window(9) + global_tokens(number)).counts(positions, positions, 1)[0].clamp(max=1).tril()
    )


def test_positions_without_an_end() -> None:
    (rule,) = global_tokens(3).rules
    assert rule.last_query(0, 1, torch.arange(5)).tolist() == [NO_END, NO_END, NO_END, 2, 2]


@pytest.mark.parametrize("causal", [False, True])
def test_the_density_does_not_depend_on_how_many_blocks_are_looked_at_at_once(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    patterns = (strided_blocks(3, block_size=7), random_blocks(0.3, block_size=5, seed=2), local_window(5, 2))
    at_once = [pattern.density(257, num_kv_heads=2, is_causal=causal) for pattern in patterns]
    monkeypatch.setattr(blocks, "MASK_CELLS", 1)
    assert [pattern.density(257, num_kv_heads=2, is_causal=causal) for pattern in patterns] == at_once
