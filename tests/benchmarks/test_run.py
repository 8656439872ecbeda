"""Runs from end to end, on a few rows."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dilated_attention_pytorch.benchmarks import measure, results, run
from dilated_attention_pytorch.benchmarks.contestants import CONTESTANTS, Contestant
from dilated_attention_pytorch.benchmarks.report import LEGEND
from dilated_attention_pytorch.benchmarks.results import Row
from dilated_attention_pytorch.benchmarks.run import RESULTS_NAME
from dilated_attention_pytorch.benchmarks.settings import BenchSettings
from dilated_attention_pytorch.benchmarks.shapes import SHAPES, Case


def dry_run(output: Path, **options: Any) -> tuple[dict[str, Any], str]:
    """The results file of a dry run, and what it printed."""
    console = Console(file=io.StringIO(), width=200)
    run.run(BenchSettings(output=output, dry_run=True, **options), console, "the command")
    return json.loads((output / RESULTS_NAME).read_text()), console.file.getvalue()


def test_a_run_leaves_tables_and_results(tmp_path: Path) -> None:
    values, said = dry_run(tmp_path, shapes=("three",), modes=("forward_backward",))
    assert values["complete"]
    assert values["machine"]["command"] == "the command"
    assert values["machine"]["versions"]["torch"] == torch.__version__
    by_name = {row["contestant"]: row for row in values["rows"] if row["status"] == "timed"}
    assert {"ours, aten", "published route", "dense SDPA"} <= by_name.keys()
    for row in by_name.values():
        assert len(row["samples"]) == 3
        assert set(row["errors"]) == {"out", "grad_query", "grad_key", "grad_value"}
        assert row["median_seconds"] == sorted(row["samples"])[1]
    for words in (
        "ours, aten",
        "published route",
        "dense SDPA (all pairs)",
        "2 cases; no call starts after 240 s",
        "this was a dry run",
        LEGEND,
    ):
        assert words in said
    table = next(line for line in said.splitlines() if line.startswith("| N "))
    for column in ("error", "spread", "launch", "relative time", "peak", "extra memory / q"):
        assert column in table
        assert f"*{column}*" in LEGEND
    assert {path.name for path in tmp_path.iterdir()} == {RESULTS_NAME, "page.md"}


def test_none_on_a_cpu_needs_a_gpu(tmp_path: Path) -> None:
    values, _ = dry_run(tmp_path / "all", shapes=("three", "decode"))
    assert sum(row["status"] == "timed" for row in values["rows"]) > 5
    assert not {entry.name for entry in CONTESTANTS if entry.needs_gpu} & {row["contestant"] for row in values["rows"]}
    values, _ = dry_run(tmp_path / "named", shapes=("three",), rows=(40,), contestants=("dense SDPA, flash",))
    assert {row["reason"] for row in values["rows"]} == {
        "PyTorch's flash and cuDNN attention compute in float16 and bfloat16 on CUDA devices"
    }


def test_everyone_without_a_time_has_a_sentence(tmp_path: Path) -> None:
    values, said = dry_run(tmp_path, shapes=("decode", "three"))
    for row in values["rows"]:
        assert (row["status"] == "timed") == bool(row["samples"]) == (not row["reason"])
        assert row["status"] == "timed" or row["contestant"] in said
    assert "the published code has no decoding" in said
    assert "ours, model cache" in {row["contestant"] for row in values["rows"] if row["status"] == "timed"}


def _wrong(case: Case, operands: Any) -> Any:
    return lambda query, key, value: query * 0.5


def _broken(case: Case, operands: Any) -> Any:
    raise RuntimeError("this kernel does not exist\nand the rest of it")


def _of_another_shape(case: Case, operands: Any) -> Any:
    return lambda query, key, value: query[:, :1]


def test_who_is_wrong_or_fails_gets_a_sentence_and_no_time_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entrants = tuple(
        Contestant(name, "pattern", lambda case, device: None, prepare)
        for name, prepare in (("wrong", _wrong), ("broken", _broken), ("misshapen", _of_another_shape))
    )
    monkeypatch.setattr(run, "find_contestants", lambda names, device: (*entrants, *CONTESTANTS))
    values, said = dry_run(tmp_path, shapes=("three",), rows=(64,))
    rows = {row["contestant"]: row for row in values["rows"]}
    assert [rows[name]["status"] for name in ("wrong", "broken", "misshapen", "ours, aten")] == [
        "wrong",
        "failed",
        "wrong",
        "timed",
    ]
    assert not any(rows[name]["samples"] for name in ("wrong", "broken", "misshapen"))
    assert rows["broken"]["reason"] == "RuntimeError: this kernel does not exist"
    assert "wrong, N = 40: wrong: out is off by" in said


def test_what_would_take_too_long_is_left_out_with_a_sentence() -> None:
    from dilated_attention_pytorch.benchmarks.clock import Clock

    clock = Clock(torch.device("cpu"))
    case = replace(SHAPES["three"], rows=1 << 14)
    for limits, words in (
        ({"call_limit": 1e-9, "ends_at": math.inf}, "--call-limit is 1e-09 s"),
        ({"call_limit": 1e9, "ends_at": -math.inf}, "the --time-limit of the run was reached"),
    ):
        budget = measure.Budget(seconds_each=0.0, **limits)
        dense = [entry for entry in CONTESTANTS if entry.name == "dense SDPA"]
        (row,) = measure.measure_case(case, dense, clock, 1e12, budget, lambda what: lambda: None)
        assert row.status == "skipped"
        assert words in row.reason


def test_a_run_that_is_stopped_leaves_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = run.measure_case

    def stopped(case: Case, *rest: Any) -> list[Row]:
        if case.rows > 40:
            raise KeyboardInterrupt
        return measured(case, *rest)

    monkeypatch.setattr(run, "measure_case", stopped)
    with pytest.raises(KeyboardInterrupt):
        dry_run(tmp_path, shapes=("three",))
    values = json.loads((tmp_path / RESULTS_NAME).read_text())
    assert not values["complete"]
    assert {row["case"]["rows"] for row in values["rows"]} == {40}


def test_results_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results.json"
    results.write_json(file, {"a": 1})

    def cut(path: Path, text: str, **_: Any) -> None:
        with open(path, "w") as opened:
            opened.write(text[: len(text) // 2])
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(OSError, match="the disk is full"):
        results.write_json(file, {"a": 2, "b": 3})
    assert json.loads(file.read_text()) == {"a": 1}


def test_it_runs_where_only_torch_and_rich_are_installed(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('tyro', 'matplotlib', 'transformers', 'accelerate', 'safetensors', 'tensorboard'):\n"
        "    sys.modules[name] = None\n"
        f"sys.argv[1:] = ['--shapes', 'three', '--dry-run', '--output', {str(tmp_path / 'out')!r}]\n"
        "import runpy\n"
        "runpy.run_module('dilated_attention_pytorch.benchmarks', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "dense SDPA" in done.stdout
    assert (tmp_path / "out" / RESULTS_NAME).exists()
