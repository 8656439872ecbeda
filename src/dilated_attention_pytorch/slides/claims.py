"""Sharing slides among commands that write to one folder: each slide is claimed by one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
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

    def take(self, slide: str) -> bool:
        """Claim a slide; False if another command has it."""
        make_output(self.folder)
        lock = FileLock(self._file(slide), thread_local=False)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            return False
        self._held[slide] = lock
        return True

    def is_free(self, slide: str) -> bool:
        """Whether no other command has a slide now."""
        is_free = self.take(slide)
        if is_free:
            self.release(slide)
        return is_free

    def release(self, slide: str) -> None:
        """Give a slide back, finished or not."""
        self._held.pop(slide).release()

    def release_all(self) -> None:
        """Give all slides back."""
        for slide in [*self._held]:
            self.release(slide)

    def remove(self, slides: Iterable[str]) -> None:
        """Remove the locks of slides that have embeddings, or failed.

        A command that takes such a slide afterwards finds it finished, or tries what failed here.
        """
        for slide in slides:
            self._file(slide).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # missing, or not empty: other commands have locks there
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


def local_process(environment: Mapping[str, str]) -> int:
    """The number of the process on its machine, by the variables of torchrun and srun; 0 alone."""
    values = (environment.get(name, "") for name in ("LOCAL_RANK", "SLURM_LOCALID"))
    return next((int(value) for value in values if value.isdecimal()), 0)


def part_of(inputs: Mapping[str, tuple[Path, ...]], part: int, parts: int) -> dict[str, tuple[Path, ...]]:
    """Part ``part`` (from 1) of the inputs: the most bytes first, each to the part with the fewest bytes so far."""
    sizes = [0] * parts
    found = []
    of_input = {name: _size(paths) for name, paths in inputs.items()}
    for name in sorted(inputs, key=lambda name: (-of_input[name], name)):
        least = sizes.index(min(sizes))
        sizes[least] += of_input[name]
        if least == part - 1:
            found.append(name)
    return {name: inputs[name] for name in sorted(found)}


def _size(paths: Sequence[Path]) -> int:
    with contextlib.suppress(OSError):  # reported where it is read
        return sum(path.stat().st_size for path in paths)
    return 0
