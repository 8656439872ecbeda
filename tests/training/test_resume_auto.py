"""The same command line, given again: it begins, goes on, or finds that nothing is left to do."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.training import Outcome, RunError, TrainSettings, train
from dilated_attention_pytorch.training import run as training_run
from training.runs import assert_same_weights, quiet, stop_after, tiny_settings, write_texts


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> TrainSettings:
    """What chooses threads and precision by itself."""
    return tiny_settings(write_texts(tmp_path_factory.mktemp("auto") / "texts"), threads=0, precision="auto")


@pytest.fixture(scope="module")
def finished(settings: TrainSettings, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train(settings, tmp_path_factory.mktemp("auto") / "finished", quiet(), may_resume=True)


def test_a_command_that_is_given_again_goes_on_and_then_leaves_the_run_alone(
    settings: TrainSettings, finished: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop_after(monkeypatch, 4, signal.SIGTERM)
    stopped = train(settings, tmp_path / "run", quiet(), may_resume=True)
    assert signal.getsignal(signal.SIGTERM) is before
    assert (stopped.stopped_by, stopped.step) == (signal.SIGTERM, 5)
    ended = train(settings, tmp_path / "run", quiet(), may_resume=True)
    assert ended == dataclasses.replace(finished, run=tmp_path / "run")
    assert_same_weights(tmp_path / "run", finished.run)
    written = {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "run").rglob("*"))}
    assert train(settings, tmp_path / "run", quiet(), may_resume=True) == ended
    assert {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "run").rglob("*"))} == written


def test_a_run_of_another_command_line_is_left_alone(settings: TrainSettings, finished: Outcome) -> None:
    with pytest.raises(RunError, match=r"begun with other settings \(seed 0 there, 1 here\); name another --output"):
        train(dataclasses.replace(settings, seed=1), finished.run, quiet(), may_resume=True)
    changed = dataclasses.replace(settings, seed=1, steps=7, save_steps=1, eval_steps=1)
    with pytest.raises(RunError, match=r"eval_steps 5 there, 1 here, .*, \.\.\.\)"):
        train(changed, finished.run, quiet(), may_resume=True)
    # What was chosen then may be said now.
    chosen = json.loads((finished.run / "training.json").read_text())["settings"]["precision"]
    other = "float32" if chosen == "bfloat16" else "bfloat16"
    with pytest.raises(RunError, match=f"precision '{chosen}' there, '{other}' here"):
        train(dataclasses.replace(settings, precision=other), finished.run, quiet(), may_resume=True)
    with pytest.raises(RunError, match=r"\(threads [0-9]+ there, 77 here\)"):
        train(dataclasses.replace(settings, precision=chosen, threads=77), finished.run, quiet(), may_resume=True)


def test_of_several_processes_the_first_one_looks_after_all_have_met(
    settings: TrainSettings, finished: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To another one a file system that hosts share may not show the run yet."""
    done = []

    def hear(said: list[object]) -> None:
        done.append("heard")
        said[0] = "finished"

    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(training_run, "_joined", lambda *args: contextlib.nullcontext(done.append("met")))
    monkeypatch.setattr(training_run, "find_run", lambda *args: done.append("looked"))
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", hear)
    assert train(settings, finished.run, quiet(), may_resume=True) == finished
    assert done == ["met", "heard"]


def test_the_command_line_takes_auto_beside_its_flags(
    settings: TrainSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--preset", "tiny", "--data", str(settings.data[0]), "--steps", "3", "--save-steps", "2"]
    words += ["--output", str(tmp_path / "run"), "--resume", "auto"]
    main(words)
    first = capsys.readouterr().out
    main(words)
    again = capsys.readouterr().out
    assert "run: 3 steps" in first
    assert "run: 3 steps" not in again
    assert first[first.index("held-out: ") :] == again[again.index("held-out: ") :]
