"""Output paths of commands: checks before the run, creation, atomic writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from .errors import RunError


def check_writable(folder: Path, what: str) -> None:
    """Raise :class:`RunError`, starting with ``what``, if ``folder`` is not writable."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RunError(
            f"{what}: {folder} is read-only for this user; change its permissions (chmod u+w), "
            "or name a folder that can be written"
        )


def check_free_folder(output: Path, *, going_on: str = "", beside: str = "") -> None:
    """Raise :class:`RunError` unless the folder ``output`` is missing or empty and can be created. Creates nothing.

    Args:
        output: output folder; it may exist if it is empty.
        going_on: alternative to suggest if the folder is not empty, appended to the message.
        beside: name, or pattern of names, of files that may be in the folder.
    """
    check_name(output)
    if os.path.lexists(output) and not output.is_dir():
        raise RunError(
            f"--output {output} is a file, not a folder; name a free folder, for example {free_name(output)}"
        )
    if output.is_dir() and any(not fnmatchcase(path.name, beside) for path in output.iterdir()):
        raise RunError(
            f"--output {output} exists and is not empty; nothing in it was changed. Name a free folder, for example "
            f"--output {free_name(output)}{going_on}"
        )
    check_makeable(output)


def check_makeable(output: Path) -> None:
    """Raise :class:`RunError` unless the folder ``output`` exists or can be created, and is writable."""
    check_name(output)
    folder = next(path for path in (output.absolute(), *output.absolute().parents) if os.path.lexists(path))
    if not folder.is_dir():
        raise RunError(f"--output {output} cannot be made: {folder} is a file; name a folder below a folder")
    check_writable(folder, f"--output {output} cannot be made")


def check_name(output: Path, flag: str = "--output") -> None:
    """Raise :class:`RunError` unless the path is valid UTF-8, which libraries that write files require."""
    try:
        str(output).encode()
    except UnicodeEncodeError as error:
        raise RunError(f"{flag} {str(output)!r} is no name in UTF-8; name another one") from error


def check_new_file(output: Path, flag: str = "--output-file") -> None:
    """Raise :class:`RunError` if the file ``output`` (option ``flag``) exists or cannot be written."""
    check_name(output, flag)
    if os.path.lexists(output):
        raise RunError(
            f"{flag} {output} exists; nothing in it was changed. Name a new file, for example {flag} "
            f"{free_name(output)}"
        )
    if not output.parent.is_dir():
        raise RunError(f"{flag} {output}: there is no folder {output.parent}; make it first")
    check_writable(output.parent, f"{flag} {output} cannot be written")


def free_name(output: Path) -> Path:
    """An unused path next to ``output``."""
    if not output.name or output.name == "..":  # ".", "/" and the like
        output = Path(os.path.abspath(output))
    if not output.name:
        output = Path("runs/new")
    number = 2
    while os.path.lexists(candidate := output.with_name(f"{output.stem}-{number}{output.suffix}")):
        number += 1
    return candidate


def make_output(output: Path) -> None:
    """Create the folder.

    Raises:
        RunError: the operating system refuses.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"--output {output} cannot be made ({error.strerror}); name a folder on a disk that can be written"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    with replacing(path) as staged:
        staged.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path, *, check: Callable[[], object] = lambda: None) -> Iterator[Path]:
    """A temporary path that replaces ``path`` atomically on exit, after a sync to disk; an error removes it.

    Args:
        path: final path.
        check: called before the replacement; if it raises, there is none.
    """
    staged = path.with_name(staged_name(path))
    # An existing staged file may be a link to something else.
    staged.unlink(missing_ok=True)
    try:
        yield staged
        sync(staged)
        check()
        os.replace(staged, path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    sync(path.parent)


def staged_name(path: Path) -> str:
    """The name of the file that :func:`replacing` writes, hidden so that readers of folders skip it."""
    return f".{path.name}.part"


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
