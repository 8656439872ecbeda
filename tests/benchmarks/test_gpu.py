"""The command for a machine with a GPU: what a step may do, what is repeated, and that its gate finds what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import RECORD, Step
from torch import Tensor

from benchmarks import gpu, gpu_gate
from dilated_attention_pytorch.benchmarks.contestants import CONTESTANTS, Contestant

CPU = torch.device("cpu")


def step(name: str, code: str, **options: Any) -> Step:
    return Step(name=name, command=(sys.executable, "-c", code), **{"most_seconds": 30.0} | options)


def run(monkeypatch: pytest.MonkeyPatch, output: Path, *entries: Step, seconds: float = 60.0) -> dict[str, str]:
    monkeypatch.setattr(gpu, "steps", lambda output, **options: list(entries))
    outcomes = gpu.run(output, is_dry=False, seconds=seconds)
    record = json.loads((output / RECORD).read_text())
    assert [one["status"] for one in record["steps"]] == [one.status for one in outcomes]
    return {one.name: one.status for one in outcomes}


def test_what_passed_is_not_repeated_and_the_rest_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = f"open({str(tmp_path / 'count')!r}, 'a').write('x'); print('said')"
    is_done = iter([False, True])
    entries = (
        step("right", count),
        step("wrong", "raise SystemExit(9)"),
        step("none", "", refusal="not here"),
        step("part", "pass", is_done=lambda: next(is_done)),
    )
    expected = {"right": "passed", "wrong": "failed", "none": "skipped", "part": "cut off"}
    assert run(monkeypatch, tmp_path / "out", *entries) == expected
    assert (tmp_path / "out" / "right.txt").read_text() == "said\n"
    assert run(monkeypatch, tmp_path / "out", *entries) == expected | {"part": "passed"}
    assert (tmp_path / "count").read_text() == "x"


def test_a_step_that_takes_too_long_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = tmp_path / "late"
    child = f"import time; time.sleep(1.5); open({str(late)!r}, 'w')"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    entries = (step("slow", parent, most_seconds=0.5), step("next", "pass"))
    assert run(monkeypatch, tmp_path / "out", *entries) == {"slow": "cut off", "next": "passed"}
    assert run(monkeypatch, tmp_path / "none", *entries, seconds=5.0) == {"slow": "cut off", "next": "cut off"}
    time.sleep(1.5)
    assert not late.exists()


def test_a_process_that_lost_the_device_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = tmp_path / "count"
    begun = f"path = {str(count)!r}; open(path, 'a').write('x')"
    lost = f"{begun}; raise SystemExit(0 if len(open(path).read()) > 2 else 75)"
    entries = (step("lost", lost, begun_anew=75), step("refused", "raise SystemExit(77)"))
    assert run(monkeypatch, tmp_path / "out", *entries) == {"lost": "passed", "refused": "skipped"}
    assert count.read_text() == "xxx"
    never = (step("never", "raise SystemExit(75)", begun_anew=75),)
    assert run(monkeypatch, tmp_path / "none", *never) == {"never": "cut off"}


def test_without_a_gpu_nothing_runs_but_a_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert all(one.refusal for one in gpu.steps(tmp_path, is_dry=False, seconds=60.0))
    dry = {one.name: one.refusal for one in gpu.steps(tmp_path, is_dry=True, seconds=60.0)}
    assert [name for name, refusal in dry.items() if refusal is None] == ["gate, aten", "benchmark", "tests"]


def test_every_kernel_of_this_package_is_held_to_the_definition_and_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    commands = {one.name: one.command for one in gpu.steps(tmp_path, is_dry=False, seconds=60.0)}
    for name in ("gate, triton", "memcheck", "racecheck"):
        assert "ours, triton" in commands[name]


def test_the_benchmark_is_resumed_where_it_was_begun(tmp_path: Path) -> None:
    def command() -> tuple[str, ...]:
        return next(one for one in gpu.steps(tmp_path, is_dry=True, seconds=60.0) if one.name == "benchmark").command

    assert "--resume" not in command()
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "bench.json").write_text("{}")
    assert "--resume" in command()


def contestant(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Contestant:
    return Contestant("ours, drawn", "pattern", lambda case, device: None, lambda case, operands: attention)


def test_the_gate_passes_what_is_right_and_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    (right,) = (entry for entry in CONTESTANTS if entry.name == "ours, aten")

    def gate(entry: Contestant) -> list[dict[str, Any]]:
        monkeypatch.setattr(gpu_gate, "find_contestants", lambda names, device: (entry,))
        return gpu_gate.gate((), 3, ["bfloat16"], 70, CPU)

    (record,) = gate(right)
    assert (record["calls"], record["wrong"]) == (3, [])
    assert 0.0 < record["used_of_allowed"] <= 1.0
    (record,) = gate(contestant(lambda query, key, value: query + 0 * (key.sum() + value.sum())))
    assert len(record["wrong"]) == 3 * 4

    def broken(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        raise RuntimeError("no such kernel\nand more")

    (record,) = gate(contestant(broken))
    assert [sentence.partition(": ")[2] for sentence in record["wrong"]] == ["RuntimeError: no such kernel"] * 3


def test_it_needs_no_package_beyond_those_of_the_benchmark() -> None:
    code = (
        "import sys\n"
        "for name in ('tyro', 'matplotlib', 'transformers', 'accelerate', 'safetensors'):\n"
        "    sys.modules[name] = None\n"
        "import benchmarks.gpu\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
