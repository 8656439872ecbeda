"""Text files as one row of bytes, with some of the files held out."""

from __future__ import annotations

import hashlib
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .text_files import read_text_files

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
    skipped: Counter[str]
    """How many files found in folders were left out, by the reason."""


def standard_library() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_corpus(paths: Sequence[Path] = (), *, say: Callable[[str], None] | None = None) -> Corpus:
    """The files at ``paths``, folders searched for text files; without any, the source of Python's standard library.

    About one file in twenty is held out, by a hash of its path relative to the folder that was given, and at least
    one; a single file is cut instead, at its last twentieth.

    Args:
        paths: regular files, and folders.
        say: is given a sentence on how far it is, whenever some seconds have passed in silence.

    Raises:
        RunError: a path that is missing, empty, unreadable, irregular or not text, or more text than the memory that is
            free; what to do about it is in the message.
    """
    found = read_text_files(paths or (standard_library(),), separator=SEPARATOR, suffix="" if paths else ".py", say=say)
    files, skipped = found.files, found.skipped
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
