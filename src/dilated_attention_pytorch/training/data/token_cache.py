"""The on-disk token cache: computed once per files and tokenizer, and memory-mapped."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.memory import in_bytes
from dilated_attention_pytorch.output import sync

from ..corpus import CORPUS_KEYS, Corpus, Text
from ..lease import alone_in
from ..manifest import MANIFEST_NAME, read_sealed, verify_manifest, write_manifest
from .sources import PIECE_BYTES, Piece, Sources
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .tokenizer import Tokens

_FORMAT = 1
_SIDES = ("training", "held-out")
_FILES = tuple(f"{side}.{kind}" for side in _SIDES for kind in ("tokens", "starts"))
_AT_ONCE = 4 * PIECE_BYTES
"""Bytes of text to tokenize at a time, on all cores."""
_READ_AT_ONCE = 1 << 22
_SILENT_SECONDS = 5.0
_REMEDY = "it is made again"
_UNFINISHED = ".unfinished-"
_ABANDONED_SECONDS = 3600.0
"""Seconds without a write after which a partial cache counts as abandoned."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class MappedText(Text):
    """A text whose tokens are memory-mapped; when pickled to another process, that process maps the file itself."""

    stem: Path
    """Common path prefix of the two files."""
    dtype: str
    """NumPy name of the tokens' dtype."""
    mapping: mmap.mmap | None
    """None for an empty file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _map_text, (self.stem, self.dtype, len(self), len(self.file_starts))

    def tokens(self, start: int, stop: int) -> Tensor:
        # Reading beyond the end of the file would end the process by SIGBUS.
        if self.mapping is not None and self.mapping.size() < self.data.nbytes:
            raise _cut(self.stem)
        return self.data[start:stop]


def cached_corpus(sources: Sources, tokenizer: Tokenizer, folder: Path, say: Say | None) -> Path:
    """The cache folder with the tokens of ``sources``; created if missing or damaged.

    Args:
        sources: the texts.
        tokenizer: the tokenizer.
        folder: parent folder of token caches.
        say: called with progress messages and reports of damage.

    Raises:
        RunError: a text is invalid, or the folder cannot be written.
    """
    files = sources.fingerprint()
    key = {"format": _FORMAT, "tokenizer": tokenizer.digest, "text_field": sources.text_field, "files": files}
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    target = folder / digest
    if _is_whole(target, say):
        return target
    sources.survey()
    with _beside(folder) as staging:
        about = _make(sources, tokenizer, staging, say)
        if sources.fingerprint() != files:
            raise RunError("--data: a file changed while it was read; start again when nothing writes to it")
        write_manifest(staging, _FILES, **about)
        _name(staging, target)
    return target


def _is_whole(cache: Path, say: Say | None = None) -> bool:
    """Whether a cache is complete and undamaged; damage is reported to ``say``."""
    if not os.path.lexists(cache):
        return False
    try:
        verify_manifest(cache, what="the cache of tokens", remedy=_REMEDY, reading=_FILES)
    except RunError as error:
        if say is not None:
            say(str(error))
        return False
    return True


def _name(staging: Path, target: Path) -> None:
    """Rename a cache into place. If another process was faster, keep its cache, which others may have mapped."""
    folder = target.parent
    with alone_in(folder):
        while not _is_whole(target):
            with _unfinished(folder) as aside, suppress(FileNotFoundError):
                os.rename(target, aside / "damaged")
            try:
                os.rename(staging, target)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                continue  # a process on another machine was faster
            sync(folder)
            return


def open_corpus(cache: Path) -> Corpus:
    """The memory-mapped corpus in a folder from :func:`cached_corpus`.

    Raises:
        RunError: the folder is not visible to this process, or its files are truncated.
    """
    import numpy as np

    remedy = "name a --cache on a file system that all hosts of the run share"
    about = read_sealed(cache / MANIFEST_NAME, what="the cache of tokens", remedy=remedy)
    for name in _FILES:
        found, expected = (cache / name).stat().st_size, about["files"][name]["bytes"]
        if found != expected:
            raise RunError(f"the cache of tokens: {cache / name} has {found:,} bytes, not {expected:,}; {remedy}")
    sizes = {name: about["files"][name]["bytes"] for name in _FILES}
    training, held_out = (
        _map_text(
            cache / side,
            about["dtype"],
            sizes[f"{side}.tokens"] // np.dtype(about["dtype"]).itemsize,
            sizes[f"{side}.starts"] // np.dtype(np.int64).itemsize,
        )
        for side in _SIDES
    )
    return Corpus(training, held_out, Counter(about["skipped"]), about["figures"])


def _map_text(stem: Path, dtype: str, num_tokens: int, num_files: int) -> MappedText:
    import numpy as np

    starts = np.fromfile(stem.with_name(f"{stem.name}.starts"), np.int64)
    with stem.with_name(f"{stem.name}.tokens").open("rb") as file:
        if (os.fstat(file.fileno()).st_size, len(starts)) != (num_tokens * np.dtype(dtype).itemsize, num_files):
            raise _cut(stem)
        # An empty file cannot be mapped.
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if num_tokens else None
    tokens = np.zeros(0, dtype) if mapping is None else np.frombuffer(mapping, dtype)
    with warnings.catch_warnings():
        # PyTorch warns that the tensor is read-only; it is never written to.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return MappedText(torch.from_numpy(tokens), torch.from_numpy(starts), stem, dtype, mapping)


def _cut(stem: Path) -> RunError:
    return RunError(f"the cache of tokens: {stem}.tokens or .starts was cut while it was read; start again: {_REMEDY}")


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """A new temporary folder within ``folder``, removed unless it was renamed; also removes abandoned ones.

    Raises:
        RunError: the file system refuses to write.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for found in folder.glob(f"{_UNFINISHED}*"):
            _clear_if_abandoned(found)
        with _unfinished(folder) as staging:
            yield staging
    except OSError as error:
        raise RunError(
            f"the cache of tokens cannot be written to {folder} ({error.strerror}); make room and allow writing, or "
            "name another folder with --cache"
        ) from error


@contextmanager
def _unfinished(folder: Path) -> Iterator[Path]:
    """A new temporary folder of this process; in use while its lock is held."""
    staging = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder))
    try:
        with alone_in(staging):
            yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _clear_if_abandoned(staging: Path) -> None:
    """Remove the folder of a killed process: no recent writes, and no process of this machine holds its lock."""
    try:
        newest = max(path.lstat().st_mtime for path in (staging, *staging.iterdir()))
        descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return  # already removed, or not such a folder
    try:
        if time.time() - newest > _ABANDONED_SECONDS and _is_free(descriptor):
            shutil.rmtree(staging, ignore_errors=True)
    finally:
        os.close(descriptor)


def _is_free(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # no locks on this file system; only the age decides
    return True


class _Side:
    """The tokens of one side of the split while they are written."""

    def __init__(self, tokens: BufferedWriter, starts: BufferedWriter, dtype: Any) -> None:
        self.tokens, self.starts, self.dtype = tokens, starts, dtype
        self.num_tokens = self.num_documents = self.num_bytes = 0

    def add(self, piece: Piece, tokens: Tokens, separator: int) -> None:
        """Write the tokens of the next piece."""
        import numpy as np

        if piece.is_first:
            self.starts.write(np.array([self.num_tokens], np.int64).tobytes())
            self.tokens.write(np.array([separator], self.dtype).tobytes())
            self.num_tokens += 1
            self.num_documents += 1
            self.num_bytes += 1
        self.tokens.write(tokens.astype(self.dtype, copy=False).tobytes())
        self.num_tokens += len(tokens)
        self.num_bytes += len(piece.text)


def _make(sources: Sources, tokenizer: Tokenizer, folder: Path, say: Say | None) -> dict[str, Any]:
    """Write the files of a cache; returns the entries of its manifest."""
    import numpy as np

    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    started = said = time.monotonic()
    with ExitStack() as opened:
        files = [opened.enter_context(open(folder / name, "wb")) for name in _FILES]
        sides = (_Side(files[0], files[1], dtype), _Side(files[2], files[3], dtype))
        for batch in _batches(sources.pieces()):
            texts = [piece.text for piece in batch]
            for piece, tokens in zip(batch, tokenizer.encode(texts), strict=True):
                sides[piece.is_held_out].add(piece, tokens, tokenizer.separator)
            if say is not None and time.monotonic() - said > _SILENT_SECONDS:
                said = time.monotonic()
                done = sum(side.num_bytes for side in sides)
                pace = done / (said - started)
                words = f"{in_bytes(done)} of {in_bytes(sources.num_bytes)}, {in_bytes(round(pace))}/s"
                say(f"making tokens of --data: {words}")
    training, held_out = sides
    checksum = 0
    for side in _SIDES:
        checksum = _checksum(folder / f"{side}.tokens", checksum)
    numbers = (training.num_bytes, training.num_documents, held_out.num_bytes, held_out.num_documents, checksum)
    figures = dict(zip(CORPUS_KEYS, numbers, strict=True))
    if tokenizer.vocab_size > 256:
        figures |= {"training_tokens": training.num_tokens, "held_out_tokens": held_out.num_tokens}
    return {"dtype": dtype.name, "figures": figures, "skipped": dict(sources.skipped), "tokenizer": tokenizer.digest}


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= _AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _checksum(path: Path, checksum: int) -> int:
    with path.open("rb") as file:
        while block := file.read(_READ_AT_ONCE):
            checksum = zlib.crc32(block, checksum)
    return checksum
