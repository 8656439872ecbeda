"""The command for a machine with a GPU: what a step may do, what is repeated, and that its gate finds what is wrong."""

from __future__ import annotations

import json
import os
import shlex
import shutil
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
from dilated_attention_pytorch.errors import RunError

CPU = torch.device("cpu")


def step(name: str, code: str, **options: Any) -> Step:
    return Step(name=name, command=(sys.executable, "-c", code), **options)


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
    assert f"== right: python -c {shlex.quote(count)}\nsaid\n" in (tmp_path / "out" / gpu.LOG).read_text()
    # A copy of the folder, as from a machine that was lent, is resumed like the folder.
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    assert run(monkeypatch, tmp_path / "copy", *entries) == expected | {"part": "passed"}
    assert (tmp_path / "count").read_text() == "x"


def test_what_a_step_writes_is_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "out" / "step.json"
    write = f"open({str(file)!r}, 'w').write('[1]'); print('said')"
    run(monkeypatch, tmp_path / "out", step("one", write, result=file), step("two", "print('more')", result=file))
    one, two = json.loads((tmp_path / "out" / RECORD).read_text())["steps"]
    assert (one["result"], one["tail"], two["result"], two["tail"]) == ([1], "said\n", None, "more\n")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {RECORD, gpu.LOG}


def test_a_killed_run_keeps_what_passed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = step("first", "raise SystemExit(9)"), step("second", "pass")
    expected = {"first": "failed", "second": "passed"}
    assert run(monkeypatch, tmp_path / "out", first, second) == expected

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gpu.Running, "begin", killed)
        with pytest.raises(KeyboardInterrupt):
            run(patch, tmp_path / "out", first, second)
    passed = gpu.earlier(tmp_path / "out", json.loads((tmp_path / "out" / RECORD).read_text()))
    assert list(passed) == ["second"]


@pytest.mark.parametrize("name", ["code", "dry_run", "versions", "cuda_devices"])
def test_a_folder_of_another_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    run(monkeypatch, tmp_path, step("one", "pass"))
    record = json.loads((tmp_path / RECORD).read_text())
    (record if name in record else record["machine"])[name] = ["another"]
    (tmp_path / RECORD).write_text(json.dumps(record))
    with pytest.raises(RunError, match=rf"holds a run with {name} \['another'\], and here it is .* another --output"):
        run(monkeypatch, tmp_path, step("one", "pass"))
    (tmp_path / RECORD).unlink()
    with pytest.raises(RunError, match="is not empty"):
        run(monkeypatch, tmp_path, step("one", "pass"))


def test_the_process_of_a_step_ends_with_the_command(tmp_path: Path) -> None:
    late = tmp_path / "late"
    slow = f"import time; print('begun', flush=True); time.sleep(2); open({str(late)!r}, 'w')"
    code = (
        "import sys; from pathlib import Path; from benchmarks import gpu\n"
        f"one = gpu.Step(name='slow', command=(sys.executable, '-c', {slow!r}))\n"
        "gpu.steps = lambda output, **options: [one]\n"
        f"sys.argv = ['gpu', '--output', {str(tmp_path / 'out')!r}]\n"
        "gpu.main()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    said = tmp_path / "out" / "slow.txt"
    while process.poll() is None and not (said.exists() and "begun" in said.read_text()):
        time.sleep(0.05)
    process.terminate()
    assert process.wait() == 1
    assert (tmp_path / "out" / gpu.LOG).read_text().endswith("begun\n")
    assert not said.exists()
    time.sleep(2.5)
    assert not late.exists()


def test_a_step_that_takes_too_long_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = tmp_path / "late"
    child = f"import time; time.sleep(1.5); open({str(late)!r}, 'w')"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    entries = (step("slow", parent), step("next", "pass", is_alone=True))
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "_LEAST_SECONDS", 0.1)
        assert run(patch, tmp_path / "out", *entries, seconds=1.5) == {"slow": "cut off", "next": "passed"}
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
    assert [name for name, refusal in dry.items() if refusal is None] == ["gate, aten", "tests, all", "benchmark"]


def test_what_matters_most_comes_first_and_every_test_of_the_kernels_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    entries = gpu.steps(tmp_path, is_dry=False, seconds=560.0)
    commands = {one.name: one.command for one in entries}
    assert next(iter(commands)) == "gate, triton"
    assert [one.name for one in entries if one.is_alone] == list(commands)[-1:] == ["benchmark"]
    for name in ("gate, triton", "memcheck", "racecheck"):
        assert "ours, triton" in commands[name]
    files = {file.stem for file in (gpu.ROOT / gpu.TESTS).glob("test_*.py")} - gpu.WITHOUT_GPU
    by_file = {f"tests, {name}" for name in files} | {f"tests, {name}, drawn calls" for name in gpu.WITH_DRAWN}
    assert {name for name in commands if name.startswith("tests, test_")} == by_file


def test_checks_run_at_once_and_the_benchmark_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two checks waits for the other one's file; the last step finds that both have left."""
    monkeypatch.setattr(gpu, "CORES_EACH", (os.cpu_count() or 1) / 2)
    meet = (
        "import pathlib, time\nhere = pathlib.Path({here!r})\n(here / {own!r}).touch()\n"
        "while not (here / {other!r}).exists(): time.sleep(0.01)\ntime.sleep(0.2)\n(here / {left!r}).touch()"
    )
    (tmp_path / "here").mkdir()
    here = str(tmp_path / "here")
    entries = (
        step("one", meet.format(here=here, own="a", other="b", left="c")),
        step("two", meet.format(here=here, own="b", other="a", left="d")),
        step("last", f"import os; raise SystemExit(len(os.listdir({here!r})) != 4)", is_alone=True),
    )
    assert run(monkeypatch, tmp_path / "out", *entries) == {"one": "passed", "two": "passed", "last": "passed"}


@pytest.mark.parametrize(
    "only", [("gate, aten",), pytest.param(("gate, aten", "benchmark"), marks=pytest.mark.slow)], ids=len
)
def test_all_results_are_few_files(tmp_path: Path, only: tuple[str, ...]) -> None:
    """A machine that is lent gives back at most 8 files with plain names, at most two folders deep."""
    outcomes = gpu.run(tmp_path, is_dry=True, seconds=300.0, only=only)
    assert [one.name for one in outcomes if one.status == "passed"] == list(only)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"gpu.json", "log.txt", *(("bench/bench.json", "bench/page.md") if "benchmark" in only else ())}
    again = gpu.run(tmp_path, is_dry=True, seconds=300.0, only=only)
    assert [one.seconds for one in again] == [one.seconds for one in outcomes]


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
