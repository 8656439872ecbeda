"""Folders that a command writes to: whether they can be written, and making them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import RunError


def check_writable(folder: Path, what: str) -> None:
    """Raise :class:`RunError`, beginning with ``what``, if the file system or the permissions of ``folder`` refuse."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RunError(
            f"{what}: {folder} is read-only for this user; change its permissions (chmod u+w), "
            "or name a folder that can be written"
        )


def make_output(output: Path) -> None:
    """Make the folder.

    Raises:
        RunError: the system refuses.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"--output {output} cannot be made ({error.strerror}); name a folder on a disk that can be written"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a file that is whole or not there."""
    with replacing(path) as staged:
        staged.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write a file that is whole or not there: it takes the place of ``path`` at the end, on the disk."""
    staged = path.with_name(path.name + ".part")
    # What lies there may be a link to something else.
    staged.unlink(missing_ok=True)
    yield staged
    sync(staged)
    os.replace(staged, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
