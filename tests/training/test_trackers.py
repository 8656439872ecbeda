"""Trackers: what each library holds in the end is what the log of the run holds."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dilated_attention_pytorch.installation import install_command
from dilated_attention_pytorch.training import RunError, resume, train
from dilated_attention_pytorch.training import trackers as trackers_module
from dilated_attention_pytorch.training.callbacks import read_metrics
from dilated_attention_pytorch.training.checkpoint import Start
from dilated_attention_pytorch.training.trackers import check_trackers, tracking
from support.processes import free_port
from training.runs import Heard, open_run, quiet, stopped_run, tiny_settings, without_checks_of_settings, write_texts


def figures_of(run: Path, name: str) -> dict[int, float]:
    return {entry["step"]: entry[name] for entry in read_metrics(run) if name in entry and "loss" in entry}


def gauges(text: str) -> dict[str, float]:
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def test_tensorboard_and_prometheus_hold_what_the_log_holds_after_a_restart_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny_settings(write_texts(tmp_path / "texts"), log_steps=2, track=("tensorboard", "prometheus"))
    run = stopped_run(monkeypatch, settings, tmp_path / "run", 4).run
    outcome = resume(run, quiet())
    held = EventAccumulator(str(run / "tensorboard"))
    held.Reload()
    for name in ("bits_per_byte", "tokens_per_second", "mfu", "peak_memory_bytes", "restarts"):
        expected = figures_of(run, name)
        assert [event.step for event in held.Scalars(name)] == sorted(expected)
        for event in held.Scalars(name):
            assert math.isclose(event.value, expected[event.step], rel_tol=1e-6)
    (final,) = held.Scalars("final_bits_per_byte")
    assert (final.step, final.value) == (9, pytest.approx(outcome.bits_per_byte, rel=1e-6))
    found = gauges((run / "metrics.prom").read_text())
    assert found["dilated_attention_step"] == 9
    assert found["dilated_attention_final_bits_per_byte"] == outcome.bits_per_byte
    assert found["dilated_attention_restarts"] == 0  # it was stopped, which is no fault
    assert found["dilated_attention_mfu"] == figures_of(run, "mfu")[8]


def test_tensorboard_holds_steps_that_a_resumed_run_repeats_once(tmp_path: Path) -> None:
    PartialState()  # as transformers' trainer makes it
    begun = open_run(tmp_path)
    resumed = dataclasses.replace(begun, start=Start(checkpoint=tmp_path / "checkpoint-2", rejected={}))
    for run, steps in ((begun, (1, 2, 3)), (resumed, (3, 4))):
        with tracking(tiny_settings(tmp_path), run) as trackers:
            for step in steps:
                trackers.log(step, {"loss": 10.0 * len(steps) + step})
    held = EventAccumulator(str(tmp_path / "tensorboard"))
    held.Reload()
    assert [(event.step, event.value) for event in held.Scalars("loss")] == [(1, 31), (2, 32), (3, 23), (4, 24)]


def test_without_trackers_the_log_is_there_and_nothing_else(tmp_path: Path) -> None:
    settings = tiny_settings(write_texts(tmp_path / "texts"), steps=2, track=())
    run = train(settings, tmp_path / "run", quiet()).run
    assert "bits_per_byte" in read_metrics(run)[1]
    assert not {"tensorboard", "metrics.prom", "wandb", "mlflow"} & {path.name for path in run.iterdir()}


def test_prometheus_is_served_while_the_run_lasts(tmp_path: Path) -> None:
    port = free_port()
    settings = tiny_settings(tmp_path, track=("prometheus",), prometheus_port=port)
    with tracking(settings, open_run(tmp_path)) as trackers:
        trackers.log(3, {"loss": 1.5})
        with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=60) as answer:
            assert gauges(answer.read().decode())["dilated_attention_loss"] == 1.5
    check_trackers(settings)  # the port is free again


def test_a_port_that_is_taken_is_refused_before_the_run(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        settings = tiny_settings(write_texts(tmp_path / "texts"), track=("prometheus",), prometheus_port=port)
        with pytest.raises(RunError, match=f"--prometheus-port {port} cannot be served .*; name another one"):
            train(settings, tmp_path / "run", quiet())
    assert not (tmp_path / "run").exists()


def test_a_port_that_is_taken_after_the_check_is_said_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        settings = tiny_settings(write_texts(tmp_path / "texts"), steps=2, track=("prometheus",), prometheus_port=port)
        without_checks_of_settings(monkeypatch)
        said = Heard()
        outcome = train(settings, tmp_path / "run", said)
    assert said.said.count(f"--prometheus-port {port} cannot be served (Address already in use); metri") == 1
    found = gauges((tmp_path / "run" / "metrics.prom").read_text())
    assert found["dilated_attention_final_bits_per_byte"] == outcome.bits_per_byte


class _AwayAfter:
    """A tracker whose server answers so often, and what it was told; then it raises."""

    def __init__(self, answers: int, error: Exception) -> None:
        self.answers, self.error = answers, error
        self.told: list[Any] = []

    def replace(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have this opened as the tracker ``name``."""
        opened = trackers_module._opened
        monkeypatch.setattr(
            trackers_module,
            "_opened",
            lambda wanted, *x: self._answer("open") if wanted == name else opened(wanted, *x),
        )

    def log(self, figures: Any, step: int) -> None:
        self._answer(step)

    def finish(self) -> None:
        self._answer("finish")

    def _answer(self, what: Any) -> _AwayAfter:
        if len(self.told) == self.answers:
            raise self.error
        self.told.append(what)
        return self


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        (0, []),
        (2, ["open", 2]),
        (8, ["open", 2, 4, 5, 6, 8, 9, 9]),
    ],
)
def test_a_tracker_whose_server_goes_away_is_given_up_in_a_sentence_and_the_run_goes_on(
    answers: int, told: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ServerError(Exception):
        pass

    server = _AwayAfter(answers, ServerError("the server is away\nand more"))
    server.replace("mlflow", monkeypatch)
    monkeypatch.setattr(trackers_module, "_failures", lambda name: (ServerError,) if name == "mlflow" else ())
    without_checks_of_settings(monkeypatch)
    said = Heard()
    settings = tiny_settings(write_texts(tmp_path / "texts"), track=("mlflow", "tensorboard"))
    outcome = train(settings, tmp_path / "run", said)
    assert outcome.step == 9
    assert server.told == told
    sentence = (
        "--track mlflow is dropped, as its server does not respond (the server is away); the run goes on without it, "
        "and metrics.jsonl has all figures\n"
    )
    assert said.said.count(sentence) == said.said.count("the server is away") == 1
    held = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    held.Reload()
    assert [event.step for event in held.Scalars("mfu")] == sorted(figures_of(tmp_path / "run", "mfu"))


def test_an_error_of_a_tracker_that_is_none_of_its_server_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = _AwayAfter(1, ZeroDivisionError("a mistake of ours"))
    server.replace("tensorboard", monkeypatch)
    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        train(tiny_settings(write_texts(tmp_path / "texts")), tmp_path / "run", quiet())


def test_a_tracker_that_cannot_be_opened_leaves_none_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = _AwayAfter(9, ZeroDivisionError())
    opened.replace("prometheus", monkeypatch)
    failing = _AwayAfter(0, OSError("no space"))
    failing.replace("tensorboard", monkeypatch)
    settings = tiny_settings(write_texts(tmp_path / "texts"), track=["prometheus", "tensorboard"])
    with pytest.raises((OSError, RunError), match="no space"):
        train(settings, tmp_path / "run", quiet())
    assert opened.told == ["open", "finish"]


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("wandb", "wandb"),
        ("mlflow", "mlflow"),
        ("prometheus", "prometheus_client"),
    ],
)
def test_a_tracker_that_is_not_installed_is_refused_before_the_run(
    name: Any, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted, *x: None if wanted == package else find(wanted, *x))
    with pytest.raises(RunError) as error:
        train(tiny_settings(write_texts(tmp_path / "texts"), track=(name,)), tmp_path / "run", quiet())
    assert str(error.value) == f"--track {name} needs {package}, not installed here: {install_command('track')}"
    assert not (tmp_path / "run").exists()


def test_other_processes_than_the_first_track_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "RANK", "1")
    settings = tiny_settings(tmp_path, track=("tensorboard", "prometheus"))
    with tracking(settings, open_run(tmp_path)) as trackers:
        trackers.log(2, {"loss": 1.5})
    assert not any(tmp_path.iterdir())
