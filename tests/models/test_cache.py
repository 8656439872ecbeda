"""Cached equals naive, and the cache holds what a later token can still see and nothing else."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch import (
    AttentionOutput,
    DilatedPattern,
    Pattern,
    attend,
    from_block_mask,
    global_tokens,
    hierarchical,
    local_window,
    merge,
    per_head,
    random_blocks,
    strided_blocks,
)
from dilated_attention_pytorch.models import LongNetCache, LongNetConfig
from dilated_attention_pytorch.models.cache_index import CacheIndex

TOLERANCE = 1e-12
LENGTH = 61
PATTERNS: dict[str, dict[str, Any]] = {
    "two groups, shifted layers": {},
    "rates that do not divide": {"segment_lengths": [10, 16], "dilation_rates": [3, 7], "num_kv_heads": 6},
    "longer than the text": {"segment_lengths": [11, 1000], "dilation_rates": [2, 5]},
    "one group twice": {"segment_lengths": [8, 8], "dilation_rates": [2, 2], "num_kv_heads": 2},
    "no group with every row": {"segment_lengths": [5, 13, 29], "dilation_rates": [4, 2, 8], "num_kv_heads": 1},
    "block offsets": {"segment_lengths": [6, 17], "dilation_rates": [2, 4], "offset_rule": "block", "num_kv_heads": 6},
    "full attention": {"segment_lengths": [1 << 40], "dilation_rates": [1]},
    "nothing but itself": {"segment_lengths": [1], "dilation_rates": [1]},
}
WINDOWS: dict[str, dict[str, Any]] = {
    "windows by layer": {
        "segment_lengths": [],
        "dilation_rates": [],
        "layer_segment_shifts": [0],
        "layer_patterns": ["local_window(8)", "local_window(3) + DilatedPattern([7, 23], [1, 3])"],
    }
}
SHIFTED: dict[str, dict[str, Any]] = {"shifted keys": {"shifted_keys": True}}
CHUNKS = {
    "token by token": [1] * LENGTH,
    "one chunk": [LENGTH],
    "mixed": [1, 6, 1, 1, 30, 1, 2, 19],
}


def alive(config: LongNetConfig, layer: int, head: int, tokens: int) -> list[int]:
    """The rows a later token can still see, by asking the definition for every one."""
    shift = config.layer_segment_shifts[layer % len(config.layer_segment_shifts)]
    assert config.num_kv_heads is not None
    rows = set()
    for w, r in zip(config.segment_lengths, config.dilation_rates, strict=True):
        offset = head % r if config.offset_rule == "modulo" else head // -(-config.num_kv_heads // r)
        rows |= {
            p for p in range(tokens) if (p + shift) // w == (tokens + shift) // w and (p + shift) % w % r == offset
        }
    return sorted(rows)


@pytest.mark.parametrize("pattern", [*PATTERNS, *WINDOWS, *SHIFTED])
@pytest.mark.parametrize("chunks", CHUNKS)
@torch.no_grad()
def test_cached_equals_naive_across_every_boundary(make_model: Any, pattern: str, chunks: str) -> None:
    model, ids = make_model(**(PATTERNS | WINDOWS | SHIFTED)[pattern]), torch.randint(29, (2, LENGTH))
    expected = model(ids)
    # In float32 other kernels compute than in float64: the package's own, where they can.
    for tolerance in (TOLERANCE, 1e-5) if chunks == "mixed" else (TOLERANCE,):
        cache = LongNetCache(model.config)
        logits = torch.cat([model(chunk, cache=cache) for chunk in ids.split(CHUNKS[chunks], dim=1)], dim=1)
        torch.testing.assert_close(logits.double(), expected, atol=tolerance, rtol=0)
        assert cache.tokens_seen == [LENGTH, LENGTH]
        model.float()


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("chunks", ["token by token", "mixed"])
@torch.no_grad()
def test_cached_rows_are_exactly_those_alive(make_model: Any, pattern: str, chunks: str) -> None:
    model, ids = make_model(**PATTERNS[pattern]), torch.randint(29, (1, LENGTH))
    config, cache, seen = model.config, LongNetCache(model.config), 0
    for chunk in ids.split(CHUNKS[chunks], dim=1):
        model(chunk, cache=cache)
        seen += chunk.shape[1]
        pairs = zip(config.segment_lengths, config.dilation_rates, strict=True)
        formula = sum(-(-min(w, seen) // r) for w, r in pairs)
        for layer in range(config.num_layers):
            for head in range(config.num_kv_heads):
                rows = cache.positions(layer, 0, head)
                assert rows == alive(config, layer, head, seen)
                assert len(rows) == cache.rows_per_head(layer)[0][head] <= formula


@torch.no_grad()
def test_memory_stops_growing_with_the_text(make_model: Any) -> None:
    model = make_model(segment_lengths=[16, 64], dilation_rates=[1, 4], layer_segment_shifts=[0, 8])
    cache, sizes = LongNetCache(model.config), []
    for _ in range(12):
        model(torch.randint(29, (1, 63)), cache=cache)
        for _ in range(10):
            model(torch.randint(29, (1, 1)), cache=cache)
        sizes.append(cache.num_bytes)
    head_dim, rows = 10, 16 + 64 // 4
    assert max(sizes) <= 2 * 2 * 3 * rows * head_dim * 8  # layers, k and v, heads, float64
    assert sizes[-1] == sizes[-4]


@pytest.mark.parametrize("shifted_keys", [False, True])
@pytest.mark.parametrize("chunk_size", [5, 41])
@pytest.mark.parametrize(
    "runs",
    [[(13, 41), (0, 41), (13, 41), (2, 30)], [(13, 41), (13, 41)]],
    ids=["padded left, not, left, on both sides", "padded alike"],
)
@torch.no_grad()
def test_padded_prompts_give_what_each_gives_alone(
    make_model: Any, runs: list[tuple[int, int]], chunk_size: int, shifted_keys: bool
) -> None:
    model, ids, prompt = make_model(shifted_keys=shifted_keys), torch.randint(29, (len(runs), LENGTH)), 41
    mask = torch.zeros(len(runs), LENGTH, dtype=torch.int64)
    for row, (start, stop) in enumerate(runs):
        mask[row, start:stop] = 1
    mask[:, prompt:] = 1
    cache, logits = LongNetCache(model.config), []
    for start in [*range(0, prompt, chunk_size), *range(prompt, LENGTH)]:
        stop = min(start + chunk_size, prompt) if start < prompt else start + 1
        logits.append(model(ids[:, start:stop], attention_mask=mask[:, :stop], cache=cache))
    together = torch.cat(logits, dim=1)
    for row in range(len(runs)):
        real = mask[row].bool()
        alone = model(ids[row : row + 1, real])
        torch.testing.assert_close(together[row, real], alone[0], atol=TOLERANCE, rtol=0)
    assert cache.tokens_seen == mask.sum(dim=1).tolist()


@torch.no_grad()
@pytest.mark.parametrize("shifted_keys", [False, True])
def test_reordered_rows_go_on_as_the_rows_they_became(make_model: Any, shifted_keys: bool) -> None:
    model, ids = make_model(shifted_keys=shifted_keys), torch.randint(29, (3, 41))
    mask = torch.ones(3, 41, dtype=torch.int64)
    mask[1, :7] = 0
    cache = LongNetCache(model.config)
    model(ids, attention_mask=mask, cache=cache)
    cache.reorder_cache(torch.tensor([1, 1, 2, 0, 1]))
    texts = [ids[row, 7 if row == 1 else 0 :] for row in (1, 1, 2, 0, 1)]
    for _ in range(30):
        more = torch.randint(29, (5, 1))
        logits = model(more, cache=cache)
        texts = [torch.cat([text, token]) for text, token in zip(texts, more, strict=True)]
    for row, text in enumerate(texts):
        torch.testing.assert_close(logits[row, -1], model(text[None])[0, -1], atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_transformers_names_repeat_select_and_forget_rows(make_model: Any) -> None:
    model, ids = make_model(), torch.randint(29, (2, 41))
    cache = LongNetCache(model.config)
    model(ids, cache=cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0, 2]))
    cache.crop(0)
    more = torch.randint(29, (3, 3))
    expected = model(torch.cat([ids[[1, 0, 1]], more], dim=1))[:, 41:]
    torch.testing.assert_close(model(more, cache=cache), expected, atol=TOLERANCE, rtol=0)
    cache.reset()
    torch.testing.assert_close(model(ids, cache=cache), model(ids), atol=TOLERANCE, rtol=0)
    for remove in (lambda: cache.crop(-1), lambda: cache.crop(3), cache.activate_past_recording):
        with pytest.raises(NotImplementedError, match="a LongNetCache cannot roll back tokens"):
            remove()


@torch.no_grad()
def test_the_cache_has_the_dtype_of_the_keys(make_model: Any) -> None:
    model = make_model().to(torch.bfloat16)
    ids = torch.randint(29, (1, LENGTH))
    cache = LongNetCache(model.config)
    logits = torch.cat([model(chunk, cache=cache) for chunk in ids.split(1, dim=1)], dim=1)
    rows = max(max(cache.rows_per_head(layer)[0]) for layer in range(2))
    assert cache.num_bytes <= 2 * 2 * 3 * (7 + 23 // 3 + 1) * 10 * 2
    assert rows <= 7 + 8
    assert (logits - model(ids)).float().square().mean().sqrt() < 0.05 * model(ids).float().std()


def test_what_a_cache_cannot_do_is_said(make_model: Any) -> None:
    model, ids = make_model(attention_dropout=0.1), torch.randint(29, (2, 5))
    cache = LongNetCache(model.config)
    with pytest.raises(NotImplementedError, match=r"torch\.no_grad"):
        model(ids, cache=cache)
    with torch.no_grad():
        with pytest.raises(NotImplementedError, match=r"model\.eval"):
            model.train()(ids, cache=cache)
        # A refused call leaves the cache as it was.
        torch.testing.assert_close(model.eval()(ids, cache=cache), model(ids), atol=TOLERANCE, rtol=0)
        with pytest.raises(ValueError, match=r"batch of 2 sequences.*with 1"):
            model(ids[:1], cache=cache)
        with pytest.raises(ValueError, match=r"rows of the batch, 0 to 1"):
            cache.reorder_cache(torch.tensor([0, 2]))


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_ranks_hold_every_row_once_and_equally_many(make_config: Any, pattern: str, num_ranks: int) -> None:
    config = make_config(**PATTERNS[pattern])
    sizes = {"num_kv_heads": config.num_kv_heads, "device": torch.device("cpu")}
    alone = CacheIndex(config.pattern(1), **sizes)
    ranks = [CacheIndex(config.pattern(1), **sizes, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    block = ranks[0].block_length
    for chunk in CHUNKS["mixed"]:
        steps = [cache_index.advance(chunk) for cache_index in (alone, *ranks)]
        for head in range(config.num_kv_heads):
            held = [cache_index.positions(head) for cache_index in ranks]
            assert sorted(row for rows in held for row in rows) == alone.positions(head)
            for rank, rows in enumerate(held):
                assert all(row // block % num_ranks == rank for row in rows)
                assert len(rows) <= ranks[rank].max_slots()
            # Of what each group shows to the next token a rank has its part, up to a block.
            for group in alone.pattern.groups:
                positions = torch.tensor([*alone.positions(head), alone.seen])
                segment, selected = group.locate(positions, head, config.num_kv_heads)
                seen = positions[:-1][(segment[:-1] == segment[-1]) & selected[:-1]]
                counts = (seen // block % num_ranks).bincount(minlength=num_ranks)
                assert counts.max() - counts.min() <= block
        assert sum(len(step.target) for step in steps[1:]) == len(steps[0].target)


DILATED = DilatedPattern([7, 23], [1, 3], segment_shift=[0, 5])
BLOCKS = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(3)) < 0.3
RULES: dict[str, Pattern] = {
    "a window": local_window(9),
    "nothing but itself": local_window(0),
    "a window that looks ahead, beside another": local_window(11, 4) + local_window(3),
    "global tokens": global_tokens(3),
    "global tokens and a window": global_tokens(3) + local_window(9),
    "global tokens beyond a window": global_tokens(3, beyond=9) + local_window(9),
    "strided blocks": strided_blocks(3, block_size=4),
    "random blocks": random_blocks(0.3, seed=5, block_size=4),
    "levels of blocks": hierarchical(1, levels=3, block_size=4),
    "a block mask of every head": from_block_mask(BLOCKS, 4),
    "a window and dilated groups": local_window(9) + DILATED,
    "a block mask and dilated groups": from_block_mask(BLOCKS[:1], 4) + DILATED,
    "every head its own, and dilated groups": DILATED
    + per_head([local_window(6), hierarchical(1, levels=2, block_size=5), global_tokens(2)]),
    "a rule for some heads": per_head([local_window(6), global_tokens(2) + local_window(1)]) + global_tokens(1),
}


@dataclass(frozen=True)
class Layer:
    """What a cache asks of a model: one layer with three key/value heads and any pattern."""

    of_layer: Pattern
    num_layers: int = 1
    num_kv_heads: int = 3

    def pattern(self, layer: int) -> Pattern:
        return self.of_layer


def by_cache(pattern: Pattern, tensors: list[Tensor], chunks: str, share: Any = None) -> tuple[Tensor, LongNetCache]:
    """The whole text's outputs, chunk after chunk."""
    cache = LongNetCache(Layer(pattern), share=share)  # type: ignore[arg-type]
    outs = []
    for q, k, v in zip(*(x.split(CHUNKS[chunks], dim=1) for x in tensors), strict=True):
        outs.append(cache.step(q.shape[0], q.shape[1], None, q.device).attend(0, q, k, v, 0.0))
    return torch.cat(outs, dim=1), cache


def text(heads: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, LENGTH, number, 5, generator=generator).double() for number in (heads, 3, 3)]


@pytest.mark.parametrize("pattern", RULES)
@pytest.mark.parametrize("chunks", CHUNKS)
@torch.no_grad()
def test_rules_over_a_cache_equal_naive_attention(pattern: str, chunks: str) -> None:
    out, _ = by_cache(RULES[pattern], text(), chunks)
    expected = attend(*text(), RULES[pattern], is_causal=True, impl="reference")
    torch.testing.assert_close(out, expected, atol=TOLERANCE, rtol=0)
    if chunks == "mixed":
        in_float32, _ = by_cache(RULES[pattern], [x.float() for x in text()], chunks)
        torch.testing.assert_close(in_float32.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("pattern", RULES)
@pytest.mark.parametrize("chunks", ["token by token", "mixed"])
@torch.no_grad()
def test_rows_held_under_rules_are_exactly_those_that_a_later_query_sees(pattern: str, chunks: str) -> None:
    end = 64 if "mask" in pattern else 3 * LENGTH  # a mask has no later queries
    positions = torch.arange(end)
    cache_index = CacheIndex(RULES[pattern], 3, torch.device("cpu"))
    for chunk in CHUNKS[chunks]:
        step = cache_index.advance(chunk)
        assert step.num_slots <= cache_index.max_slots()
        texts, later = positions[: cache_index.seen], positions[cache_index.seen :, None]
        for head in range(3):
            held = torch.zeros(cache_index.seen, dtype=torch.bool)
            for rule in RULES[pattern].rules:
                # Any block may be drawn again.
                held |= "random" in pattern or rule.sees(head, 3, later, texts).any(0)
            for group in RULES[pattern].groups:
                segment, selected = group.locate(positions[: cache_index.seen + 1], head, 3)
                held |= (segment[:-1] == segment[-1]) & selected[:-1]
            expected = held.nonzero().squeeze(1).tolist()
            assert cache_index.positions(head) == expected, (head, cache_index.seen)
            assert cache_index.rows_per_head[head] == len(expected)


@torch.no_grad()
def test_a_window_needs_no_more_memory_than_its_reach() -> None:
    cache = LongNetCache(Layer(local_window(9)))  # type: ignore[arg-type]
    for chunk in [40, *[1] * 50, 7, *[1] * 20]:
        q, k = torch.randn(1, chunk, 6, 5), torch.randn(1, chunk, 3, 5)
        cache.step(1, chunk, None, q.device).attend(0, q, k, k, 0.0)
        assert cache.num_bytes <= 2 * 3 * (9 + 1) * 5 * 4
    assert cache.rows_per_head(0) == [[9, 9, 9]]


@dataclass
class Threads:
    """Ranks that are threads of this process, as far as a cache asks for them."""

    size: int
    barrier: threading.Barrier
    shown: dict[int, AttentionOutput] = field(default_factory=dict)

    def of_rank(self, rank: int) -> Any:
        everyone = self

        class Share:
            size = everyone.size

            def merge(self, partial: AttentionOutput) -> AttentionOutput:
                everyone.shown[rank] = partial
                everyone.barrier.wait()
                merged = merge([everyone.shown[other] for other in range(everyone.size)])
                everyone.barrier.wait()
                return merged

        share = Share()
        share.rank = rank  # type: ignore[attr-defined]
        return share


@pytest.mark.parametrize("pattern", RULES)
def test_ranks_that_share_a_cache_equal_naive_attention_under_rules(pattern: str) -> None:
    threads = Threads(3, threading.Barrier(3, timeout=60))
    found: dict[int, tuple[Tensor, LongNetCache]] = {}

    @torch.no_grad()
    def run(rank: int) -> None:
        found[rank] = by_cache(RULES[pattern], text(), "mixed", threads.of_rank(rank))

    workers = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    expected = attend(*text(), RULES[pattern], is_causal=True, impl="reference")
    with torch.no_grad():
        _, alone = by_cache(RULES[pattern], text(), "mixed")
    for out, _ in found.values():
        torch.testing.assert_close(out, expected, atol=TOLERANCE, rtol=0)
    for head in range(3):
        held = sorted(row for _, cache in found.values() for row in cache.positions(0, 0, head))
        assert held == alone.positions(0, 0, head)
