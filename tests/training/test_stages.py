"""Stages of a run: its windows, patterns and learning rates are those of the step, also where it is taken up again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch import DilatedPattern
from dilated_attention_pytorch.models import LongNetForCausalLM
from dilated_attention_pytorch.training import resume, train
from dilated_attention_pytorch.training.data.corpus import read_corpus
from dilated_attention_pytorch.training.data.windows import TrainingWindows
from dilated_attention_pytorch.training.optimizer import build_optimizer
from dilated_attention_pytorch.training.settings import TrainSettings
from dilated_attention_pytorch.training.stages import Stages, StageSettings, stage_ends
from training.runs import assert_same_weights, quiet, stopped_run, tiny_settings, weights, write_texts

PATTERNS = (
    "DilatedPattern([32, 64], [1, 2])",
    "DilatedPattern([64, 128], [1, 2])",
    "DilatedPattern([64, 256], [1, 4])",
)


@given(st.integers(1, 1000), st.integers(1, 9))
def test_equal_parts_are_equal_to_a_step(steps: int, count: int) -> None:
    ends = stage_ends(steps, count)
    stages = Stages(tuple(range(count)), ends, (1,) * count)
    assert [stages.at(step) for step in range(steps)] == [step * count // steps for step in range(steps)]


@given(st.integers(1, 200), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_parts_are_the_fractions_to_a_step(steps: int, parts: list[int]) -> None:
    fractions = [part / sum(parts) for part in parts]
    ends = stage_ends(steps, len(parts), fractions)
    assert ends[-1] == steps
    for place, end in enumerate(ends):
        assert abs(end - steps * sum(parts[: place + 1]) / sum(parts)) < 1


def _settings(texts: Path, **changes: Any) -> TrainSettings:
    """Steps 0 to 2 in windows of 64, 3 and 4 in pairs of 100 instead of one of 256, 5 to 7 in windows of 256."""
    stages = StageSettings(
        lengths=(64, 100, 256), fractions=(0.375, 0.25, 0.375), learning_rates=(1.0, 0.5, 0.25), patterns=PATTERNS
    )
    return tiny_settings(
        texts,
        steps=8,
        context_length=256,
        batch_size=2,
        gradient_accumulation=2,
        stages=stages,
        save_steps=3,
        precision="float32",
        **changes,
    )


def test_a_run_takes_the_steps_of_its_stages(tmp_path: Path) -> None:
    """Against a loop over windows, patterns and learning rates that are written out here."""
    texts = write_texts(tmp_path / "texts")
    settings = _settings(texts, optimizer="adamw", warmup_fraction=0.0, schedule="constant", weight_decay=0.0)
    settings = dataclasses.replace(settings, model=dataclasses.replace(settings.model, dropout=0.0))
    train(settings, tmp_path / "run", quiet())

    torch.manual_seed(settings.seed)
    model = LongNetForCausalLM.from_longnet_config(settings.model)
    optimizer = build_optimizer(model, settings)
    text = read_corpus(settings.data, say=None).training
    lengths, rows = [64] * 3 + [100] * 2 + [256] * 3, [4] * 3 + [2] * 2 + [1] * 3
    patterns = [DilatedPattern([32, 64], [1, 2])] * 3 + [DilatedPattern([64, 128], [1, 2])] * 2
    patterns += [DilatedPattern([64, 256], [1, 4])] * 3
    rates = [1.0] * 3 + [0.5] * 2 + [0.25] * 3
    for step, (length, count, pattern, rate) in enumerate(zip(lengths, rows, patterns, rates, strict=True)):
        windows = TrainingWindows(text, length, 1 << 20, seed=settings.seed, file_start_fraction=0.0)
        # A step has four batches of what is in the place of one window of 256; each has four places for windows.
        tokens = [windows[4 * (4 * step + batch) + row]["input_ids"] for batch in range(4) for row in range(count)]
        shifts = settings.model.layer_segment_shifts
        lengths_and_rates = pattern.segment_lengths, pattern.dilation_rates
        model.model.patterns = tuple(
            DilatedPattern(*lengths_and_rates, segment_shift=shifts[layer % len(shifts)])
            for layer in range(settings.model.num_layers)
        )
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * rate
        batch = torch.stack(tokens)
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    expected = model.state_dict()
    for name, weight in weights(tmp_path / "run").items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=2e-5)


def test_a_run_that_stops_within_a_stage_goes_on_as_if_it_had_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _settings(write_texts(tmp_path / "texts"))
    train(settings, tmp_path / "whole", quiet())
    stopped_run(monkeypatch, settings, tmp_path / "stopped", 4)
    resume(tmp_path / "stopped", quiet())
    assert_same_weights(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lengths": (256, 64)}, "must rise and end with the context_length 256"),
        ({"lengths": (4, 256)}, r"stages.lengths must be integers of at least 8, got \[4, 256\]"),
        ({"lengths": (64, 256), "fractions": (1.0,)}, "must have an entry for each of the 2 stages.lengths"),
        ({"lengths": (64, 256), "learning_rates": (0.0, 1.0)}, "stages.learning_rates must be finite numbers above 0"),
        ({"lengths": (64, 256), "patterns": ("x", "y")}, "stages.patterns: "),
        (
            {"lengths": (64, 256), "patterns": ("local_window(8)",) * 2},
            r"all else is the model's: got local_window\(8\)",
        ),
        ({"lengths": (64, 256), "patterns": ("DilatedPattern([64], [128])",) * 2}, "dilation_rates"),
        ({"windows": (1,)}, "must have an entry for each of the 0 stages.lengths"),
    ],
)
def test_stages_that_a_run_cannot_have_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tiny_settings(Path("x"), context_length=256, stages=StageSettings(**changes))
