"""Manifests: file sizes and SHA-256 digests that let a reader verify a folder."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.output import write_text

MANIFEST_NAME = "manifest.json"
_FORMAT = 1
_DIGEST = "sha256"
_LONGEST = 1 << 24
"""Size limit of a JSON file in bytes: the manifest of a run with 100,000 processes fits."""


def write_manifest(folder: Path, names: Collection[str], **about: Any) -> None:
    """Write sizes and SHA-256 of the files ``names`` of ``folder``, and ``about``, to its manifest.

    Everything is synced to disk on return, the manifest last.
    """
    values = {"format": _FORMAT, **about, "files": sums(folder, names)}
    write_text(folder / MANIFEST_NAME, sealed(values))


def sums(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Sizes and SHA-256 of files; syncs them to disk."""
    entries = {}
    for name in sorted(names):
        with open(folder / name, "rb") as file:
            entries[name] = {"bytes": os.fstat(file.fileno()).st_size, _DIGEST: _sum(file)}
            os.fsync(file.fileno())
    return entries


def verify_manifest(folder: Path, *, what: str, remedy: str, reading: Collection[str] | None = None) -> dict[str, Any]:
    """Verify the files to be read against the manifest of ``folder``; returns the manifest.

    Args:
        folder: the folder.
        what, remedy: subject and advice of error messages.
        reading: names of the files; None = all files of the manifest.

    Raises:
        RunError: a file or the manifest is missing, changed, or not a regular file.
    """
    path = folder / MANIFEST_NAME
    manifest = read_sealed(path, what=what, remedy=remedy)
    if manifest.get("format") != _FORMAT:
        raise RunError(f"{what}: {path} has the format {manifest.get('format')!r}, expected {_FORMAT}; {remedy}")
    files = manifest.get("files")
    verify_sums(folder, files, what=what, remedy=remedy, reading=reading)
    return manifest


def verify_sums(folder: Path, files: Any, *, what: str, remedy: str, reading: Collection[str] | None = None) -> None:
    """Raise :class:`RunError` unless files match ``files``, a result of :func:`sums`."""
    if not isinstance(files, dict):
        raise RunError(f"{what}: {folder} has no list of the files that were written there; {remedy}")
    for name in files if reading is None else reading:
        entry = files.get(name)
        if not isinstance(entry, dict):
            raise RunError(f"{what}: {folder / name} is not among the files that were written there; {remedy}")
        if name != Path(name).name:
            raise RunError(f"{what}: {name!r} is not the name of a file in {folder}; {remedy}")
        _verify_file(folder / name, entry, f"{what}: {folder / name}", remedy)


def _verify_file(path: Path, entry: dict[str, Any], what: str, remedy: str) -> None:
    with opened(path, what, remedy) as file:
        size = os.fstat(file.fileno()).st_size
        if size != entry.get("bytes"):
            raise RunError(
                f"{what} is damaged or was not written to its end: it has {size:,} bytes, and {entry.get('bytes')!r} "
                f"were written; {remedy}"
            )
        if _sum(file) != entry.get(_DIGEST):
            raise RunError(f"{what} is damaged: its bytes are not those that were written (SHA-256); {remedy}")


@contextmanager
def opened(path: Path, what: str, remedy: str) -> Iterator[BufferedReader]:
    """The regular file at ``path``, opened for reading; devices and pipes are rejected.

    Raises:
        RunError: it does not exist, is not a regular file, or cannot be read.
    """
    try:
        # Opening a pipe would otherwise block until a writer opens it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise RunError(f"{what} does not exist; {remedy}") from error
    except PermissionError as error:
        raise RunError(f"{what} may not be read by this user; change its permissions (chmod +r)") from error
    except OSError as error:
        raise RunError(f"{what} cannot be read ({error.strerror}); {remedy}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RunError(f"{what} is not a regular file; {remedy}")
    with open(descriptor, "rb") as file:
        try:
            yield file
        except OSError as error:
            raise RunError(f"{what} cannot be read ({error.strerror}); {remedy}") from error


def sealed(values: Mapping[str, Any]) -> str:
    """JSON of ``values`` plus their digest, for :func:`read_sealed`. A digest among the values is ignored."""
    values = {name: value for name, value in values.items() if name != _DIGEST}
    return json.dumps({**values, _DIGEST: _digest_of(values)}, indent=2) + "\n"


def sealed_line(values: Mapping[str, Any]) -> str:
    """:func:`sealed` on one line without its newline, for :func:`unsealed`."""
    return json.dumps({**values, _DIGEST: _digest_of(values)})


def unsealed(line: bytes) -> dict[str, Any] | None:
    """The values of a line from :func:`sealed_line`; None for any other line."""
    try:
        values = json.loads(line)
        is_ours = isinstance(values, dict) and values.pop(_DIGEST, None) == _digest_of(values)
    except (ValueError, RecursionError):
        return None
    return values if is_ours else None


def read_sealed(path: Path, *, what: str, remedy: str) -> dict[str, Any]:
    """The values of a file from :func:`sealed`, without the digest.

    Raises:
        RunError: it is missing, has another format, or was changed.
    """
    values = read_json(path, what=what, remedy=remedy)
    digest = values.pop(_DIGEST, None)
    if digest is None:
        raise RunError(
            f"{what}: {path} has no checksum of its own: it was written by an earlier version of this package, which "
            f"is the one to go on with, or by hand; {remedy}"
        )
    try:
        expected = _digest_of(values)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{what}: {path} is damaged: not a file that this package writes ({error}); {remedy}") from error
    if digest != expected:
        raise RunError(f"{what}: {path} is damaged or was changed: its checksum is another one; {remedy}")
    return values


def read_json(path: Path, *, what: str, remedy: str) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        RunError: it is missing, or not a JSON object; ``what`` and ``remedy`` are subject and advice of the message.
    """
    if path.parent.exists() and not path.parent.is_dir():
        raise RunError(f"{what}: {path.parent} is a file, not a folder; {remedy}")
    with opened(path, f"{what}: {path}", remedy) as file:
        content = file.read(_LONGEST + 1)
    if len(content) > _LONGEST:
        raise RunError(f"{what}: {path} is damaged, it is larger than any that is written; {remedy}")
    try:
        values = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{what}: {path} is damaged, it is not JSON ({error}); {remedy}") from error
    if not isinstance(values, dict):
        raise RunError(f"{what}: {path} is damaged, it is not a JSON object; {remedy}")
    return values


def _digest_of(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _sum(file: BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()
