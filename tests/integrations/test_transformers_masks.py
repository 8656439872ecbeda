"""Masks for every pair of tokens: recognised where they are a rule, equal to eager attention under the same mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch import local_window
from dilated_attention_pytorch.integrations import register, set_pattern
from dilated_attention_pytorch.integrations.transformers import visibility
from integrations.tiny_models import PATTERN, close, dense_mask, draw, softmax_in_its_dtype, tiny

register()
LENGTH = 29
P, T = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
REAL = torch.ones(2, LENGTH, dtype=torch.bool)
LEFT, RIGHT, BETWEEN = REAL.clone(), REAL.clone(), REAL.clone()
LEFT[1, :6], RIGHT[0, 20:], BETWEEN[1, 4:9] = False, False, False
DOCUMENTS = torch.stack([(T > 10).int() + (T > 17).int(), (T > 22).int()])
SAME = DOCUMENTS[:, :, None] == DOCUMENTS[:, None]
PREFIX = torch.tensor([11, 19])[:, None, None]

# The pairs that a mask shows, ``[B, N, N]``, and which tokens are real.
MASKS: dict[str, tuple[Tensor, Tensor]] = {
    "causal": ((T <= P).expand(2, -1, -1), REAL),
    "both ways": (REAL[:, None].expand(-1, LENGTH, -1), REAL),
    "padding before": ((T <= P) & LEFT[:, None], LEFT),
    "padding behind": ((T <= P) & RIGHT[:, None], RIGHT),
    "padding between": ((T <= P) & BETWEEN[:, None], BETWEEN),
    "padding both ways": (LEFT[:, None].expand(-1, LENGTH, -1), LEFT),
    "documents": ((T <= P) & SAME, REAL),
    "documents both ways": (SAME, REAL),
    "documents, padding behind": ((T <= P) & SAME & RIGHT[:, None], RIGHT),
    "prefix": ((T <= P) | (T < PREFIX), REAL),
    "prefix, padding before": (((T <= P) | (T < PREFIX)) & LEFT[:, None], LEFT),
    "window": (((T <= P) & (P - T < 7)).expand(2, -1, -1), REAL),
    "window, padding behind": ((T <= P) & (P - T < 7) & RIGHT[:, None], RIGHT),
    "window both ways": (((P - T).abs() < 7).expand(2, -1, -1), REAL),
}


def positions(documents: Tensor, real: Tensor) -> Tensor:
    """Positions of tokens in their documents."""
    before = (documents[:, :, None] == documents[:, None]) & (T < P) & real[:, None]
    return before.sum(dim=2)


def as_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """As users and models give it: bool, or numbers that are added."""
    mask = visible[:, None]
    return mask if dtype is torch.bool else torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -1e4)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_that_is_a_rule_is_computed_as_eager_attention_under_it_is(name: str, dtype: torch.dtype) -> None:
    visible, real = MASKS[name]
    model, eager, tokens = set_pattern(tiny("llama"), PATTERN), tiny("llama", "eager"), draw(2, LENGTH)
    counts = dense_mask(PATTERN, LENGTH, "llama", is_causal=False).expand(2, -1, -1, -1).clone()
    if "window" in name:
        counts[:] = 0.0
    else:
        own = positions(DOCUMENTS if "documents" in name else torch.zeros_like(DOCUMENTS), real)
        for row in range(2):
            counts[row] = counts[row][:, own[row]][:, :, own[row]]
    bias = counts.masked_fill(~visible[:, None], torch.finfo(torch.float64).min)
    with softmax_in_its_dtype():
        expected = eager(tokens, attention_mask=bias).logits
    out = model(tokens, attention_mask=as_mask(visible, dtype)).logits
    close(out[real], expected[real])
    weights = torch.randn(out[real].shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    for ours, theirs in zip(
        torch.autograd.grad(out[real], list(model.parameters()), weights),
        torch.autograd.grad(expected[real], list(eager.parameters()), weights),
        strict=True,
    ):
        close(ours, theirs)


@pytest.mark.parametrize("name", ["causal", "padding before"])
def test_a_mask_of_pairs_is_honoured_with_cached_tokens(name: str) -> None:
    from transformers import DynamicCache, StaticCache

    visible, real = MASKS[name]
    model, tokens = set_pattern(tiny("llama"), PATTERN), draw(2, LENGTH)
    expected = model(tokens, attention_mask=as_mask(visible, torch.bool)).logits
    for cache in (DynamicCache(config=model.config), StaticCache(model.config, LENGTH + 5)):
        parts: list[Tensor] = []
        for start, stop in ((0, 17), (17, 18), (18, LENGTH)):
            seen = visible[:, start:stop, :stop]
            if isinstance(cache, StaticCache):
                seen = torch.nn.functional.pad(seen, (0, LENGTH + 5 - stop))
            with torch.no_grad():
                part: Any = model(
                    tokens[:, start:stop], attention_mask=as_mask(seen, torch.bool), past_key_values=cache
                )
            parts.append(part.logits)
        close(torch.cat(parts, dim=1)[real], expected[real])


def test_a_mask_is_compared_once_for_all_layers_and_again_after_it_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    compare = visibility._recognised
    monkeypatch.setattr(visibility, "_recognised", lambda *given: calls.append(1) or compare(*given))
    model, mask = set_pattern(tiny("llama"), PATTERN), as_mask(MASKS["causal"][0], torch.bool).clone()
    before = model(draw(2, LENGTH), attention_mask=mask).logits
    assert len(calls) == 1
    mask |= True
    after = model(draw(2, LENGTH), attention_mask=mask).logits
    assert len(calls) == 2
    assert not torch.allclose(before, after)


def test_the_window_of_a_mask_takes_the_place_of_the_pattern() -> None:
    model, window = set_pattern(tiny("llama"), PATTERN), set_pattern(tiny("llama"), local_window(6))
    mask = as_mask(MASKS["window"][0], torch.bool)
    close(model(draw(2, LENGTH), attention_mask=mask).logits, window(draw(2, LENGTH)).logits)


def test_within_a_graph_a_mask_of_pairs_is_refused() -> None:
    mask = as_mask(MASKS["causal"][0], torch.bool).to("meta")
    with pytest.raises(NotImplementedError, match="a graph has no values"):
        visibility.visibility_of(mask, LENGTH, "LlamaAttention")
