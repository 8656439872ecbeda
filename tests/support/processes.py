"""Programs that tests start: their environment, and cleanup so that no process outlives the test."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import dilated_attention_pytorch

TESTS = Path(__file__).parents[1]


def environment(**variables: str) -> dict[str, str]:
    """Environment of a single-threaded program that imports this package and modules of tests."""
    source = Path(dilated_attention_pytorch.__file__).parents[1]
    path = os.pathsep.join(filter(None, (str(source), str(TESTS), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables}


def torchrun(num_processes: int, *options: str) -> list[str]:
    """The beginning of a command that starts ``num_processes`` ranks of a program on this machine."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    return [sys.executable, *launch, *options]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def run_whole(
    command: Sequence[str], seconds: float, *, env: Mapping[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. After ``seconds`` it is stopped with all processes that it started.

    Raises:
        subprocess.TimeoutExpired: the program took longer than ``seconds``.
    """
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=cwd, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except BaseException:  # interrupts too: the terminal does not send them to another session
            end_whole(process)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def end_whole(process: subprocess.Popen[str]) -> None:
    """Stop a program that has its own session, with all processes that it started."""
    # The workers of torchrun have their own sessions. On SIGTERM, torchrun stops them, and kills them after 30 s.
    _send(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=60)
    _send(process.pid, signal.SIGKILL)
    process.wait()


def _send(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
