"""The study of hybrid models: equal operations, texts with known repetitions, blocks that are chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.hybrids import (
    CONTENT,
    KEYS,
    MADE_VOCAB,
    Hybrids,
    contestants,
    flops_of,
    made_pairs,
    models_of,
    runs_of,
    settings_of,
    text_of,
    texts_of,
)
from benchmarks.study_texts import prepare

from dilated_attention_pytorch.models import LongNetForCausalLM
from dilated_attention_pytorch.training.data.tokenizer import load_tokenizer

GIVEN = Hybrids(length=512, width=36, vocab_size=300)


def test_every_contestant_takes_the_same_operations() -> None:
    settings = [settings_of(one, "code", 0, GIVEN) for one in contestants(512).values()]
    flops = [flops_of(one) for one in settings]
    assert max(flops) < 1.005 * min(flops)
    assert len({one.model.num_parameters for one in settings}) == 2  # LongNet as published has no gates


def test_a_key_of_a_made_text_has_one_value_and_comes_again_at_known_distances() -> None:
    pairs = made_pairs(3, 4608)
    assert len({pair.key for pair in pairs}) == len({(pair.key, pair.value) for pair in pairs}) == len(KEYS)
    last: dict[str, int] = {}
    for place, pair in enumerate(pairs):
        assert pair.distance == (2 * (place - last[pair.key]) if pair.key in last else 0)
        last[pair.key] = place
    again = [pair.distance for pair in pairs if pair.distance]
    assert 8 <= min(again) < 16
    assert all(sum(low <= one < 2 * low for one in again) > 40 for low in (16, 64, 256, 1024, 2048))
    fresh = [pair.distance == 0 for pair in pairs[:900]]
    assert 0.4 < sum(fresh) / len(fresh) < 0.6


def test_a_word_of_a_made_text_is_a_token(tmp_path: Path) -> None:
    given = replace(GIVEN, length=4096, documents=20)
    _, folder = prepare(tmp_path / "made", texts_of("made", given), MADE_VOCAB)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == MADE_VOCAB
    pairs = made_pairs(9, 1000)
    (tokens,) = tokenizer.encode([text_of(pairs).encode()])
    assert len(tokens) == 2000
    assert len(set(tokens[::2]) & set(tokens[1::2])) == 0


def test_far_layers_choose_blocks_by_content() -> None:
    settings = settings_of(contestants(512)[CONTENT], "made", 0, GIVEN)
    torch.manual_seed(0)
    with models_of(CONTENT):
        model = LongNetForCausalLM.from_longnet_config(settings.model)
    ids = torch.randint(256, (1, 512))
    model(ids, labels=ids).loss.backward()
    # A step with drawn windows has them in the other layers alone.
    own, drawn = model.model.patterns, settings.stages_by_step.drawn
    assert [[one != other for one, other in zip(own, patterns, strict=True)] for patterns in drawn] == [
        [True, True, False] * 2,
        [False] * 6,
    ]
    scorers = [weight for name, weight in model.named_parameters() if ".scorer." in name]
    assert len(scorers) == 6
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in scorers)
    assert not hasattr(LongNetForCausalLM.from_longnet_config(settings.model).model.attention, "choosing")


def test_unknown_names_are_refused_and_seed_0_of_all_comes_first() -> None:
    runs = runs_of(GIVEN)
    assert [seed for _, _, seed in runs] == sorted(seed for _, _, seed in runs)
    assert len(runs) == 2 * len(contestants()) + 8
    with pytest.raises(SystemExit, match=r"names of contestants, dense, 8,192; .*: got hybrid"):
        runs_of(Hybrids(only=("hybrid",)))
