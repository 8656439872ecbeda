"""The study of hybrid models: equal operations, texts with known repetitions, blocks that are chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
from benchmarks.hybrids import (
    CONTENT,
    KEYS,
    MADE_VOCAB,
    Hybrids,
    chart,
    contestants,
    draw,
    flops_of,
    made_pairs,
    models_of,
    runs_of,
    settings_of,
    text_of,
    texts_of,
)
from benchmarks.study import RESULTS
from benchmarks.study_texts import prepare

from benchmarks import tables
from dilated_attention_pytorch.models import LongNetForCausalLM
from dilated_attention_pytorch.training.data.tokenizer import load_tokenizer

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
GIVEN = Hybrids(length=512, width=36, vocab_size=300)


def test_every_contestant_takes_the_same_operations() -> None:
    settings = [settings_of(one, "code", 0, GIVEN) for one in contestants(512).values()]
    flops = [flops_of(one) for one in settings]
    assert max(flops) < 1.005 * min(flops)
    assert len({one.model.num_parameters for one in settings}) == 2  # one of the hybrids has gates


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
        *[[True, True, False] * 2] * 3,
        [False] * 6,
    ]
    scorers = [weight for name, weight in model.named_parameters() if ".scorer." in name]
    assert len(scorers) == 6
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in scorers)
    assert not hasattr(LongNetForCausalLM.from_longnet_config(settings.model).model.attention, "choosing")


def test_unknown_names_are_refused_and_seed_0_of_all_comes_first() -> None:
    runs = runs_of(GIVEN)
    assert [seed for _, _, seed in runs] == sorted(seed for _, _, seed in runs)
    assert len(runs) == 2 * len(contestants()) - 3 + 10
    with pytest.raises(SystemExit, match=r"names of contestants, dense, 8,192; .*: got hybrid"):
        runs_of(Hybrids(only=("hybrid",)))


def results_of(*runs: tuple[str, str, int, float]) -> dict[str, Any]:
    """Results in which everything follows from one number: bits per byte, and the share of values recalled."""
    return {
        f"{text}: {name}: {seed}": {
            "machine": {
                "command": "python -m benchmarks.hybrids",
                "threads": 2,
                "processor": "a processor",
                "vector_instructions": "AVX2",
                "versions": {"torch": "2.13.0"},
                "date": f"2026-11-2{seed}",
            },
            "steps": 700,
            "needle": [{"distance": one, "first": 8 * number, "again": number} for one in tables.NEEDLES],
            "bits_per_byte": {str(length): number for length in tables.LENGTHS},
            **(
                {
                    "recall": [
                        {"from": low, "to": 2 * low - 1, "values": low, "right": number} for low in (8, 64, 512, 4096)
                    ]
                }
                if text == "made"
                else {}
            ),
        }
        for text, name, seed, number in runs
    }


def test_tables_and_the_picture_are_made_from_the_results(tmp_path: Path) -> None:
    hybrid = "hybrid, dense far"
    results = results_of(
        ("code", CONTENT, 0, 0.6), ("made", hybrid, 0, 0.995), ("code", hybrid, 0, 0.5), ("code", hybrid, 1, 0.52)
    )
    results["made: hybrid, dense far: 0"]["recall"][1]["right"] = 0.0
    code = tables.hybrids_code(results).splitlines()
    assert code[2] == f"| {CONTENT} | 1 | 700 | 0.6000 | 0.6000 | 4.80 | 0.60 | 0.60 |"
    assert code[3] == f"| {hybrid} | 2 | 700 | 0.5100 ± 0.0100 | 0.5100 ± 0.0100 | 4.08 | 0.51 | 0.51 |"
    made = tables.hybrids_made(results).splitlines()
    assert made[2:] == [f"| {hybrid} | {100 * 0.995 * 8 / 72:.1f} % | 99.5 % | 99.5 % | 0.9950 |"]
    results[f"code: {CONTENT}: 0"]["machine"]["processor"] = "another"
    assert tables.machine_of(results) == (
        "2 threads of another, AVX2, PyTorch 2.13.0; 2 threads of a processor, AVX2, PyTorch 2.13.0, "
        "2026-11-20 to 2026-11-21."
    )
    by_length, by_distance = chart(results).axes
    labels = [line.get_label() for line in by_length.containers]
    named = [name for name, one in contestants().items() if not one.is_of_made]
    assert [label for label in labels if not label.startswith("_")] == named
    # A curve for each contestant with results, after the empty ones of the legend.
    assert (len(by_length.containers) - len(named), len(by_distance.containers)) == (2, 1)


def test_the_picture_of_the_page_is_drawn_from_the_results(tmp_path: Path) -> None:
    draw(json.loads((RESULTS / "hybrids.json").read_text()), tmp_path / "hybrids.png")
    new, old = (matplotlib.image.imread(folder / "hybrids.png") for folder in (tmp_path, PICTURES))
    assert new.shape == old.shape
    assert abs(new - old).mean() < 0.0005  # without one curve, 0.001
