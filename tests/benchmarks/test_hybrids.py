"""The study of hybrid models: equal operations, texts with known repetitions, blocks that are chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.hybrids import CONTENT, Hybrids, contestants, flops_of, made_text, models_of, runs_of, settings_of

from dilated_attention_pytorch.models import LongNetForCausalLM

GIVEN = Hybrids(length=512, width=36, vocab_size=300)


def test_every_contestant_takes_the_same_operations() -> None:
    settings = [settings_of(one, Path("texts"), Path("tokens"), 0, GIVEN) for one in contestants(512).values()]
    flops = [flops_of(one) for one in settings]
    assert max(flops) < 1.005 * min(flops)
    assert len({one.model.num_parameters for one in settings}) == 2  # LongNet as published has no gates


def test_half_of_the_pairs_of_a_made_text_came_before() -> None:
    words = made_text(3, 1600).split()
    pairs = list(zip(words[::2], words[1::2], strict=True))
    assert len({key for key, _ in pairs}) == len(set(pairs)) < 0.6 * len(pairs)  # a key has one value
    last: dict[tuple[str, str], int] = {}
    distances = []
    for place, pair in enumerate(pairs):
        if pair in last:
            distances.append(2 * (place - last[pair]))
        last[pair] = place
    assert min(distances) >= 32
    assert all(sum(low <= one < 2 * low for one in distances) > 20 for low in (32, 64, 128, 256, 512))


def test_far_layers_choose_blocks_by_content() -> None:
    settings = settings_of(contestants(512)[CONTENT], Path("texts"), None, 0, GIVEN)
    torch.manual_seed(0)
    with models_of(CONTENT):
        model = LongNetForCausalLM.from_longnet_config(settings.model)
    ids = torch.randint(256, (1, 512))
    model(ids, labels=ids).loss.backward()
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
