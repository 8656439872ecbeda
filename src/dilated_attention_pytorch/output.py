"""Folders and files that a command writes to: whether they are free and can be written, and making them."""

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


def check_free_folder(output: Path, *, going_on: str = "", beside: str = "") -> None:
    """Raise :class:`RunError` unless the folder ``output`` is free and can be made. Makes nothing.

    Args:
        output: a folder that is to be made, or is there and empty.
        going_on: what else to do where something is in it, the end of that sentence.
        beside: a file that may be in it.
    """
    check_name(output)
    if os.path.lexists(output) and not output.is_dir():
        raise RunError(
            f"--output {output} is a file, not a folder; name a free folder, for example {free_name(output)}"
        )
    if output.is_dir() and any(path.name != beside for path in output.iterdir()):
        raise RunError(
            f"--output {output} exists and is not empty; nothing in it was changed. Name a free folder, for example "
            f"--output {free_name(output)}{going_on}"
        )
    check_makeable(output)


def check_makeable(output: Path) -> None:
    """Raise :class:`RunError` unless the folder ``output`` is there or can be made, and can be written."""
    check_name(output)
    folder = next(path for path in (output.absolute(), *output.absolute().parents) if os.path.lexists(path))
    if not folder.is_dir():
        raise RunError(f"--output {output} cannot be made: {folder} is a file; name a folder below a folder")
    check_writable(folder, f"--output {output} cannot be made")


def check_name(output: Path) -> None:
    """Raise :class:`RunError` unless the name is text, which libraries that write files take no other of."""
    try:
        str(output).encode()
    except UnicodeEncodeError as error:
        raise RunError(f"--output {str(output)!r} is no name in UTF-8; name another one") from error


def check_new_file(output: Path) -> None:
    """Raise :class:`RunError` unless the file ``output`` is not there yet and can be written."""
    check_name(output)
    if os.path.lexists(output):
        raise RunError(
            f"--output {output} exists; nothing in it was changed. Name a new file, for example --output "
            f"{free_name(output)}"
        )
    if not output.parent.is_dir():
        raise RunError(f"--output {output}: there is no folder {output.parent}; make it first")
    check_writable(output.parent, f"--output {output} cannot be written")


def free_name(output: Path) -> Path:
    """A name beside ``output`` that nothing has."""
    if not output.name or output.name == "..":  # ".", "/" and the like
        output = Path(os.path.abspath(output))
    if not output.name:
        output = Path("runs/new")
    number = 2
    while os.path.lexists(candidate := output.with_name(f"{output.stem}-{number}{output.suffix}")):
        number += 1
    return candidate


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
