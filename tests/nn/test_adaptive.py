"""Adaptive blocks: no leak from the future or another sample, gradients to every parameter, one joint softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention_pytorch import DilatedPattern, attend, core
from dilated_attention_pytorch.nn import AdaptiveBlockAttention
from dilated_attention_pytorch.patterns import global_tokens, local_window
from support.drawn import examples

HEADS, KV_HEADS, WIDTH = 6, 3, 5


def module(**options: Any) -> AdaptiveBlockAttention:
    """A module with parameters that are not where they begin."""
    options = {"block_size": 8, "blocks_per_query": 3, "scorer_dim": 4, **options}
    made = AdaptiveBlockAttention(HEADS, WIDTH, num_kv_heads=KV_HEADS, dtype=torch.float64, **options)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def rows(number: int, batch: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, number, heads, WIDTH, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return q, k, v


PATTERNS = [None, local_window(3), local_window(2) + global_tokens(2), DilatedPattern([16], [4])]


@examples(40)
@given(
    number=st.integers(1, 70),
    place=st.floats(0.0, 1.0, exclude_max=True),
    query_block_size=st.sampled_from([1, 2, 8]),
    pattern=st.sampled_from(PATTERNS),
    padded=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_changing_a_position_changes_nothing_before_it(
    number: int, place: float, query_block_size: int, pattern: Any, padded: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    attention, tensors = module(query_block_size=query_block_size, pattern=pattern), rows(number, seed=seed)
    position = int(place * number)
    mask = (torch.rand(2, number) < 0.3) if padded else None
    out = attention(*tensors, True, key_padding_mask=mask)
    for x in tensors:
        x[:, position:] = torch.randn_like(x[:, position:]) * 100
    changed = attention(*tensors, True, key_padding_mask=mask)
    assert torch.equal(out[:, :position], changed[:, :position])


def test_the_gradient_of_an_output_is_zero_for_everything_after_it() -> None:
    attention = module()
    q, k, v = (x.requires_grad_() for x in rows(45))
    for position in (0, 7, 8, 23, 44):
        grads = torch.autograd.grad(attention(q, k, v, True)[:, position].sin().sum(), (q, k, v))
        for grad in grads:
            assert grad[:, position + 1 :].count_nonzero() == 0


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("query_block_size", [1, 4, 8])
def test_every_parameter_gets_a_gradient(is_causal: bool, pattern: Any, query_block_size: int) -> None:
    attention = module(pattern=pattern, query_block_size=query_block_size)
    attention.scorer.reset_parameters()  # also where training begins
    attention(*rows(45), is_causal).sin().sum().backward()
    for name, parameter in attention.named_parameters():
        assert parameter.grad is not None, name
        heads = parameter.grad.flatten(1).abs().amax(1)
        assert bool((heads > 1e-9).all()), f"{name}: {heads}"


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("query_block_size", [1, 8])
def test_equals_a_dense_softmax_over_scores_gates_and_pattern(is_causal: bool, query_block_size: int) -> None:
    number, size = 45, 8
    attention = module(pattern=local_window(3), query_block_size=query_block_size)
    tensors = [x.requires_grad_() for x in rows(number)]
    q, k, v = tensors
    p, t = torch.arange(number)[:, None], torch.arange(number)
    # The definition, one sample, head and query block at a time.
    scorer, weights = attention.scorer, torch.zeros(2, HEADS, number, number, dtype=torch.float64)
    terms = []
    for sample in range(2):
        for head in range(KV_HEADS):
            mine = range(head * 2, head * 2 + 2)
            pooled = []
            for start in range(0, number, size):
                x = k[sample, start : start + size, head]
                pooled.append(torch.softmax(x @ scorer.key_pool[head], 0) @ x @ scorer.key_map[head])
            for start in range(0, number, query_block_size):
                seen = slice(max(0, start - query_block_size + 1), start + 1)
                if not is_causal:
                    seen = slice(start, start + query_block_size)
                scores: Any = 0.0
                for h in mine:
                    x = q[sample, seen, h]
                    share = torch.ones(len(x), dtype=torch.float64) / len(x)
                    if query_block_size > 1:
                        share = torch.softmax(x @ scorer.query_pool[h], 0)
                    scores = scores + WIDTH**-0.5 / 2 * torch.stack(
                        [share @ x @ scorer.query_map[h] @ y for y in pooled]
                    )
                own = start // size
                others = [j for j in range(len(pooled)) if (j < own if is_causal else j != own)]
                kept = sorted(others, key=lambda j: -float(scores[j].detach()))[:2]
                for block, gate in [(own, torch.zeros(())), *((j, scores[j]) for j in kept)]:
                    within = (p // query_block_size == start // query_block_size) & (t // size == block)
                    terms.append((sample, head, within.double() * gate.exp()))
    stacked = [[sum(w for s, h, w in terms if (s, h) == (i, g)) for g in range(KV_HEADS)] for i in range(2)]
    weights = torch.stack([torch.stack(heads) for heads in stacked]).repeat_interleave(2, 1)
    weights = weights + ((t >= p - 3) & (t <= p))
    if is_causal:
        weights = weights * (t <= p)
    s = torch.einsum("bnhd,bmhd->bhnm", q, k.repeat_interleave(2, 2)) * WIDTH**-0.5
    mass = weights * s.exp()
    want = torch.einsum("bhnm,bmhd->bnhd", mass / mass.sum(-1, keepdim=True), v.repeat_interleave(2, 2))
    got = attention(q, k, v, is_causal)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    operands = [*tensors, *attention.parameters()]
    grads = [torch.autograd.grad(out.sin().sum(), operands) for out in (got, want)]
    for have, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(have, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("is_causal", [True, False])
def test_with_more_blocks_than_there_are_it_sees_all(is_causal: bool) -> None:
    attention, tensors = module(blocks_per_query=50), rows(45)
    torch.nn.init.zeros_(attention.scorer.key_map)  # every gate is 1
    out = attention(*tensors, is_causal)
    torch.testing.assert_close(out, attend(*tensors, local_window(45, 45), is_causal=is_causal), rtol=0, atol=1e-12)


def test_samples_do_not_choose_for_each_other() -> None:
    attention, one, other = module(), rows(45, seed=1), rows(45, seed=2)
    alone = attention.select(*one[:2])
    both = attention.select(*(torch.cat(pair) for pair in zip(one[:2], other[:2], strict=True)))
    assert torch.equal(alone.blocks, both.blocks[:2])
    assert not torch.equal(alone.blocks, both.blocks[2:])
    assert len({tuple(head.flatten().tolist()) for head in alone.blocks[0]}) == KV_HEADS


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_own_block_is_kept_and_no_block_twice(is_causal: bool) -> None:
    blocks = module(query_block_size=4).select(*rows(45)[:2], is_causal).blocks
    own = torch.arange(12) * 4 // 8
    assert torch.equal(blocks[..., 0], own.expand(2, KV_HEADS, 12))
    for row in blocks.flatten(0, 1):
        for index, chosen in enumerate(row.tolist()):
            there = [block for block in chosen if block >= 0]
            assert len(set(there)) == len(there) == (min(3, own[index] + 1) if is_causal else 3)
            assert not is_causal or max(there) == own[index]


def test_equal_scores_take_the_first_blocks() -> None:
    attention = module()
    torch.nn.init.zeros_(attention.scorer.query_map)
    blocks = attention.select(*rows(45)[:2]).blocks
    assert blocks[0, 0].tolist() == [[0, 1, 2], [1, 0, 2], [2, 0, 1], [3, 0, 1], [4, 0, 1], [5, 0, 1]]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("query_block_size", [1, 8])
def test_padding_is_as_if_it_were_not_there(is_causal: bool, query_block_size: int) -> None:
    attention, (q, k, v) = module(query_block_size=query_block_size, pattern=local_window(2)), rows(45)
    mask = torch.zeros(2, 45, dtype=torch.bool)
    mask[:, 30:] = True
    short = attention(q[:, :30], k[:, :30], v[:, :30], is_causal)
    for x in (q, k, v):
        x[:, 30:] = float("nan")
    out = attention(q, k, v, is_causal, key_padding_mask=mask)
    torch.testing.assert_close(out[:, :30], short, rtol=0, atol=1e-12)
    left = torch.zeros(2, 45, dtype=torch.bool)
    left[:, :20] = True
    q, k, v = rows(45)
    blocks = attention.select(q, k, is_causal, key_padding_mask=left).blocks
    assert not torch.isin(blocks[..., 1:], torch.tensor([0, 1])).any(), "a block of nothing but padding"


def test_a_slab_of_queries_is_a_slice_of_the_whole() -> None:
    attention, (q, k, v) = module(query_block_size=1, pattern=local_window(4)), rows(45)
    whole = attention(q, k, v, True)
    for start, stop in ((0, 45), (17, 45), (44, 45), (9, 20)):
        slab = attention(q[:, start:stop], k, v, True, query_offset=start)
        torch.testing.assert_close(slab, whole[:, start:stop], rtol=0, atol=1e-12)


def test_density_is_what_is_computed() -> None:
    for number in (1, 8, 44, 45, 64):
        for is_causal in (False, True):
            attention = module(pattern=local_window(2, 1))
            blocks = attention.select(*rows(number)[:2], is_causal).blocks[0, 0]
            p, t = torch.arange(number), torch.arange(number)
            seen = (blocks[p // 8].unsqueeze(-1) == t // 8).sum(1)
            dense = number**2
            if is_causal:
                seen, dense = seen * (t <= p[:, None]), number * (number + 1) // 2
            static = local_window(2, 1).density(number, is_causal=is_causal)
            got, exact = attention.density(number, is_causal=is_causal), float(seen.sum()) / dense + static
            assert got == pytest.approx(exact) if is_causal or number % 8 == 0 else got >= exact
            assert got <= exact * 1.35


def test_dropout_is_for_training_and_low_precision_follows_float64() -> None:
    attention, tensors = module(dropout=0.5), rows(45)
    first, second = attention(*tensors), attention(*tensors)
    assert not torch.equal(first, second)
    attention.eval()
    exact = attention(*tensors)
    assert torch.equal(exact, attention(*tensors))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        low = [x.to(dtype) for x in tensors]
        attention.to(dtype)
        # Another block may be chosen where scores are close, so the choice is compared in its own right.
        chosen = attention.select(*low[:2])
        rounded = attention.double().select(*(x.double() for x in low[:2]))
        assert chosen.log_gates.dtype == torch.float32
        assert float((chosen.blocks == rounded.blocks).float().mean()) > 0.98
        assert attention.to(dtype)(*low).dtype == dtype


def test_one_graph_under_the_compiler() -> None:
    attention, tensors = module(pattern=local_window(3)), rows(45)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors, True), attention(*tensors, True), rtol=0, atol=1e-12)


def test_autocast_rounds_the_attention_and_not_the_choice() -> None:
    attention, tensors = module(pattern=local_window(3)).float(), [x.float() for x in rows(45)]
    chosen = attention.select(*tensors[:2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = attention.select(*tensors[:2])
        out = attention(*tensors)
    assert torch.equal(chosen.blocks, rounded.blocks)
    assert torch.equal(chosen.log_gates, rounded.log_gates)
    assert out.dtype == torch.bfloat16
    exact = attention(*tensors)
    assert (out - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("batch", "number"), [(1, 0), (0, 9), (1, 1)])
def test_an_empty_batch_or_sequence_is_no_error(batch: int, number: int, is_causal: bool) -> None:
    tensors = [x.requires_grad_() for x in rows(number, batch)]
    out = module()(*tensors, is_causal)
    assert out.shape == tensors[0].shape
    out.sum().backward()


def test_it_is_made_by_name() -> None:
    attention = core.create_dilated_attention("adaptive", num_heads=2, head_dim=8, blocks_per_query=3, block_size=16)
    assert isinstance(attention, AdaptiveBlockAttention)
    assert "blocks_per_query=3, block_size=16, query_block_size=16" in repr(attention)


MAKE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"blocks_per_query": 1}, ValueError, "blocks_per_query must be at least 2, got 1"),
    ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
    ({"block_size": 8, "query_block_size": 3}, ValueError, "query_block_size must divide block_size.* got 3 and 8"),
    ({"scorer_dim": 2.5}, TypeError, "scorer_dim must be an integer, got 2.5"),
    ({"num_kv_heads": 4}, ValueError, "num_kv_heads must divide num_heads: got 4 of 6 heads"),
    ({"pattern": 5}, TypeError, "pattern must be a Pattern such as"),
    ({"dropout": 1.0}, ValueError, "dropout must be a probability"),
]


@pytest.mark.parametrize(("options", "error", "message"), MAKE)
def test_wrong_modules_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AdaptiveBlockAttention(HEADS, WIDTH, **options)


def test_wrong_calls_are_refused() -> None:
    attention, (q, k, v) = module(), rows(45)
    with pytest.raises(ValueError, match=r"query must be \[batch, sequence, 6, 5\]"):
        attention(k, k, v)
    with pytest.raises(ValueError, match="queries must be rows of the keys' sequence: got 45 queries from position 8"):
        attention(q, k, v, query_offset=8)
    with pytest.raises(ValueError, match="query_offset must be a multiple of query_block_size 8, got 3"):
        attention(q[:, :8], k, v, query_offset=3)
    with pytest.raises(NotImplementedError, match="make the module with query_block_size=1, or pass all rows"):
        attention(q[:, :8], k, v, True, query_offset=8)
