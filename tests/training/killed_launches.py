"""Launchers and trainers that are killed (SIGKILL) while they start: nothing that they started stays.

Launchers are a parent that imports nothing and tells its two ranks what torchrun would, so that a kill falls into the
start of the ranks. A process is known by a variable of its environment; all must end by themselves.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from support.processes import environment, free_port

HANG_SECONDS = 600.0
_PLAIN = """
import os, subprocess, sys, time
ranks = [
    subprocess.Popen(sys.argv[1:], env={**os.environ, "RANK": rank, "LOCAL_RANK": rank}, start_new_session=True)
    for rank in ("0", "1")
]
time.sleep(3600)
"""


def _words(texts: Path, output: Path, *more: str) -> list[str]:
    words = "-m dilated_attention_pytorch train --preset tiny --steps 100000 --device cpu --threads 1 --timeout 6"
    return [*words.split(), "--data", str(texts), "--output", str(output), *more]


def _marked(mark: str) -> list[int]:
    """The processes, alive, that have ``mark`` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:
            pass  # ended, or of another user
    return found


def _kill(process: subprocess.Popen[str], mark: str) -> float:
    """Kill it; the seconds until all that it started has ended."""
    process.kill()
    process.wait()
    start = time.monotonic()
    while left := _marked(mark):
        if time.monotonic() - start > HANG_SECONDS:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"{len(left)} processes stay")
        time.sleep(0.05)
    return round(time.monotonic() - start, 2)


def _start(command: Sequence[str], folder: Path, **variables: str) -> tuple[subprocess.Popen[str], str]:
    mark = f"MARK={uuid.uuid4().hex}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "said.txt", "a") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=said, text=True, env=environment(MARK=mark.partition("=")[2], **variables)
        )
    return process, mark


def kill_launcher(texts: Path, folder: Path, *, after: float) -> float:
    """Kill a launcher of two ranks ``after`` some seconds; the seconds until they have ended."""
    words = _words(texts, folder / "run", "--data-parallel", "fsdp")
    process, mark = _start(
        [sys.executable, "-c", _PLAIN, sys.executable, *words],
        folder,
        TORCHELASTIC_RUN_ID="none",
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="localhost",
        MASTER_PORT=str(free_port()),
    )
    time.sleep(after)
    assert process.poll() is None
    return _kill(process, mark)


def kill_trainer(texts: Path, folder: Path) -> float:
    """Kill a trainer at the start of its data workers; the seconds until they have ended."""
    process, mark = _start([sys.executable, *_words(texts, folder / "run", "--workers", "2")], folder)
    while len(_marked(mark)) < 4:  # the trainer, two workers and the tracker of their semaphores
        assert process.poll() is None, (folder / "said.txt").read_text()
        time.sleep(0.02)
    return _kill(process, mark)
