"""Text files as one row of bytes, with some of the files held out."""

from __future__ import annotations

import errno
import hashlib
import os
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dilated_attention_pytorch.errors import RunError

SEPARATOR = 0
"""The byte before every file: no text holds it."""

CORPUS_KEYS = ("training_bytes", "training_files", "held_out_bytes", "held_out_files", "checksum")
"""What :func:`corpus_figures` says."""

_HELD_OUT_PARTS = 20
"""One part in twenty of the files is held out."""


@dataclass(frozen=True, slots=True)
class Text:
    """Files one after the other, each preceded by the separator."""

    data: Tensor
    """uint8 ``[bytes]``."""
    file_starts: Tensor
    """int64 ``[files]``: where the separator of each file is."""

    def __len__(self) -> int:
        return self.data.shape[0]

    def file(self, index: int) -> Tensor:
        """File ``index`` with the separator before it."""
        stop = self.file_starts[index + 1] if index + 1 < len(self.file_starts) else len(self)
        return self.data[self.file_starts[index] : stop]


@dataclass(frozen=True, slots=True)
class Corpus:
    """What to train on, and what is held out: the same on every run over the same files."""

    training: Text
    held_out: Text
    skipped: int
    """Files found in folders and left out: empty, or not UTF-8 text."""


def standard_library() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_corpus(paths: Sequence[Path] = ()) -> Corpus:
    """The files at ``paths``, folders searched for text files; without any, the source of Python's standard library.

    About one file in twenty is held out, by a hash of its path relative to the folder that was given, and at least
    one; a single file is cut instead, at its last twentieth.

    Raises:
        RunError: a path that is missing, empty, unreadable or not text; what to do about it is in the message.
    """
    files: list[tuple[str, bytes]] = []
    skipped = 0
    for path in paths or (standard_library(),):
        if path.is_dir():
            suffix = "" if paths else ".py"
            found, left_out = _read_folder(path, suffix)
            files += found
            skipped += left_out
        else:
            files.append((path.name, _read_named(path)))
    held_out = _held_out(files)
    if not held_out:
        content = files[0][1]
        cut = _character_boundary(content, len(content) - max(1, len(content) // _HELD_OUT_PARTS))
        return Corpus(_text([content[:cut]]), _text([content[cut:]]), skipped)
    training = [content for index, (_, content) in enumerate(files) if index not in held_out]
    return Corpus(_text(training), _text([files[index][1] for index in sorted(held_out)]), skipped)


def corpus_figures(corpus: Corpus) -> dict[str, int]:
    """How much text there is, by which a run that is taken up knows its text again."""
    checksum = 0
    for text in (corpus.training, corpus.held_out):
        checksum = zlib.crc32(text.data.numpy().tobytes(), checksum)
    numbers = (
        len(corpus.training), len(corpus.training.file_starts), len(corpus.held_out), len(corpus.held_out.file_starts),
        checksum,
    )  # fmt: skip
    return dict(zip(CORPUS_KEYS, numbers, strict=True))


def _held_out(files: Sequence[tuple[str, bytes]]) -> set[int]:
    """The files to hold out; none if there is only one."""
    hashes = [int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()) for name, _ in files]
    chosen = {index for index, number in enumerate(hashes) if number % _HELD_OUT_PARTS == 0}
    if len(files) > 1 and not chosen:
        chosen = {min(range(len(files)), key=lambda index: (hashes[index], index))}
    if len(chosen) == len(files):
        chosen.discard(max(chosen, key=lambda index: (hashes[index], index)))
    return chosen


def _text(contents: Sequence[bytes]) -> Text:
    data = bytearray()
    starts = []
    for content in contents:
        starts.append(len(data))
        data.append(SEPARATOR)
        data += content
    return Text(torch.frombuffer(data, dtype=torch.uint8), torch.tensor(starts, dtype=torch.int64))


def _character_boundary(content: bytes, cut: int) -> int:
    """The last place at or before ``cut`` where a UTF-8 character begins."""
    while cut > 0 and content[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


def _is_text(content: bytes) -> bool:
    if SEPARATOR in content:
        return False
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(_why_unreadable(path, error)) from error


def _why_unreadable(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"--data: {path} does not exist; check the path (it is read from {Path.cwd()})"
    if isinstance(error, PermissionError):
        return f"--data: {path} may not be read by this user; change its permissions (chmod +r) or leave it out"
    reason = os.strerror(error.errno if error.errno is not None else errno.EIO)
    return f"--data: {path} cannot be read ({reason}); check the disk that it is on, or leave it out"


def _read_named(path: Path) -> bytes:
    content = _read(path)
    if not content:
        raise RunError(f"--data: {path} is empty; name a file that holds text")
    if not _is_text(content):
        raise RunError(
            f"--data: {path} is not text: it holds zero bytes or is not UTF-8; "
            "name text files, or convert it (iconv -f LATIN1 -t UTF-8)"
        )
    return content


def _read_folder(folder: Path, suffix: str) -> tuple[list[tuple[str, bytes]], int]:
    """The text files below a folder by their path in it, and how many others there are; hidden names are passed by."""
    files = []
    skipped = 0

    def refuse(error: OSError) -> None:
        raise RunError(_why_unreadable(Path(error.filename), error)) from error

    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in ("site-packages", "dist-packages", "__pycache__")
        )
        for name in sorted(names):
            path = Path(place, name)
            if name.startswith(".") or not name.endswith(suffix) or not path.is_file():
                continue
            content = _read(path)
            if content and _is_text(content):
                files.append((path.relative_to(folder).as_posix(), content))
            else:
                skipped += 1
    if not files:
        raise RunError(
            f"--data: the folder {folder} holds no text file ({skipped} files were looked at); "
            "name a folder with UTF-8 text files in it"
        )
    return files, skipped
