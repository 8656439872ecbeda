"""Generation with the cache draws the tokens that naive generation draws, one at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dilated_attention_pytorch.models import generate, generate_naive
from dilated_attention_pytorch.models.generation import sample


@pytest.mark.parametrize("chunk_size", [1, 9, 4096])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.8, "top_k": 11, "top_p": 0.9}])
def test_cached_generation_equals_naive_generation(make_model: Any, options: dict[str, Any], chunk_size: int) -> None:
    model, prompt = make_model(), torch.randint(29, (2, 19))
    seeds = [torch.Generator().manual_seed(5) for _ in range(2)]
    cached = list(generate(model, prompt, 40, generator=seeds[0], chunk_size=chunk_size, **options))
    naive = list(generate_naive(model, prompt, 40, generator=seeds[1], **options))
    assert torch.equal(torch.stack(cached), torch.stack(naive))


def test_tokens_come_one_by_one(make_model: Any) -> None:
    model, calls = make_model(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    stream = generate(model, torch.randint(29, (1, 7)), 10**9, temperature=0.0)
    next(stream)
    assert next(stream).shape == (1,)
    assert len(calls) == 1
    assert torch.is_grad_enabled()
    assert list(generate(model, torch.randint(29, (1, 7)), 0)) == []


def test_top_k_and_top_p_cut_the_tail() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]])).expand(2000, -1)
    assert set(sample(logits, top_k=2).tolist()) == {0, 1}
    assert set(sample(logits, top_p=0.6).tolist()) == {0, 1}
    assert set(sample(logits, top_p=0.1).tolist()) == {0}
    assert set(sample(logits).tolist()) == {0, 1, 2, 3}
    assert set(sample(logits, temperature=0.0).tolist()) == {0}
    for smallest in (1e-30, 1e-40, 5e-324):  # above 0, and below what float32 holds
        assert set(sample(logits, temperature=smallest).tolist()) == {0}
        assert set(sample(1e30 * logits, temperature=smallest).tolist()) == {0}
        assert set(sample(logits, top_p=smallest).tolist()) == {0}
    assert set(sample(logits, temperature=1e308).tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_ids": torch.zeros(1, 0, dtype=torch.int64)}, ["prompt_ids", "at least one token", "(1, 0)"]),
        ({"max_new_tokens": -1}, ["max_new_tokens", "-1"]),
        ({"temperature": -0.5}, ["temperature", "-0.5"]),
        ({"top_p": 0.0}, ["top_p", "0.0"]),
        ({"top_k": 0}, ["top_k", "0"]),
        ({"chunk_size": 0}, ["chunk_size", "0"]),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_computed(
    make_model: Any, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError) as raised:
        generate(make_model(), **{"prompt_ids": torch.zeros(1, 3, dtype=torch.int64), "max_new_tokens": 3, **changes})
    assert all(word in str(raised.value) for word in words), str(raised.value)
