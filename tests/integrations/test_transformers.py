"""Models of transformers under a pattern: equal to sdpa, to eager with dense counts, to rows alone, to naive text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from dilated_attention_pytorch import DilatedPattern, local_window
from dilated_attention_pytorch.integrations import BoundedCache, register, set_pattern
from integrations.tiny_models import (
    ARCHITECTURES,
    DECODERS,
    PATTERN,
    close,
    dense_logits,
    draw,
    logits,
    tiny,
)

register()
LENGTHS = (1, 7, 63, 100)


def gradients(model: Any, out: Tensor) -> list[Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return list(
        torch.autograd.grad(out, [p for p in model.parameters() if p.requires_grad], weights, allow_unused=True)
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_group_over_the_whole_length_gives_the_logits_of_sdpa(name: str) -> None:
    model, plain = set_pattern(tiny(name), DilatedPattern([257], [1])), tiny(name, "sdpa")
    with torch.no_grad():
        for length in LENGTHS:
            tokens = draw(2, length, seed=length)
            close(logits(model, name, tokens), logits(plain, name, tokens))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_dilated_pattern_gives_the_logits_and_gradients_of_eager_with_its_counts(name: str) -> None:
    model, plain = set_pattern(tiny(name), PATTERN), tiny(name, "eager")
    for length in LENGTHS:
        tokens = draw(2, length, seed=length)
        actual, expected = logits(model, name, tokens), dense_logits(plain, name, tokens, PATTERN)
        close(actual, expected)
        for ours, theirs in zip(gradients(model, actual), gradients(plain, expected), strict=True):
            close(ours, theirs)


PADDED = [
    ("llama", "left"),
    ("llama", "right"),
    ("bart", "right"),  # its learned positions count the padding before a row, which is then another input
    *(pytest.param(*one.values, "both", marks=one.marks) for one in ARCHITECTURES if one.values != ("bart",)),
]


@pytest.mark.parametrize(("name", "side"), PADDED)
def test_a_padded_batch_equals_its_rows_alone(name: str, side: str) -> None:
    model = set_pattern(tiny(name), PATTERN)
    tokens, mask, runs = padded_batch(side)
    real = [logits(model, name, tokens, mask)[row, start:stop] for row, (start, stop) in enumerate(runs)]
    alone = [logits(model, name, tokens[row : row + 1, start:stop])[0] for row, (start, stop) in enumerate(runs)]
    for ours, theirs in zip(real, alone, strict=True):
        close(ours, theirs)
    for ours, theirs in zip(gradients(model, torch.cat(real)), gradients(model, torch.cat(alone)), strict=True):
        close(ours, theirs)


def padded_batch(side: str) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    """Tokens and mask ``[4, 41]``, and the run of real tokens of every row; the first has no padding."""
    runs = [(0, 41)]
    for length in (7, 1, 30):
        start = {"left": 41 - length, "right": 0, "both": 5}[side]
        runs.append((start, start + length))
    mask = torch.zeros(4, 41, dtype=torch.int64)
    for row, (start, stop) in enumerate(runs):
        mask[row, start:stop] = 1
    return draw(4, 41) * mask, mask, runs


def naive(model: Any, name: str, prompt: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Greedy text of one row with everything computed anew at every step, and the logits that chose it."""
    text, scores = (torch.ones(1, 1, dtype=torch.int64) if name == "bart" else prompt), []
    with torch.no_grad():
        for _ in range(steps):
            if name == "bart":
                out = model(prompt, decoder_input_ids=text, use_cache=False).logits
            else:
                out = model(text, use_cache=False).logits
            scores.append(out[:, -1])
            text = torch.cat([text, out[:, -1:].argmax(dim=-1)], dim=1)
    return text[:, -steps:], torch.stack(scores, dim=1)


def generated(model: Any, prompt: Tensor, steps: int, **options: Any) -> tuple[Tensor, Tensor]:
    result = model.generate(
        prompt, max_new_tokens=steps, do_sample=False, output_logits=True, return_dict_in_generate=True, **options
    )
    return result.sequences[:, -steps:], torch.stack(result.logits, dim=1)


def as_generated(actual: Tensor, expected: Tensor) -> None:
    """``generate`` hands out its logits in float32."""
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_generate_equals_naive_generation(name: str) -> None:
    model, prompt = set_pattern(tiny(name), PATTERN), draw(1, 30)
    expected_text, expected_scores = naive(model, name, prompt, 14)
    for cache in ("dynamic", "static"):
        text, scores = generated(model, prompt, 14, cache_implementation=cache)
        assert torch.equal(text, expected_text)
        as_generated(scores, expected_scores)


@pytest.mark.parametrize("name", DECODERS)
def test_generate_from_a_padded_batch_equals_its_rows_alone(name: str) -> None:
    model = set_pattern(tiny(name), PATTERN)
    tokens, mask, runs = padded_batch("left")
    expected = [naive(model, name, tokens[row : row + 1, start:stop], 8) for row, (start, stop) in enumerate(runs)]
    expected_text, expected_scores = (torch.cat(parts) for parts in zip(*expected, strict=True))
    ways: list[dict[str, Any]] = [
        {},
        {"cache_implementation": "static"},
        {"past_key_values": BoundedCache(model.config)},
        {"prefill_chunk_size": 17},
    ]
    for options in ways:
        text, scores = generated(model, tokens, 8, attention_mask=mask, **options)
        assert torch.equal(text, expected_text)
        as_generated(scores, expected_scores)


@pytest.mark.parametrize("name", DECODERS)
def test_logits_with_every_cache_are_those_without(name: str) -> None:
    model = set_pattern(tiny(name), PATTERN)
    tokens, mask, _ = padded_batch("left")
    more = draw(4, 41)
    tokens, mask = torch.cat([tokens, more], dim=1), torch.cat([mask, torch.ones_like(more)], dim=1)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    caches = [DynamicCache(config=model.config), StaticCache(model.config, 90), BoundedCache(model.config)]
    with torch.no_grad():
        expected = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits[mask.bool()]
        for cache in caches:
            parts, end = [], 0
            for length in (41, 1, 1, 23, 16):
                end += length
                new = slice(end - length, end)
                parts.append(
                    model(
                        tokens[:, new],
                        attention_mask=mask[:, :end],
                        position_ids=positions[:, new],
                        past_key_values=cache,
                    ).logits
                )
            close(torch.cat(parts, dim=1)[mask.bool()], expected)
            assert cache.get_seq_length() == 82


def test_a_bounded_cache_stops_growing() -> None:
    model = set_pattern(tiny("llama"), PATTERN)
    cache, tokens = BoundedCache(model.config), draw(2, 257)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in tokens.split([100, 1, 1, 33, 122], dim=1)]
        close(torch.cat(parts, dim=1), model(tokens, use_cache=False).logits)
    assert max(cache.rows_per_head(0)) <= 8 + 12
    assert cache.num_bytes < 2 * 2 * 2 * 257 * 24 * 8 / 4


def test_rows_of_a_bounded_cache_are_repeated_selected_and_forgotten() -> None:
    model = set_pattern(tiny("llama"), PATTERN)
    cache, tokens, more = BoundedCache(model.config), draw(2, 41), draw(3, 3, seed=1)
    with torch.no_grad():
        model(tokens, past_key_values=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 2, 3]))
        cache.crop(0)
        expected = model(torch.cat([tokens[[0, 1, 1]], more], dim=1), use_cache=False).logits[:, 41:]
        close(model(more, past_key_values=cache).logits, expected)
        cache.reset()
        close(model(tokens, past_key_values=cache).logits, model(tokens, use_cache=False).logits)
    with pytest.raises(NotImplementedError, match="a BoundedCache cannot roll back tokens"):
        cache.crop(-1)


def test_beam_search_with_a_bounded_cache_equals_that_with_the_model_s_own() -> None:
    model, prompt = set_pattern(tiny("qwen3"), PATTERN), draw(2, 25)
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 20, "do_sample": False}
    own = model.generate(prompt, **options)
    assert torch.equal(model.generate(prompt, past_key_values=BoundedCache(model.config), **options), own)


@pytest.mark.parametrize("cache", ["dynamic", "static", "bounded"])
def test_a_window_of_the_model_s_own_is_kept(cache: str) -> None:
    model, plain = tiny("mistral", sliding_window=9), tiny("mistral", "sdpa", sliding_window=9)
    tokens, mask, _ = padded_batch("left")
    with torch.no_grad():
        real = mask.bool()
        close(logits(model, "mistral", tokens, mask)[real], logits(plain, "mistral", tokens, mask)[real])
        for length in LENGTHS:
            close(model(draw(2, length)).logits, plain(draw(2, length)).logits)
    options = {"past_key_values": BoundedCache(model.config)} if cache == "bounded" else {"cache_implementation": cache}
    text, scores = generated(model, tokens, 12, attention_mask=mask, **options)
    expected_text, expected_scores = generated(plain, tokens, 12, attention_mask=mask)
    assert torch.equal(text, expected_text)
    as_generated(scores, expected_scores)


MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}


@pytest.mark.parametrize(
    ("name", "changes"), [("Gemma3", MIXED), ("qwen3", {**MIXED, "use_sliding_window": True, "max_window_layers": 0})]
)
def test_a_pattern_is_for_the_layers_without_a_window(name: str, changes: dict[str, Any]) -> None:
    model = set_pattern(tiny(name, **changes), PATTERN)
    by_layer = set_pattern(tiny(name, **changes), [None, PATTERN])
    without = {**changes, "layer_types": ["full_attention"] * 2}
    same = set_pattern(tiny(name, **without), [local_window(8), PATTERN])
    tokens = draw(2, 63)
    with torch.no_grad():
        close(model(tokens).logits, by_layer(tokens).logits)
        if name != "Gemma3":  # its two kinds of layers have rotary angles of their own
            close(model(tokens).logits, same(tokens).logits)
    text, scores = generated(model, tokens[:1], 8)
    expected_text, expected_scores = naive(model, name, tokens[:1], 8)
    assert torch.equal(text, expected_text)
    as_generated(scores, expected_scores)
