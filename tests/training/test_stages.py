"""Stages of a run: its windows, patterns and learning rates are those of the step, also where it is taken up again."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch import DilatedPattern, global_tokens, local_window, per_head
from dilated_attention_pytorch.models import LongNetForCausalLM
from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.training import resume, train
from dilated_attention_pytorch.training.data.corpus import read_corpus
from dilated_attention_pytorch.training.data.windows import TrainingWindows
from dilated_attention_pytorch.training.optimizer import build_optimizer
from dilated_attention_pytorch.training.settings import TrainSettings
from dilated_attention_pytorch.training.stages import Stages, StageSettings, stage_ends
from dilated_attention_pytorch.training.trainer import LongNetTrainer
from support.oracle import signed, splitmix
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


SIZES = (3, 40, 3, 9)
"""Drawn sizes; 3 twice."""
HYBRID = ("local_window(15, 2)", "local_window(31) + DilatedPattern([64, 256], [1, 4])", "global_tokens(2)")


def _drawing(texts: Path, **changes: Any) -> TrainSettings:
    """Windows of 64 tokens in steps 0 to 5, of 256 in steps 6 to 11, drawn sizes in steps 0 to 9."""
    settings = tiny_settings(texts, precision="float32")
    model = dataclasses.replace(
        settings.model,
        num_layers=3,
        segment_lengths=(),
        dilation_rates=(),
        layer_segment_shifts=(0,),
        layer_patterns=HYBRID,
    )
    given = {"steps": 12, "random_local_windows": SIZES, "stages": StageSettings(lengths=(64, 256)), **changes}
    return dataclasses.replace(settings, model=model, **given)


def _patterns_of_step(settings: TrainSettings, step: int) -> list[Pattern]:
    """The definition: by splitmix64 of the seed and the step, in all but the last tenth of the steps."""
    sizes = settings.random_local_windows
    drawn = sizes[signed(splitmix(splitmix(settings.seed) ^ step)) % len(sizes)]
    is_drawn = 10 * (settings.steps - step) > settings.steps + 9
    near, mixed = (drawn, drawn) if is_drawn else (15, 31)
    return [local_window(near, 2), local_window(mixed) + DilatedPattern([64, 256], [1, 4]), global_tokens(2)]


@given(st.integers(0, 2**32 - 1), st.integers(1, 60))
def test_the_window_of_a_step_follows_from_its_number_and_the_seed(seed: int, steps: int) -> None:
    settings = _drawing(Path("x"), seed=seed, steps=steps, stages=StageSettings())
    stages = settings.stages_by_step
    for step in range(steps):
        own = tuple(settings.model.pattern(layer) for layer in range(3))
        assert list(stages.patterns_at(step) or own) == _patterns_of_step(settings, step)


def test_windows_are_drawn_as_often_as_they_are_named() -> None:
    settings = _drawing(Path("x"), steps=10_000)
    stages = settings.stages_by_step
    drawn = Counter(stages.patterns_at(step)[0].rules[0].rule.before for step in range(9_000))  # type: ignore[index]
    for size, expected in {3: 4500, 40: 2250, 9: 2250}.items():
        assert abs(drawn[size] - expected) < 5 * (expected * (1 - expected / 9_000)) ** 0.5


def test_every_local_window_of_a_layer_is_replaced() -> None:
    mixed = "per_head([local_window(7), global_tokens(1) + local_window(3)]) + random_blocks(0.5, block_size=8)"
    settings = _drawing(Path("x"), random_local_windows=(5,))
    model = dataclasses.replace(settings.model, layer_patterns=(mixed,), num_layers=1)
    (found,) = dataclasses.replace(settings, model=model).stages_by_step.patterns_at(0)
    near = per_head([local_window(5), global_tokens(1) + local_window(5)])
    assert found == near + dataclasses.replace(
        settings.model, layer_patterns=("random_blocks(0.5, block_size=8)",)
    ).pattern(0)


def test_a_run_trains_with_drawn_windows_and_evaluates_with_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _drawing(write_texts(tmp_path / "texts"), eval_steps=5)
    compute, seen = LongNetTrainer.compute_loss, {True: [], False: []}  # type: ignore[var-annotated]

    def compute_and_note(self: LongNetTrainer, *args: Any, **options: Any) -> Any:
        seen[self.model.training].append((self.state.global_step, list(self.model.model.patterns)))
        return compute(self, *args, **options)

    monkeypatch.setattr(LongNetTrainer, "compute_loss", compute_and_note)
    run = train(settings, tmp_path / "run", quiet()).run
    assert seen[True] == [(step, _patterns_of_step(settings, step)) for step in range(12)]
    assert len({pattern[0] for _, pattern in seen[True]}) == 4
    own = [settings.model.pattern(layer) for layer in range(3)]
    assert {step for step, _ in seen[False]} == {5, 10, 12}
    assert all(patterns == own for _, patterns in seen[False])
    assert json.loads((run / "training.json").read_text())["settings"]["random_local_windows"] == list(SIZES)


def test_a_run_with_drawn_windows_that_stops_goes_on_as_if_it_had_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _drawing(write_texts(tmp_path / "texts"), save_steps=3)
    train(settings, tmp_path / "whole", quiet())
    stopped_run(monkeypatch, settings, tmp_path / "stopped", 4)
    resume(tmp_path / "stopped", quiet())
    assert_same_weights(tmp_path / "stopped", tmp_path / "whole")


def test_a_draw_disturbs_no_other_random_number(tmp_path: Path) -> None:
    settings = _drawing(write_texts(tmp_path / "texts"))
    model = dataclasses.replace(settings.model, layer_patterns=("local_window(9)",))
    for sizes in ((), (9, 9)):
        train(
            dataclasses.replace(settings, model=model, random_local_windows=sizes), tmp_path / str(len(sizes)), quiet()
        )
    assert_same_weights(tmp_path / "0", tmp_path / "2")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"random_local_windows": (4, -1)}, r"must be integers of at least 0 and below 2147483648, got \[4, -1\]"),
        ({"random_local_windows": (True,)}, "must be integers"),
        ({"random_local_windows": (2.5,)}, "must be integers"),
        ({"random_local_windows": (2**31,)}, "must be integers"),
        ({"stages": StageSettings(lengths=(64, 256), patterns=PATTERNS[:2])}, "layer_patterns replace segments"),
    ],
)
def test_windows_that_cannot_be_drawn_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _drawing(Path("x"), **changes)


def test_windows_of_a_model_without_local_windows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no layer has one: got \[7\] with segments \[64, 256\], rates \[1, 2\]"):
        tiny_settings(Path("x"), random_local_windows=(7,))


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
