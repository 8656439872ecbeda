"""Text corpora as byte sequences with a held-out split."""

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
"""Separator byte before every file; texts do not contain it."""

CORPUS_KEYS = ("training_bytes", "training_files", "held_out_bytes", "held_out_files", "checksum")
"""Keys of :func:`corpus_figures`."""

_HELD_OUT_PARTS = 20
"""One in this many documents is held out."""


@dataclass(frozen=True, slots=True)
class Text:
    """Concatenated files, each preceded by the separator."""

    data: Tensor
    """Unsigned integers ``[tokens]``: bytes (uint8) or the tokens of a tokenizer."""
    file_starts: Tensor
    """int64 ``[files]``: position of each file's separator."""

    def __len__(self) -> int:
        return self.data.shape[0]

    def file(self, index: int) -> Tensor:
        """File ``index`` including its separator."""
        stop = self.file_starts[index + 1] if index + 1 < len(self.file_starts) else len(self)
        return self.tokens(int(self.file_starts[index]), int(stop))

    def tokens(self, start: int, stop: int) -> Tensor:
        """The tokens from ``start`` to before ``stop``."""
        return self.data[start:stop]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training text and held-out text; deterministic for given files."""

    training: Text
    held_out: Text
    skipped: Counter[str]
    """Number of skipped files and records, by reason."""
    figures: dict[str, int] | None = None
    """The result of :func:`corpus_figures`, if known."""


def standard_library() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


class Split:
    """The held-out split: about one document in twenty, by a hash of its name, at least one; a single one is cut.

    First pass all names to :meth:`add`, in the order of the documents.
    """

    def __init__(self) -> None:
        self.count = 0
        self._num_chosen = 0
        self._least = self._most = (0, 0)

    def add(self, name: str) -> None:
        """Register a document."""
        ranked = (_hash(name), self.count)
        self._least = min(self._least, ranked) if self.count else ranked
        if ranked[0] % _HELD_OUT_PARTS == 0:
            self._most = max(self._most, ranked) if self._num_chosen else ranked
            self._num_chosen += 1
        self.count += 1

    def is_held_out(self, index: int, name: str) -> bool:
        """Whether document ``index`` is held out; False for a single document that is cut."""
        if self._num_chosen == 0:
            return self.count > 1 and index == self._least[1]
        is_only_training = self._num_chosen == self.count and index == self._most[1]
        return _hash(name) % _HELD_OUT_PARTS == 0 and not is_only_training


def size_held_out(size: int) -> int:
    """Number of held-out bytes at the end of a single document of ``size`` bytes, before adjusting for characters."""
    return max(1, size // _HELD_OUT_PARTS)


def read_corpus(
    paths: Sequence[Path] = (), *, text_field: str = "text", say: Callable[[str], None] | None = None
) -> Corpus:
    """Read the files at ``paths``, searching folders for text files; default: the source of the standard library.

    About one document in twenty is held out, by a hash of its path relative to the given folder, or of its
    file and record number, and at least one; a single file is cut at its last twentieth instead.

    Args:
        paths: regular files, folders, and record files (JSONL, Parquet, folders that ``datasets`` saved).
        text_field: field or column of records that holds the text.
        say: called with progress messages every few seconds.

    Raises:
        RunError: a path is missing, empty, unreadable, not a regular file or not text, or the text exceeds free memory;
            the message says what to do.
    """
    found = read_text_files(
        paths or (standard_library(),),
        separator=SEPARATOR,
        suffix="" if paths else ".py",
        text_field=text_field,
        say=say,
    )
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
    """Sizes and checksum of the corpus, by which a resumed run verifies its text."""
    if corpus.figures is not None:
        return corpus.figures
    checksum = 0
    for text in (corpus.training, corpus.held_out):
        checksum = zlib.crc32(text.data.numpy().tobytes(), checksum)
    numbers = (
        len(corpus.training),
        len(corpus.training.file_starts),
        len(corpus.held_out),
        len(corpus.held_out.file_starts),
        checksum,
    )
    return dict(zip(CORPUS_KEYS, numbers, strict=True))


def corpus_in_words(paths: Sequence[Path], figures: dict[str, int]) -> str:
    """Where the text of a run comes from, and how much there is by :func:`corpus_figures`."""
    source = ", ".join(map(str, paths)) or "the Python standard library"
    return (
        f"{source}: {figures['training_bytes']:,} bytes to train on, {figures['held_out_bytes']:,} bytes in "
        f"{figures['held_out_files']} files held out"
    )


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
    """The last position at or before ``cut`` where a UTF-8 character begins."""
    while cut > 0 and content[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut
