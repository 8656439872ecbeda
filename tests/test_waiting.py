"""Threads of the command wait asleep where the machine is shared, unless the user chose."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dilated_attention_pytorch import waiting
from dilated_attention_pytorch.waiting import choose_waiting

TRAIN = ["python", "-u", "-m", "dilated_attention_pytorch", "train"]


@pytest.mark.parametrize(
    ("command", "is_own"),
    [
        (TRAIN, True),
        (["python", "-X", "dev", "-m", "dilated_attention_pytorch.benchmarks"], True),
        (["/venv/bin/python", "/venv/bin/dilated-attention", "train"], True),
        (["python", "-m", "pytest", "dilated-attention"], False),
        (["python", "train.py", "dilated-attention"], False),
        (["python", "-c", "import dilated_attention_pytorch"], False),
        (["python"], False),
    ],
)
def test_programs_that_import_the_package_are_left_alone(
    command: list[str], is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "is_shared", lambda: True)
    environment: dict[str, str] = {}
    choose_waiting(environment, command)
    assert environment == ({"OMP_WAIT_POLICY": "PASSIVE"} if is_own else {})


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_what_the_user_set_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "is_shared", lambda: True)
    environment = {name: "7"}
    choose_waiting(environment, TRAIN)
    assert environment == {name: "7"}


@pytest.mark.parametrize(
    ("quota", "load", "running", "is_shared"),
    [
        (float("inf"), 0.1, 1, False),
        (64.0, 0.49, 1, False),
        (1.5, 0.0, 1, True),
        (float("inf"), 0.5, 1, True),
        (float("inf"), 0.0, 2, True),
    ],
)
def test_a_machine_is_shared_by_quota_by_load_and_by_what_runs(
    quota: float, load: float, running: int, is_shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "loadavg"
    file.write_text(f"{load} {load} {load} {running}/345 678\n")
    monkeypatch.setattr(waiting, "_LOAD", file)
    monkeypatch.setattr(waiting, "_quota", lambda: quota)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    assert waiting.is_shared() is is_shared


@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch brings libgomp on Linux")
def test_beside_a_busy_program_the_runtime_of_the_command_does_not_spin() -> None:
    # The runtime itself says, when it is loaded, how often a waiting thread turns before it sleeps.
    environment = {name: value for name, value in os.environ.items() if name not in waiting._SET_BY_USER}
    command = [sys.executable, "-m", "dilated_attention_pytorch", "info"]
    busy = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        assert busy.stdout is not None
        busy.stdout.readline()
        run = subprocess.run(
            command, env=environment | {"OMP_DISPLAY_ENV": "VERBOSE"}, capture_output=True, text=True, check=True
        )
    finally:
        busy.kill()
        busy.communicate()
    assert "GOMP_SPINCOUNT = '0'" in run.stderr
    assert "OMP_WAIT_POLICY=PASSIVE" in run.stdout
