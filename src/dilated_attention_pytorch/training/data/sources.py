"""Documents one after the other out of files of any kind, a piece at a time: memory does not grow with the text."""

from __future__ import annotations

import codecs
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.memory import in_bytes

from ..corpus import SEPARATOR, Split, character_boundary, size_held_out, standard_library
from ..text_files import EMPTY, TextFiles
from .records import are_records, check_regular, files_of_records, records

PIECE_BYTES = 1 << 18
"""A longer document is read, and made into tokens, in pieces of about so many bytes that end with a line."""
_SILENT_SECONDS = 5.0
_LONGEST_PIECE = 4 * PIECE_BYTES
"""A piece of a single line is no longer than that."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one document."""

    text: bytes
    """UTF-8."""
    is_first: bool
    """Whether a document begins with it."""
    is_held_out: bool
    """On which side of the split it is."""


@dataclass(frozen=True, slots=True)
class _Document:
    name: str
    pieces: Iterator[bytes]


class _TextPaths(TextFiles):
    """Finds text files and keeps where they are instead of what they hold."""

    def __init__(self, say: Callable[[str], None] | None) -> None:
        super().__init__(SEPARATOR, say)
        self.paths: list[Path] = []

    def _read(self, path: Path, size: int) -> bytes | None:
        decoder = codecs.getincrementaldecoder("utf-8")()
        with path.open("rb") as stream:
            try:
                while block := stream.read(PIECE_BYTES):
                    if self.separator in block:
                        return None
                    decoder.decode(block)
                decoder.decode(b"", final=True)
            except UnicodeDecodeError:
                return None
        self.paths.append(path)
        self._bytes += size
        return b""


class Sources:
    """The texts that a run is told of, which may be read again and again in the same order.

    Text files are found and looked through here, records by :meth:`survey`; without paths the source of Python's
    standard library is taken.

    Args:
        paths: as for :func:`.corpus.read_corpus`.
        text_field: the member or column of records that holds the text.
        say: is given a sentence on how far it is, whenever some seconds have passed in silence.

    Raises:
        RunError: see :func:`.corpus.read_corpus`.
    """

    def __init__(self, paths: Sequence[Path], text_field: str, say: Callable[[str], None] | None) -> None:
        self.text_field = text_field
        self._say = say
        self.skipped: Counter[str] = Counter()
        """How many files and records were left out, by the reason."""
        self.num_bytes = 0
        """Of all texts, after :meth:`survey`."""
        self._split = Split()
        self._found: list[tuple[str | None, Path]] = []
        for path in paths or (standard_library(),):
            if are_records(path):
                self._found.append((None, path))
                continue
            files = _TextPaths(say)
            if path.is_dir():
                files.read_folder(path, "" if paths else ".py")
            else:
                files.read_file(path)
            self.skipped += files.skipped
            self._found += [(name, file) for (name, _), file in zip(files.files, files.paths, strict=True)]

    def fingerprint(self) -> list[tuple[str, int, int]]:
        """Of every file its path, size and time of change (ns): by which a cache knows that it is of these texts.

        Raises:
            RunError: a file is not there.
        """
        found = []
        for name, path in self._found:
            for file in [path] if name is not None else files_of_records(path):
                check_regular(file)
                status = file.stat()
                found.append((str(file.absolute()), status.st_size, status.st_mtime_ns))
        return found

    def survey(self) -> None:
        """Read everything once, so that what is wrong is said before anything is made of it, and split it.

        Raises:
            RunError: see :func:`.records.records`; or there is no text.
        """
        split = Split()
        num_bytes, said = 0, time.monotonic()
        for name, path in self._found:
            before = split.count
            for document in self._documents_of(name, path):
                size = sum(map(len, document.pieces))
                if not size:
                    self.skipped[EMPTY] += 1
                    continue
                split.add(document.name)
                num_bytes += size
                if self._say is not None and time.monotonic() - said > _SILENT_SECONDS:
                    said = time.monotonic()
                    self._say(f"reading --data: {split.count:,} documents, {in_bytes(num_bytes)}, now in {path}")
            if split.count == before:
                raise RunError(f"--data: {path} holds no record with text in it; name a file that does")
        self._split, self.num_bytes = split, num_bytes

    def pieces(self) -> Iterator[Piece]:
        """The texts after :meth:`survey`: of both sides in the order of the files. A single document is cut."""
        index = 0
        for document in chain.from_iterable(self._documents_of(name, path) for name, path in self._found):
            is_first = True
            if self._split.count == 1:
                yield from self._cut(document.pieces)  # of an empty one there are none
                continue
            is_held_out = self._split.is_held_out(index, document.name)
            for text in document.pieces:
                yield Piece(text, is_first, is_held_out)
                is_first = False
            index += not is_first

    def texts_to_train_on(self) -> Iterator[bytes]:
        """What is not held out, in pieces."""
        return (piece.text for piece in self.pieces() if not piece.is_held_out)

    def _cut(self, pieces: Iterator[bytes]) -> Iterator[Piece]:
        """The pieces of the only document: its end is held out."""
        left = self.num_bytes - size_held_out(self.num_bytes)
        is_first, is_held_out = True, False
        for text in pieces:
            if not is_held_out and left < len(text):
                cut = character_boundary(text, left)
                if cut:
                    yield Piece(text[:cut], is_first, False)
                is_first, is_held_out, text = True, True, text[cut:]
            yield Piece(text, is_first, is_held_out)
            is_first = False
            left -= len(text)

    def _documents_of(self, name: str | None, path: Path) -> Iterator[_Document]:
        if name is not None:
            yield _Document(name, _pieces_of(_blocks(path)))
            return
        for record in records(path, self.text_field):
            yield _Document(record.name, _pieces_of([record.text]))


def parts_of(data: Sequence[Path], *, is_mixture: bool) -> list[tuple[Path, ...]]:
    """What is split into text to train on and held-out text by itself: each of ``data`` in a mixture, else all."""
    return [(path,) for path in data] if is_mixture else [tuple(data)]


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as stream:
            while block := stream.read(PIECE_BYTES):
                yield block
    except OSError as error:
        raise RunError(f"--data: {path} cannot be read ({error.strerror}); check its permissions") from error


def _pieces_of(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """A text in pieces that end with a line, or within a line that is very long, with a character."""
    rest = b""
    for block in blocks:
        rest += block
        while len(rest) >= PIECE_BYTES:
            cut = rest.rfind(b"\n", 0, PIECE_BYTES) + 1
            if not cut:
                cut = rest.find(b"\n", PIECE_BYTES, _LONGEST_PIECE) + 1
            if not cut:
                if len(rest) < _LONGEST_PIECE:
                    break
                cut = character_boundary(rest, _LONGEST_PIECE - 1)
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest
