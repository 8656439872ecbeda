"""Runs that are trained longer: the steps of a run that had that number from the beginning, where the rates are."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.training import Outcome, RunError, TrainSettings, resume, train
from dilated_attention_pytorch.training.callbacks import read_metrics
from dilated_attention_pytorch.training.configuration import CONFIGURATION_NAME
from dilated_attention_pytorch.training.diagnosis import diagnose
from dilated_attention_pytorch.training.faults import cost_of_faults
from dilated_attention_pytorch.training.report import read_run
from dilated_attention_pytorch.training.run_checkpoints import RunCheckpoints
from dilated_attention_pytorch.training.stages import StageSettings
from support.forked import run_forked
from training.runs import Heard, assert_same_weights, quiet, stop_after, stopped_run, tiny_settings
from training.spread_runs import prolong

CONSTANT: dict[str, Any] = {"schedule": "constant", "warmup_fraction": 0.0}
CHANGE = "at step 9 the number of steps was changed from 9 to 14"


@pytest.fixture(scope="module")
def finished(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run of 9 steps whose learning rates have fallen to 0."""
    return train(tiny_settings(texts), tmp_path_factory.mktemp("prolonged") / "run", quiet())


@pytest.fixture
def run(finished: Outcome, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished.run, tmp_path / "run"))


def rates(run: Path) -> dict[int, float]:
    return {entry["step"]: entry["learning_rate"] for entry in read_metrics(run) if "learning_rate" in entry}


def record_of(run: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run / "training.json").read_text())
    return record


@pytest.mark.parametrize("stop", [4, None])
def test_at_a_constant_rate_a_run_ends_where_one_with_all_steps_ends(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int | None
) -> None:
    """The data, the stages, dropout and the optimizer go on; after a stop and after the end."""
    stages = StageSettings(lengths=(64, 256))
    few = tiny_settings(texts, stages=stages, **CONSTANT)
    if stop is None:
        train(few, tmp_path / "run", quiet())
    else:
        stopped_run(monkeypatch, few, tmp_path / "run", stop)
    outcome = resume(tmp_path / "run", quiet(), {"steps": 14})
    many = dataclasses.replace(few, steps=14, stage_steps=9)
    at_once = train(many, tmp_path / "at once", quiet())
    assert dataclasses.replace(outcome, run=at_once.run) == at_once
    assert_same_weights(outcome.run, at_once.run)


def test_the_rates_are_those_of_the_new_number_of_steps_from_the_first_one_on(
    texts: Path, run: Path, tmp_path: Path
) -> None:
    resume(run, quiet(), {"steps": 14})
    train(tiny_settings(texts, steps=14), tmp_path / "at once", quiet())
    before, after = rates(run), rates(tmp_path / "at once")
    assert {step: rate for step, rate in before.items() if step > 9} == {
        step: rate for step, rate in after.items() if step > 9
    }
    assert before[8] < after[8]
    assert before[10] > 0


def test_the_same_number_of_steps_changes_nothing(
    texts: Path, finished: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_run(monkeypatch, tiny_settings(texts), tmp_path / "run", 4)
    outcome = resume(tmp_path / "run", quiet(), {"steps": 9})
    assert dataclasses.replace(outcome, run=finished.run) == finished
    assert_same_weights(tmp_path / "run", finished.run)
    assert "steps_changed" not in record_of(tmp_path / "run")


def test_a_stopped_run_may_end_earlier(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_run(monkeypatch, tiny_settings(texts), tmp_path / "run", 4)
    assert resume(tmp_path / "run", quiet(), {"steps": 7}).step == 7
    assert record_of(tmp_path / "run")["steps_changed"] == [{"at": 5, "from": 9, "to": 7}]


def test_a_run_that_is_killed_while_it_is_trained_longer_goes_on(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Path(shutil.copytree(run, tmp_path / "whole"))
    resume(whole, quiet(), {"steps": 14})

    def die(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunCheckpoints, "staging", die)
        with pytest.raises(KeyboardInterrupt):
            resume(run, quiet(), {"steps": 14})
    assert not (run / "model.safetensors").exists()
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-8", "checkpoint-9"]
    with monkeypatch.context() as patch:
        stop_after(patch, 10, signal.SIGTERM)
        assert resume(run, quiet()).stopped_by == signal.SIGTERM
    assert resume(run, quiet(), {"steps": 14}).step == 14
    assert_same_weights(run, whole)
    assert len(record_of(run)["steps_changed"]) == 1


def test_what_is_written_about_the_run_states_the_change(run: Path) -> None:
    result = record_of(run)["result"]
    console = Heard()
    resume(run, console, {"steps": 14})
    assert 'steps: 9 until now, 14 from here on; the learning rates go on as the schedule "linear"' in console.said
    record = record_of(run)
    assert record["steps_changed"] == [{"at": 9, "from": 9, "to": 14, "result": result}]
    assert record["result"] != result
    assert record["settings"]["steps"] == 14
    text = (run / CONFIGURATION_NAME).read_text()
    assert f"# Of the run itself: {CHANGE}.\n" in text
    assert tomllib.loads(text)["steps"] == 14
    assert [entry["steps"] for entry in read_metrics(run) if "steps" in entry] == [9, 14]
    assert read_run(run).figures["changes of the number of steps"] == CHANGE
    assert f"{CHANGE[0].upper()}{CHANGE[1:]}." in list(diagnose(run))
    assert cost_of_faults(run).restarts == 0


def test_a_number_of_steps_that_a_run_cannot_have_is_refused_and_changes_nothing(run: Path, texts: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    for steps, words in (
        (9, r"finished after 9 steps; .*, train it longer with a larger --steps, or start"),
        (8, r"--steps 8 is the number that the whole run is to have, and .* has taken 9 already; name a larger one"),
        (0, r"--resume .*: steps must be at least 1, got 0"),
    ):
        with pytest.raises(RunError, match=words):
            resume(run, quiet(), {"steps": steps})
    with pytest.raises(RunError, match=r"has 9 steps, got --steps 14; go on with --resume .* --steps 14"):
        train(tiny_settings(texts, steps=14), run, quiet(), may_resume=True)
    kept = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and "lease" not in path.name}
    assert kept == {path: time for path, time in before.items() if "lease" not in path.name}
    for checkpoint in run.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    with pytest.raises(RunError, match="no checkpoint to go on from is left"):
        resume(run, quiet(), {"steps": 14})
    assert (run / "model.safetensors").exists()


def test_a_finished_run_keeps_its_weights_if_its_last_checkpoint_is_damaged(run: Path) -> None:
    weights = (run / "model.safetensors").read_bytes()
    with (run / "checkpoint-9" / "optimizer.pt").open("r+b") as file:
        file.write(b"damaged")
    with pytest.raises(RunError, match=r"newest intact checkpoint is that of step \d; .*--init-from .*run$"):
        resume(run, quiet(), {"steps": 14})
    assert (run / "model.safetensors").read_bytes() == weights


def test_steps_that_the_stages_divide_are_for_stages(texts: Path) -> None:
    with pytest.raises(ValueError, match=r"stage_steps is for a run with stages\.lengths, got 5; leave it out"):
        tiny_settings(texts, stage_steps=5)
    stages = StageSettings(lengths=(64, 256))
    with pytest.raises(ValueError, match="got 2 that end after the steps 10, 9; take more steps, or fewer stages"):
        tiny_settings(texts, stage_steps=20, stages=stages)


def test_the_command_line_takes_steps_with_resume(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--resume", str(run), "--steps", "11"])
    assert "run: 11 steps" in capsys.readouterr().out


MESHES: dict[str, dict[str, Any]] = {"fsdp": {"data_parallel": "fsdp"}, "context": {"context_parallel": 2}}
if importlib.util.find_spec("deepspeed") is not None:
    MESHES["zero3"] = {"data_parallel": "zero3", "batch_size": 1}


def test_two_processes_train_a_run_longer(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").symlink_to(texts)
    ended = run_forked(prolong, tmp_path, MESHES, folder=tmp_path, ranks=2)
    assert ended["code"] == 0, ended["output"][-8000:]
    for name in MESHES:
        assert_same_weights(tmp_path / name, tmp_path / f"{name} at once")


def test_settings_of_a_run_of_before_have_no_steps_of_stages(texts: Path) -> None:
    written = tiny_settings(texts, stages=StageSettings(lengths=(64, 256))).to_dict()
    del written["stage_steps"]
    assert TrainSettings.from_dict(written).stage_steps == 0
