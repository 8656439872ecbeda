"""The frame of a study: what its file of results has, and what its options do."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.measured_code import code
from benchmarks.study import LEAST_VECTORS, StudyOfCalls, run

from benchmarks import study


@dataclass(frozen=True, kw_only=True)
class Rows(StudyOfCalls):
    """Settings."""

    rows: tuple[int, ...] = (4096,)
    """Rows."""


def measured(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    """The file of results of a study that measures its own settings."""
    monkeypatch.setattr(sys, "argv", ["study", *arguments])
    file = run(
        Rows,
        lambda given: {"rows": given.rows, "threads": torch.get_num_threads()},
        text="A study.",
        name="study",
        group="attention",
        tiny={"rows": (8,)},
    )
    return dict(json.loads(file.read_text()))


def test_results_have_the_machine_the_implementation_and_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured(monkeypatch, "--output", str(tmp_path), "--rows", "3", "5", "--impl", "aten", "--threads", "2")
    assert (found["rows"], found["threads"], found["machine"]["threads"]) == ([3, 5], 2, 2)
    assert found["impl"] == {"asked": "aten", "float32": "aten", "bfloat16": "aten", "float16": "aten"}
    assert found["code"] == code("attention")
    assert [path.name for path in tmp_path.iterdir()] == ["study.json"]
    with pytest.raises(SystemExit) as left:  # of today's code
        measured(monkeypatch, "--output", str(tmp_path), "--if-stale")
    assert left.value.code == 0


def test_a_tiny_study_has_its_settings_and_keeps_no_results(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(study.file_of_results(None, "x.json", is_tiny=False, is_if_stale=False).parent.iterdir())
    assert measured(monkeypatch, "--tiny")["rows"] == [8]
    assert set(study.file_of_results(None, "x.json", is_tiny=False, is_if_stale=False).parent.iterdir()) == before


def test_avx2_measures_in_a_process_that_is_limited_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []

    class Done:
        returncode = 7

    def start(_: list[str], *, env: dict[str, str], check: bool) -> type[Done]:
        started.append(env)
        return Done

    monkeypatch.setattr(study.subprocess, "run", start)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", study.__spec__)
    with pytest.raises(SystemExit) as left:
        measured(monkeypatch, "--avx2", "--output", str(tmp_path))
    assert left.value.code == 7
    assert LEAST_VECTORS.items() <= started[0].items()
    for name, value in LEAST_VECTORS.items():
        monkeypatch.setitem(os.environ, name, value)
    measured(monkeypatch, "--avx2", "--output", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["study_avx2.json"]
