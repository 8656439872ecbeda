"""Launchers and trainers that are killed (SIGKILL) at random moments of their start: nothing that they started stays.

    python tests/training/killed_launches.py FOLDER [--torchrun 20] [--plain 50] [--trainers 30] [--seed 0]

``--torchrun`` launches are started by torchrun itself; ``--plain`` ones by a parent that imports nothing and tells its
two ranks what torchrun would, so that most kills fall into the start of the ranks. ``--trainers`` are killed while
their data workers start. A process is known by a variable of its environment; all must end by themselves.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from support.processes import environment, free_port, torchrun
from training.runs import write_texts

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


def kill_launcher(texts: Path, folder: Path, *, after: float, is_torchrun: bool = False) -> float:
    """Kill a launcher of two ranks ``after`` some seconds; the seconds until they have ended."""
    words = _words(texts, folder / "run", "--data-parallel", "fsdp")
    if is_torchrun:
        process, mark = _start([*torchrun(2), *words], folder)
    else:
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


def kill_trainer(texts: Path, folder: Path, *, after: float = 0.0) -> float:
    """Kill a trainer ``after`` some seconds from the start of its data workers; the seconds until they have ended."""
    process, mark = _start([sys.executable, *_words(texts, folder / "run", "--workers", "2")], folder)
    while len(_marked(mark)) < 4:  # the trainer, two workers and the tracker of their semaphores
        assert process.poll() is None, (folder / "said.txt").read_text()
        time.sleep(0.02)
    time.sleep(after)
    return _kill(process, mark)


def main() -> None:
    """Do what the command line asks for; end with 1 if anything stays."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for name, number in (("torchrun", 20), ("plain", 50), ("trainers", 30), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--longest", type=float, default=15.0, help="seconds from the start of a launcher to its kill")
    given = parser.parse_args()
    draw = random.Random(given.seed)
    texts = write_texts(given.folder / "texts")
    for kind, number in (("plain", given.plain), ("torchrun", given.torchrun), ("trainers", given.trainers)):
        seconds, stayed = [], 0
        for trial in range(number):
            folder = given.folder / f"{kind}-{trial}"
            try:
                if kind == "trainers":
                    seconds.append(kill_trainer(texts, folder, after=draw.uniform(0.0, 3.0)))
                else:
                    after = draw.uniform(0.0, given.longest)
                    seconds.append(kill_launcher(texts, folder, after=after, is_torchrun=kind == "torchrun"))
            except AssertionError as error:
                stayed += 1
                print(kind, trial, error, flush=True)
        if seconds:
            print(
                f"{kind}: {number} killed, {stayed} left processes; all ended within {max(seconds)} s "
                f"(median {sorted(seconds)[len(seconds) // 2]} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
