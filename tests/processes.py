"""Programs that tests start: no process of theirs outlives the test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_whole(
    command: Sequence[str], seconds: float, *, env: Mapping[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. One that takes longer than ``seconds`` hangs, and is ended with all that it started.

    Raises:
        subprocess.TimeoutExpired: it took longer.
    """
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=cwd, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except BaseException:  # an interrupt too: the terminal sends none to a session of its own
            end_whole(process)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def end_whole(process: subprocess.Popen[str]) -> None:
    """End a program that has a session of its own, and all that it started."""
    # The workers of torchrun have sessions of their own. It ends them when it is told to end: after 30 s by force.
    _send(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=60)
    _send(process.pid, signal.SIGKILL)
    process.wait()


def _send(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
