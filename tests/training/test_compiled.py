"""Runs through torch.compile, whose loss takes a block of rows at a time: the losses of eager runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.compiler.config
from torch._dynamo.utils import counters
from transformers import TrainingArguments

from dilated_attention_pytorch.models import token_loss
from dilated_attention_pytorch.training import run_trainer, train
from dilated_attention_pytorch.training.callbacks import read_metrics
from dilated_attention_pytorch.training.stages import Stages
from training.runs import quiet, small_settings, write_texts

TOLERANCE = 1e-5
"""Of losses in nats: sums of other orders in float32, as of several processes."""
IN_SWEEP = pytest.mark.skipif(
    os.environ.get("HYPOTHESIS_PROFILE") != "sweep", reason="compiles for minutes: make sweep"
)


DRAWN: dict[str, Any] = {"layer_patterns": ("local_window(20)",), "random_local_windows": (2, 50), "seed": 3}


@pytest.mark.parametrize(
    ("backend", "changes"),
    [("aot_eager", {}), ("aot_eager", DRAWN), pytest.param("inductor", {}, marks=IN_SWEEP)],
    ids=["aot_eager", "drawn windows", "inductor"],
)
def test_a_compiled_run_has_the_losses_of_one_that_is_not(
    backend: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Any
) -> None:
    """Blocks of 30 rows of the 194 of a batch. "aot_eager" traces forward and backward, and generates no code."""
    monkeypatch.setattr(token_loss, "LOGITS_AT_ONCE", 256 * 30)
    monkeypatch.setattr(token_loss, "LEAST_ROWS", 1)

    def with_backend(**given: Any) -> TrainingArguments:
        return TrainingArguments(**given, **({"torch_compile_backend": backend} if given["torch_compile"] else {}))

    monkeypatch.setattr(run_trainer, "TrainingArguments", with_backend)
    texts = write_texts(tmp_path / "texts")
    losses = []
    torch.compiler.reset()
    counters.clear()
    for is_compiled in (False, True):
        settings = small_settings(
            texts,
            compile=is_compiled,
            steps=4,
            eval_steps=4,
            eval_windows=1,
            final_eval_windows=1,
            quarter_files=1,
            sample_length=1,
            **changes,
        )
        run = train(settings, tmp_path / str(is_compiled), quiet()).run
        losses.append([entry["loss"] for entry in read_metrics(run) if "loss" in entry])
        assert (counters["stats"]["unique_graphs"] > 0) == is_compiled
    assert len(losses[0]) == 4
    furthest = max(abs(one - other) for one, other in zip(*losses, strict=True))
    figure(f"4 compiled steps beside 4 that are not, {backend}: largest difference of a loss (nats)", f"{furthest:.1e}")
    assert furthest <= TOLERANCE


@pytest.mark.slow
def test_every_drawn_window_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than the graphs that PyTorch makes of a function by itself, which are 8."""
    monkeypatch.setattr(
        run_trainer, "TrainingArguments", lambda **given: TrainingArguments(**given, torch_compile_backend="eager")
    )
    monkeypatch.setattr(torch.compiler.config, "recompile_limit", torch.compiler.config.recompile_limit)
    settings = small_settings(
        write_texts(tmp_path / "texts"),
        compile=True,
        steps=30,
        eval_steps=30,
        save_steps=30,
        eval_windows=1,
        final_eval_windows=1,
        quarter_files=1,
        sample_length=1,
        layer_patterns=("local_window(20)",),
        random_local_windows=tuple(range(2, 11)),
    )
    drawn = {Stages.of(settings).patterns_at(step) for step in range(27)}
    assert len(drawn) == 8
    torch.compiler.reset()
    counters.clear()
    train(settings, tmp_path / "run", quiet())
    assert counters["stats"]["unique_graphs"] == len(drawn) + 1  # and the model's own
