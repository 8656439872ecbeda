"""Reading of the text files of ``--data`` into memory; other files are counted by reason."""

from __future__ import annotations

import codecs
import errno
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.memory import check_memory, in_bytes

from .data.records import are_records, compression_in_words, records

_LOOKED_AT = 1 << 16
"""Bytes to inspect first, so that large non-text files are not read."""
_CHECKED_EVERY = 1 << 24
"""Bytes between checks of free memory."""
_TOO_MUCH = "name fewer files, or keep the text on the disk (train --cache FOLDER)"
_SILENT_SECONDS = 5.0
_OTHERS_FOLDERS = ("site-packages", "dist-packages", "__pycache__")

EMPTY, NO_TEXT, IRREGULAR, GONE = "empty", "not UTF-8 text", "no regular files", "gone while the folder was read"
COMPRESSED = "compressed"
"""Reasons for skipping files of folders."""


class TextFiles:
    """Reads text files one after the other.

    Args:
        separator: byte that text must not contain.
        say: called with progress messages every few seconds.
    """

    def __init__(self, separator: int, say: Callable[[str], None] | None = None) -> None:
        self.separator = separator
        self.files: list[tuple[str, bytes]] = []
        """Names (relative paths for files of folders) and contents."""
        self.skipped: Counter[str] = Counter()
        """Number of skipped files of folders, by reason."""
        self._say = say
        self._said_at = time.monotonic()
        self._bytes, self._unchecked = 0, 0

    def read_file(self, path: Path) -> None:
        """Read a file that was given by name.

        Raises:
            RunError: it is missing, unreadable, empty, not a regular file, or not text.
        """
        try:
            status = path.stat()
        except (OSError, ValueError) as error:
            raise RunError(_why_unreadable(path, error)) from error
        if not stat.S_ISREG(status.st_mode):
            raise RunError(f"--data: {path} is no regular file and no folder; write its text to a file and name that")
        if not status.st_size:
            raise RunError(f"--data: {path} is empty; name a file that holds text")
        content = self._read(path, status.st_size)
        if content is None:
            compression = _compression_of(path)
            if compression is not None:
                raise RunError(f"--data: {path} is {compression}, and name that")
            raise RunError(
                f"--data: {path} is not text: it holds zero bytes or is not UTF-8; "
                "name text files, or convert it (iconv -f LATIN1 -t UTF-8)"
            )
        self.files.append((path.name, content))

    def read_folder(self, folder: Path, suffix: str) -> None:
        """Read the text files in a folder tree with a name suffix; hidden names are skipped.

        Raises:
            RunError: a file or folder is unreadable, or none is text.
        """
        found, skipped = len(self.files), self.skipped.total()

        def refuse(error: OSError) -> None:
            # Entries below the folder may disappear during the search, as in /proc.
            if error.errno not in (errno.ENOENT, errno.ESRCH) or Path(error.filename) == folder:
                raise RunError(_why_unreadable(Path(error.filename), error)) from error
            self.skipped[GONE] += 1

        for place, folders, names in os.walk(folder, onerror=refuse):
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _OTHERS_FOLDERS)
            self._report(place)
            for name in sorted(names):
                if not name.startswith(".") and name.endswith(suffix):
                    self._read_found(Path(place, name), folder)
        if len(self.files) == found:
            looked_at = self.skipped.total() - skipped
            raise RunError(
                f"--data: the folder {folder} holds no text file ({looked_at} files were looked at"
                f"{in_words(self.skipped, ': ')}); name a folder with UTF-8 text files in it"
            )

    def read_records(self, path: Path, text_field: str) -> None:
        """Read the texts of a record file, each of which counts as a file.

        Raises:
            RunError: see :func:`.data.records.records`; or no record contains text.
        """
        found = len(self.files)
        for record in records(path, text_field):
            self._report(path)
            if not record.text:
                self.skipped[EMPTY] += 1
                continue
            self._check_memory(path, len(record.text))
            self._bytes += len(record.text)
            self.files.append((record.name, record.text))
        if len(self.files) == found:
            raise RunError(f"--data: {path} holds no record with text in it; name a file that does")

    def _read_found(self, path: Path, folder: Path) -> None:
        self._report(path)
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                reason = IRREGULAR
            elif not status.st_size:
                reason = EMPTY
            else:
                content = self._read(path, status.st_size)
                if content is not None:
                    self.files.append((path.relative_to(folder).as_posix(), content))
                    return
                reason = NO_TEXT if _compression_of(path) is None else COMPRESSED
        except FileNotFoundError:
            reason = IRREGULAR if path.is_symlink() else GONE
        except OSError as error:
            raise RunError(_why_unreadable(path, error)) from error
        self.skipped[reason] += 1

    def _read(self, path: Path, size: int) -> bytes | None:
        """The contents of a regular file; None if it is not text."""
        with path.open("rb") as stream:
            if not self._is_text(stream.read(_LOOKED_AT), is_whole=False):
                return None
        self._check_memory(path, size)
        content = path.read_bytes()
        if not content or not self._is_text(content, is_whole=True):
            return None
        self._bytes += len(content)
        return content

    def _check_memory(self, path: Path, size: int) -> None:
        self._unchecked += size
        if self._unchecked >= _CHECKED_EVERY:
            self._unchecked = 0
            # This file, plus all contents once more when they are concatenated.
            needed = self._bytes + 2 * size
            check_memory(needed, "cpu", what=f"--data: the text up to {path}", remedy=_TOO_MUCH)

    def _is_text(self, content: bytes, *, is_whole: bool) -> bool:
        if self.separator in content:
            return False
        try:
            codecs.getincrementaldecoder("utf-8")().decode(content, final=is_whole)
        except UnicodeDecodeError:
            return False
        return True

    def _report(self, place: str | Path) -> None:
        if self._say is not None and time.monotonic() - self._said_at > _SILENT_SECONDS:
            self._said_at = time.monotonic()
            self._say(
                f"reading --data: {len(self.files):,} files of text, {in_bytes(self._bytes)}, now in {place}"
                f"{in_words(self.skipped, '; left out: ')}"
            )


def in_words(skipped: Counter[str], before: str) -> str:
    """The skipped files by reason, after the prefix ``before``; empty if there are none."""
    return before + ", ".join(f"{count:,} {reason}" for reason, count in skipped.items()) if skipped else ""


def _compression_of(path: Path) -> str | None:
    with path.open("rb") as stream:
        return compression_in_words(stream.read(8), path)


def _why_unreadable(path: Path, error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"--data: {path} does not exist; check the path (it is read from {Path.cwd()})"
    if isinstance(error, PermissionError):
        return f"--data: {path} may not be read by this user; change its permissions (chmod +r) or leave it out"
    if isinstance(error, ValueError) or error.errno is None:
        return f"--data: {path} cannot be read ({error}); name another path"
    reason = os.strerror(error.errno)
    return f"--data: {path} cannot be read ({reason}); check the disk that it is on, or leave it out"


def read_text_files(
    paths: Sequence[Path],
    *,
    separator: int,
    suffix: str = "",
    text_field: str = "text",
    say: Callable[[str], None] | None = None,
) -> TextFiles:
    """The files at ``paths``; folders are searched for files with the name suffix; record files are read.

    Raises:
        RunError: see :class:`TextFiles` and :func:`.data.records.records`.
    """
    files = TextFiles(separator, say)
    for path in paths:
        if are_records(path):
            files.read_records(path, text_field)
        elif path.is_dir():
            files.read_folder(path, suffix)
        else:
            files.read_file(path)
    return files
