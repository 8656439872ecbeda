"""Sharing slides among commands that write to one folder: each slide is claimed by one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock, Timeout

from dilated_attention_pytorch.output import make_output

CLAIMS_NAME = "_embed.json.claims"


class Claims:
    """Locks of slides in an output folder. The operating system releases a lock when its process ends.

    Args:
        folder: the output folder; commands on other hosts must see its locks (``flock``).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / CLAIMS_NAME
        self._held: dict[str, FileLock] = {}
        self._taken: set[str] = set()

    def take(self, slide: str) -> bool:
        """Claim a slide; False if another command has it."""
        make_output(self.folder)
        lock = FileLock(self._file(slide), thread_local=False)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            return False
        self._held[slide] = lock
        self._taken.add(slide)
        return True

    def release(self, slide: str) -> None:
        """Give a slide back, finished or not."""
        self._held.pop(slide).release()

    def end(self, *, is_complete: bool) -> None:
        """Give all slides back; remove the files of this command's locks if it has nothing left to do.

        A command that takes a slide afterwards finds it finished, or tries what failed here.
        """
        for slide in [*self._held]:
            self.release(slide)
        if is_complete:
            for slide in self._taken:
                self._file(slide).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty: other commands have locks there
                self.folder.rmdir()

    def _file(self, slide: str) -> Path:
        return self.folder / f"{slide}.lock"


def part_of_launcher(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """The part, from 1, and the number of parts by the variables of torchrun, srun and Slurm's arrays; None alone."""

    def numbers(*names: str) -> list[int] | None:
        values = [environment.get(name, "") for name in names]
        return [int(value) for value in values] if all(value.isdecimal() for value in values) else None

    part, parts = 0, 1
    if (process := numbers("RANK", "WORLD_SIZE") or numbers("SLURM_PROCID", "SLURM_NTASKS")) is not None:
        part, parts = process
    if (array := numbers("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_COUNT")) is not None:
        step = numbers("SLURM_ARRAY_TASK_STEP") or [1]
        task, first, tasks = array
        part, parts = part + (task - first) // max(1, step[0]) * parts, parts * tasks
    return (part + 1, parts) if 0 <= part < parts and parts > 1 else None


def part_of(paths: dict[str, Path], part: int, parts: int) -> dict[str, Path]:
    """Part ``part`` (from 1) of the slides: the largest file first, each to the part with the fewest bytes so far."""
    sizes = [0] * parts
    found: dict[str, Path] = {}
    for name, path in sorted(paths.items(), key=lambda item: (-_size(item[1]), item[0])):
        least = sizes.index(min(sizes))
        sizes[least] += _size(path)
        if least == part - 1:
            found[name] = path
    return dict(sorted(found.items()))


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):  # reported where it is read
        return path.stat().st_size
    return 0
