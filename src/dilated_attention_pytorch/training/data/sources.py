"""The documents of a run: searched for, split, and streamed in chunks, so that memory does not grow with the text."""

from __future__ import annotations

import codecs
import errno
import hashlib
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.memory import in_bytes
from dilated_attention_pytorch.progress import Pace

from .records import are_records, check_regular, compression_of, files_of_records, readable, records, unreadable

Say = Callable[[str], None]

SEPARATOR = 0
"""Separator byte before every document; texts do not contain it."""
CHUNK_BYTES = 1 << 18
"""Longer documents are read and tokenized in chunks of about this many bytes that end at a line break."""
_LONGEST_CHUNK = 4 * CHUNK_BYTES
"""Maximum chunk size in bytes within a single line."""
_HELD_OUT_PARTS = 20
"""One in this many documents is held out."""
_SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__")

EMPTY, NO_TEXT, IRREGULAR, GONE = "empty", "not UTF-8 text", "no regular files", "gone while the folder was read"
COMPRESSED = "compressed"
"""Reasons for skipping files of folders."""
_REFUSALS = {
    EMPTY: "is empty; name a file that holds text",
    NO_TEXT: "is not text: it holds zero bytes or is not UTF-8; name text files, or convert it "
    "(iconv -f LATIN1 -t UTF-8)",
    GONE: "was removed while it was read; check the path",
}
"""Refusals of a regular file that was given by name."""


class Progress:
    """Messages at most every few seconds; none if ``say`` is None."""

    def __init__(self, say: Say | None) -> None:
        self._say = say
        self._pace = Pace()

    def is_due(self) -> bool:
        """Whether it is time for a message."""
        return self._say is not None and self._pace.is_due()

    def tell(self, words: str) -> None:
        """Say ``words``, as it is time."""
        assert self._say is not None
        self._say(words)


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


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a document's text."""

    text: bytes
    """UTF-8."""
    is_first: bool
    """Whether the chunk starts a document."""
    is_held_out: bool
    """Whether the document is held out."""


@dataclass(frozen=True, slots=True)
class _Source:
    path: Path
    name: str | None = None
    """Name of the document of a text file (relative path for files of folders), which determines the split; None for
    records."""
    size: int = 0
    """Bytes of a text file."""


class Sources:
    """The texts of a run, which can be read repeatedly in the same order.

    Text files are found and checked on construction, records by :meth:`survey`; default: the source of Python's
    standard library.

    Args:
        paths: regular files, folders, and record files (JSONL, Parquet, folders that ``datasets`` saved).
        text_field: field or column of records that holds the text.
        say: called with progress messages every few seconds.

    Raises:
        RunError: a path is missing, empty, unreadable, not a regular file or not text; the message says what to do.
    """

    def __init__(self, paths: Sequence[Path], text_field: str, say: Say | None) -> None:
        self.text_field = text_field
        self.skipped: Counter[str] = Counter()
        """Number of skipped files and records, by reason."""
        self.num_bytes = 0
        """Size of all texts, after :meth:`survey`."""
        self._progress = Progress(say)
        self._split = Split()
        self._sources: list[_Source] = []
        for path in paths or (standard_library(),):
            if are_records(path):
                self._sources.append(_Source(path))
            elif path.is_dir():
                self._search(path, "" if paths else ".py")
            else:
                self._sources.append(_Source(path, path.name, _size_of_named(path)))

    def _search(self, folder: Path, suffix: str) -> None:
        """Find the text files in a folder tree with a name suffix; hidden names are skipped."""
        before, skipped = len(self._sources), self.skipped.total()

        def refuse(error: OSError) -> None:
            # Entries below the folder may disappear during the search, as in /proc.
            if error.errno not in (errno.ENOENT, errno.ESRCH) or Path(error.filename) == folder:
                raise unreadable(Path(error.filename), error) from error
            self.skipped[GONE] += 1

        num_bytes = 0
        for parent, folders, names in os.walk(folder, onerror=refuse):
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED_FOLDERS)
            for name in sorted(names):
                if name.startswith(".") or not name.endswith(suffix):
                    continue
                path = Path(parent, name)
                size = _size_of_text(path)
                if isinstance(size, str):
                    self.skipped[size] += 1
                else:
                    self._sources.append(_Source(path, path.relative_to(folder).as_posix(), size))
                    num_bytes += size
                if self._progress.is_due():
                    words = f"{len(self._sources):,} files of text, {in_bytes(num_bytes)}, now in {parent}"
                    self._progress.tell(f"reading --data: {words}{describe_skipped(self.skipped, '; left out: ')}")
        if len(self._sources) == before:
            looked_at = self.skipped.total() - skipped
            raise RunError(
                f"--data: the folder {folder} holds no text file ({looked_at} files were looked at"
                f"{describe_skipped(self.skipped, ': ')}); name a folder with UTF-8 text files in it"
            )

    def fingerprint(self) -> list[tuple[str, int, int]]:
        """Path, size and modification time (ns) of every file: the identity of a token cache.

        Raises:
            RunError: a file is missing.
        """
        files = []
        for source in self._sources:
            for file in [source.path] if source.name is not None else files_of_records(source.path):
                status = check_regular(file)
                files.append((str(file.absolute()), status.st_size, status.st_mtime_ns))
        return files

    def check_unchanged(self, fingerprint: list[tuple[str, int, int]]) -> None:
        """Raise :class:`RunError` if a file changed since ``fingerprint`` was taken."""
        if self.fingerprint() != fingerprint:
            raise RunError("--data: a file changed while it was read; start again when nothing writes to it")

    def survey(self) -> None:
        """Read all records once, to report errors before any output is written, and split the documents.

        Raises:
            RunError: see :func:`.records.records`; or there is no text.
        """
        split, num_bytes = Split(), 0
        for source in self._sources:
            before = split.count
            for name, size, _ in self._documents(source):
                if not size:
                    self.skipped[EMPTY] += 1
                    continue
                split.add(name)
                num_bytes += size
                if self._progress.is_due():
                    words = f"{split.count:,} documents, {in_bytes(num_bytes)}, now in {source.path}"
                    self._progress.tell(f"reading --data: {words}")
            if split.count == before:
                raise RunError(f"--data: {source.path} holds no record with text in it; name a file that does")
        self._split, self.num_bytes = split, num_bytes

    def chunks(self) -> Iterator[Chunk]:
        """The texts after :meth:`survey`, both splits, in the order of the files. A single document is cut."""
        index = 0
        for name, _, texts in chain.from_iterable(map(self._documents, self._sources)):
            is_first = True
            if self._split.count == 1:
                yield from self._cut(texts)  # yields nothing for an empty document
                continue
            is_held_out = self._split.is_held_out(index, name)
            for text in texts:
                yield Chunk(text, is_first, is_held_out)
                is_first = False
            index += not is_first

    def texts_to_train_on(self) -> Iterator[bytes]:
        """The training text, in chunks."""
        return (chunk.text for chunk in self.chunks() if not chunk.is_held_out)

    def _cut(self, texts: Iterator[bytes]) -> Iterator[Chunk]:
        """The chunks of a single document, with its last twentieth held out."""
        left = self.num_bytes - max(1, self.num_bytes // _HELD_OUT_PARTS)
        is_first, is_held_out = True, False
        for text in texts:
            if not is_held_out and left < len(text):
                cut = _character_boundary(text, left)
                if cut or is_first:
                    yield Chunk(text[:cut], is_first, False)
                is_first, is_held_out, text = True, True, text[cut:]
            yield Chunk(text, is_first, is_held_out)
            is_first = False
            left -= len(text)

    def _documents(self, source: _Source) -> Iterator[tuple[str, int, Iterator[bytes]]]:
        """Name, size in bytes, and text of each document."""
        if source.name is not None:
            yield source.name, source.size, _chunks_of(_blocks(source.path))
            return
        for record in records(source.path, self.text_field):
            yield record.name, len(record.text), _chunks_of([record.text])


def standard_library() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def parts_of(data: Sequence[Path], *, is_mixture: bool) -> list[tuple[Path, ...]]:
    """Groups of paths that are split separately: each of ``data`` in a mixture, else all together."""
    return [(path,) for path in data] if is_mixture else [tuple(data)]


def describe_skipped(skipped: Counter[str], before: str) -> str:
    """The skipped files by reason, after the prefix ``before``; empty if there are none."""
    return before + ", ".join(f"{count:,} {reason}" for reason, count in skipped.items()) if skipped else ""


def _size_of_named(path: Path) -> int:
    """Bytes of a text file that was given by name; refuses any other file."""
    check_regular(path)
    size = _size_of_text(path)
    if size == COMPRESSED:
        raise RunError(f"--data: {path} is {compression_of(path)}, and name that")
    if isinstance(size, str):
        raise RunError(f"--data: {path} {_REFUSALS[size]}")
    return size


def _size_of_text(path: Path) -> int | str:
    """Bytes of a text file, or the reason for skipping it. A pipe or a device is not opened."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return IRREGULAR
        if not status.st_size:
            return EMPTY
        size = _decoded_bytes(path)
        if size:
            return size
        return NO_TEXT if compression_of(path) is None else COMPRESSED
    except FileNotFoundError:
        return IRREGULAR if path.is_symlink() else GONE
    except OSError as error:
        raise unreadable(path, error) from error


def _decoded_bytes(path: Path) -> int:
    """Bytes of a file in UTF-8 without separators; 0 for any other, which is not read to its end."""
    decoder, size = codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as stream:
        try:
            while block := stream.read(CHUNK_BYTES):
                if SEPARATOR in block:
                    return 0
                decoder.decode(block)
                size += len(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return 0
    return size


def _blocks(path: Path) -> Iterator[bytes]:
    with readable(path), path.open("rb") as stream:
        while block := stream.read(CHUNK_BYTES):
            yield block


def _chunks_of(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """A text in chunks that end at a line break, or within a very long line, at a character boundary."""
    rest = b""
    for block in blocks:
        rest += block
        while len(rest) >= CHUNK_BYTES:
            cut = rest.rfind(b"\n", 0, CHUNK_BYTES) + 1
            if not cut:
                cut = rest.find(b"\n", CHUNK_BYTES, _LONGEST_CHUNK) + 1
            if not cut:
                if len(rest) < _LONGEST_CHUNK:
                    break
                cut = _character_boundary(rest, _LONGEST_CHUNK - 1)
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest())


def _character_boundary(content: bytes, cut: int) -> int:
    """The last position at or before ``cut`` where a UTF-8 character begins."""
    while cut > 0 and content[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut
