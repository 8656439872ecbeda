"""Values that are not finite: no step is taken with them, nothing is saved with them, and what is there stays."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from dilated_attention_pytorch.training import RunError, resume, train
from dilated_attention_pytorch.training.checkpoint import latest_checkpoint
from dilated_attention_pytorch.training.finite import is_finite_everywhere, what_is_not_finite
from training.broken_runs import KINDS, break_at
from training.runs import assert_same_weights, quiet, tiny_settings

FAILS_AT = {
    ("loss", 8): "step 8 is not taken: NaN or infinity is in 1 of 1 losses (nan);",
    ("gradient", 7): "step 7 is not taken: NaN or infinity is in 1 of 31 gradients (model.layernorm.bias);",
    ("weight", 7): "step 8 is not taken: NaN or infinity is in 1 of 1 losses (nan) and ",
    ("weight", 8): "the checkpoint of step 8 is not written: NaN or infinity is in 1 of 31 weights "
    "(model.layernorm.bias);",
    ("state", 8): "the checkpoint of step 8 is not written: NaN or infinity is in 1 of 69 optimizer states "
    "(exp_avg_sq of model.layernorm.bias);",
}


@pytest.fixture(scope="module")
def whole(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny_settings(texts), tmp_path_factory.mktemp("finite") / "whole", quiet()).run


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_breaks_at_a_save_step_or_beside_one_loses_nothing(
    texts: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    run = tmp_path / "run"
    for step in (step for broken, step in FAILS_AT if broken == kind):  # every fourth is saved
        with monkeypatch.context() as patch:
            break_at(patch, kind, step)
            with pytest.raises(RunError, match=re.escape(FAILS_AT[kind, step])) as raised:
                resume(run, quiet()) if run.exists() else train(tiny_settings(texts), run, quiet())
        assert f"the checkpoint of step 4 is kept: resume from it with --resume {run}" in str(raised.value)
        kept = latest_checkpoint(run)
        assert kept is not None
        assert kept.name == "checkpoint-4"
        assert not list(run.glob(".unfinished*"))
    resume(run, quiet())
    assert_same_weights(run, whole)


def test_a_run_that_breaks_before_its_first_checkpoint_does_not_speak_of_one_and_leaves_the_terminal_as_it_was(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    break_at(monkeypatch, "gradient", 3)
    with pytest.raises(RunError, match="no checkpoint was complete yet") as raised:
        train(tiny_settings(texts), tmp_path / "run", console)
    assert "kept" not in str(raised.value)
    assert isinstance(console.file, io.StringIO)
    hidden, shown = (console.file.getvalue().rfind(f"\x1b[?25{state}") for state in "lh")
    assert 0 <= hidden < shown


def test_gradients_whose_norm_overflows_are_not_stepped_with(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.broken_runs.VALUES", {"gradient": 3e38})
    break_at(monkeypatch, "gradient", 2)
    with pytest.raises(RunError, match="step 2 is not taken: NaN or infinity is in the norm of the gradient, which"):
        train(tiny_settings(texts), tmp_path / "run", quiet())


def test_a_checkpoint_that_is_not_finite_is_not_resumed_from(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("dilated_attention_pytorch.training.guard.Guard.check_state", lambda self, what: None)
        break_at(patch, "state", 4)
        break_at(patch, "gradient", 5)
        with pytest.raises(RunError, match="the checkpoint of step 4 is kept"):
            train(tiny_settings(texts), tmp_path / "run", quiet())
    with pytest.raises(
        RunError, match="the checkpoint of step 4 cannot be resumed from: NaN or infinity is in 1 of 69"
    ):
        resume(tmp_path / "run", quiet())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_among_many_is_found_and_its_tensor_named(value: float) -> None:
    tensors = {name: torch.full((3, 1001), 3e38) for name in "abcdefg"}
    assert what_is_not_finite({"weights": tensors.items()}) is None
    assert is_finite_everywhere(*tensors.values())
    tensors["c"][2, 997] = value
    assert not is_finite_everywhere(*tensors.values())
    assert what_is_not_finite({"losses": [], "weights": tensors.items()}) == "1 of 7 weights (c)"
    for name in "dfg":
        tensors[name][0, 0] = value
    listed = {"weights": tensors.items(), "states": [("x", torch.tensor(value)), ("y", torch.zeros(0))]}
    assert what_is_not_finite(listed) == "4 of 7 weights (c, d, f ...) and 1 of 2 states (x)"
