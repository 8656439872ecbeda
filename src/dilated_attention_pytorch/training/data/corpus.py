"""Text corpora as tokens in memory, with a held-out split."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.memory import check_memory

from .sources import SEPARATOR, Say, Sources

CORPUS_KEYS = ("training_bytes", "training_files", "held_out_bytes", "held_out_files", "checksum")
"""Keys of :func:`corpus_figures`."""

_TOO_MUCH = "name fewer files, or keep the text on the disk (train --cache FOLDER)"


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


def read_corpus(paths: Sequence[Path] = (), *, text_field: str = "text", say: Say | None = None) -> Corpus:
    """Read the bytes of the documents at ``paths`` into memory; default: the source of the standard library.

    About one document in twenty is held out, by a hash of its path relative to the given folder, or of its
    file and record number, and at least one; a single file is cut at its last twentieth instead.

    Args:
        paths, text_field, say: see :class:`.data.sources.Sources`.

    Raises:
        RunError: as :class:`.data.sources.Sources` and its ``survey``; the text exceeds free memory, or changes while
            it is read.
    """
    sources = Sources(paths, text_field, say)
    files = sources.fingerprint()
    sources.survey()
    check_memory(sources.num_bytes, "cpu", what="--data: the text", remedy=_TOO_MUCH)
    contents: tuple[bytearray, bytearray] = (bytearray(), bytearray())
    starts: tuple[list[int], list[int]] = ([], [])
    for chunk in sources.chunks():
        content = contents[chunk.is_held_out]
        if chunk.is_first:
            starts[chunk.is_held_out].append(len(content))
            content.append(SEPARATOR)
        content += chunk.text
    sources.check_unchanged(files)
    training, held_out = (
        Text(torch.frombuffer(content, dtype=torch.uint8), torch.tensor(first, dtype=torch.int64))
        for content, first in zip(contents, starts, strict=True)
    )
    return Corpus(training, held_out, sources.skipped)


def corpus_figures(corpus: Corpus) -> dict[str, int]:
    """Sizes and checksum of the corpus, by which a resumed run verifies its text."""
    if corpus.figures is not None:
        return corpus.figures
    numbers, checksum = [], 0
    for text in (corpus.training, corpus.held_out):
        numbers += [len(text), len(text.file_starts)]
        checksum = zlib.crc32(text.data.numpy().tobytes(), checksum)
    return dict(zip(CORPUS_KEYS, (*numbers, checksum), strict=True))


def describe_corpus(paths: Sequence[Path], figures: dict[str, int]) -> str:
    """Where the text of a run comes from, and how much there is by :func:`corpus_figures`."""
    source = ", ".join(map(str, paths)) or "the Python standard library"
    return (
        f"{source}: {figures['training_bytes']:,} bytes to train on, {figures['held_out_bytes']:,} bytes in "
        f"{figures['held_out_files']} files held out"
    )


def check_same_corpus(now: dict[str, int], figures: dict[str, int], folder: Path) -> None:
    """Raise :class:`RunError` unless the text of a resumed run has the recorded figures."""
    if now != figures:
        raise RunError(
            f"--resume {folder}: the text is not what the run began with (now {now}, then {figures}); restore the "
            "files, or start a new run with another --output"
        )
