"""Streaming of documents from files of any kind in pieces: memory does not grow with the text."""

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
"""Longer documents are read and tokenized in pieces of about this many bytes that end at a line break."""
_SILENT_SECONDS = 5.0
_LONGEST_PIECE = 4 * PIECE_BYTES
"""Maximum piece size in bytes within a single line."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a document's text."""

    text: bytes
    """UTF-8."""
    is_first: bool
    """Whether the piece starts a document."""
    is_held_out: bool
    """Whether the document is held out."""


@dataclass(frozen=True, slots=True)
class _Document:
    name: str
    pieces: Iterator[bytes]


class _TextPaths(TextFiles):
    """Finds text files and stores their paths instead of their contents."""

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
    """The texts of a run, which can be read repeatedly in the same order.

    Text files are found and checked on construction, records by :meth:`survey`; default: the source of Python's
    standard library.

    Args:
        paths: as for :func:`.corpus.read_corpus`.
        text_field: field or column of records that holds the text.
        say: called with progress messages every few seconds.

    Raises:
        RunError: see :func:`.corpus.read_corpus`.
    """

    def __init__(self, paths: Sequence[Path], text_field: str, say: Callable[[str], None] | None) -> None:
        self.text_field = text_field
        self._say = say
        self.skipped: Counter[str] = Counter()
        """Number of skipped files and records, by reason."""
        self.num_bytes = 0
        """Size of all texts, after :meth:`survey`."""
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
        """Path, size and modification time (ns) of every file: the identity of a token cache.

        Raises:
            RunError: a file is missing.
        """
        found = []
        for name, path in self._found:
            for file in [path] if name is not None else files_of_records(path):
                check_regular(file)
                status = file.stat()
                found.append((str(file.absolute()), status.st_size, status.st_mtime_ns))
        return found

    def survey(self) -> None:
        """Read everything once, to report errors before any output is written, and to split the documents.

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
        """The texts after :meth:`survey`, both splits, in the order of the files. A single document is cut."""
        index = 0
        for document in chain.from_iterable(self._documents_of(name, path) for name, path in self._found):
            is_first = True
            if self._split.count == 1:
                yield from self._cut(document.pieces)  # yields nothing for an empty document
                continue
            is_held_out = self._split.is_held_out(index, document.name)
            for text in document.pieces:
                yield Piece(text, is_first, is_held_out)
                is_first = False
            index += not is_first

    def texts_to_train_on(self) -> Iterator[bytes]:
        """The training text, in pieces."""
        return (piece.text for piece in self.pieces() if not piece.is_held_out)

    def _cut(self, pieces: Iterator[bytes]) -> Iterator[Piece]:
        """The pieces of a single document, with its end held out."""
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
    """Groups of paths that are split separately: each of ``data`` in a mixture, else all together."""
    return [(path,) for path in data] if is_mixture else [tuple(data)]


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as stream:
            while block := stream.read(PIECE_BYTES):
                yield block
    except OSError as error:
        raise RunError(f"--data: {path} cannot be read ({error.strerror}); check its permissions") from error


def _pieces_of(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """A text in pieces that end at a line break, or within a very long line, at a character boundary."""
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
