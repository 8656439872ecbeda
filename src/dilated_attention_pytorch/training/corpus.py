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
    """Unsigned integers ``[tokens]``: bytes, uint8, or the tokens of a tokenizer."""
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
    """How many files found in folders, and records, were left out, by the reason."""
    figures: dict[str, int] | None = None
    """What :func:`corpus_figures` says, where it is known already."""


def standard_library() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


class Split:
    """Which documents are held out: about one in twenty, by a hash of its name, and at least one; a single one is cut.

    All names are given to :meth:`add` first, in the order of the documents.
    """

    def __init__(self) -> None:
        self.count = 0
        self._num_chosen = 0
        self._least = self._most = (0, 0)

    def add(self, name: str) -> None:
        """Count a document."""
        ranked = (_hash(name), self.count)
        self._least = min(self._least, ranked) if self.count else ranked
        if ranked[0] % _HELD_OUT_PARTS == 0:
            self._most = max(self._most, ranked) if self._num_chosen else ranked
            self._num_chosen += 1
        self.count += 1

    def is_held_out(self, index: int, name: str) -> bool:
        """Whether document ``index`` is; of a single one that is cut it is not."""
        if self._num_chosen == 0:
            return self.count > 1 and index == self._least[1]
        is_only_training = self._num_chosen == self.count and index == self._most[1]
        return _hash(name) % _HELD_OUT_PARTS == 0 and not is_only_training


def size_held_out(size: int) -> int:
    """Of a single document of so many bytes: how many of them, at its end, are held out, but for a character cut."""
    return max(1, size // _HELD_OUT_PARTS)


def read_corpus(
    paths: Sequence[Path] = (), *, text_field: str = "text", say: Callable[[str], None] | None = None
) -> Corpus:
    """The files at ``paths``, folders searched for text files; without any, the source of Python's standard library.

    About one document in twenty is held out, by a hash of its path relative to the folder that was given, or of its
    file and number in it, and at least one; a single file is cut instead, at its last twentieth.

    Args:
        paths: regular files, folders, and files of records (JSONL, Parquet, folders that ``datasets`` saved).
        text_field: the member or column of records that holds the text.
        say: is given a sentence on how far it is, whenever some seconds have passed in silence.

    Raises:
        RunError: a path that is missing, empty, unreadable, irregular or not text, or more text than the memory that is
            free; what to do about it is in the message.
    """
    found = read_text_files(
        paths or (standard_library(),), separator=SEPARATOR, suffix="" if paths else ".py", text_field=text_field,
        say=say,
    )  # fmt: skip
    files, skipped = found.files, found.skipped
    if len(files) == 1:
        content = files[0][1]
        cut = character_boundary(content, len(content) - size_held_out(len(content)))
        return Corpus(_text([content[:cut]]), _text([content[cut:]]), skipped)
    split = Split()
    for name, _ in files:
        split.add(name)
    contents: dict[bool, list[bytes]] = {False: [], True: []}
    for index, (name, content) in enumerate(files):
        contents[split.is_held_out(index, name)].append(content)
    return Corpus(_text(contents[False]), _text(contents[True]), skipped)


def corpus_figures(corpus: Corpus) -> dict[str, int]:
    """How much text there is, by which a run that is taken up knows its text again."""
    if corpus.figures is not None:
        return corpus.figures
    checksum = 0
    for text in (corpus.training, corpus.held_out):
        checksum = zlib.crc32(text.data.numpy().tobytes(), checksum)
    numbers = (
        len(corpus.training), len(corpus.training.file_starts), len(corpus.held_out), len(corpus.held_out.file_starts),
        checksum,
    )  # fmt: skip
    return dict(zip(CORPUS_KEYS, numbers, strict=True))


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest())


def _text(contents: Sequence[bytes]) -> Text:
    data = bytearray()
    starts = []
    for content in contents:
        starts.append(len(data))
        data.append(SEPARATOR)
        data += content
    return Text(torch.frombuffer(data, dtype=torch.uint8), torch.tensor(starts, dtype=torch.int64))


def character_boundary(content: bytes, cut: int) -> int:
    """The last place at or before ``cut`` where a UTF-8 character begins."""
    while cut > 0 and content[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut
