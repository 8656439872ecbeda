"""The on-disk token cache: computed once per files and tokenizer, and memory-mapped.

A cache of ``datasets`` would not do: it is trusted as it lies on the disk, where this one is compared with its digests.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import shutil
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.memory import in_bytes
from dilated_attention_pytorch.output import sync

from ..lease import alone_in
from ..manifest import MANIFEST_NAME, read_sealed, verify_manifest, write_manifest
from .corpus import CORPUS_KEYS, Corpus, Text
from .sources import CHUNK_BYTES, Chunk, Progress, Say, Sources
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np

    from .tokenizer import Tokens

_FORMAT = 1
_SIDES = ("training", "held-out")
_FILES = tuple(f"{side}.{kind}" for side in _SIDES for kind in ("tokens", "starts"))
_AT_ONCE = 4 * CHUNK_BYTES
"""Bytes of text to tokenize at a time, on all cores."""
_REMEDY = "it is made again"
_UNFINISHED = ".unfinished-"
_ABANDONED_SECONDS = 86400.0
"""Seconds without a write after which a partial cache counts as abandoned."""


@dataclass(frozen=True, slots=True)
class MappedText(Text):
    """A text whose tokens are memory-mapped; when pickled to another process, that process maps the file itself."""

    stem: Path
    """Common path prefix of the two files."""
    dtype: str
    """NumPy name of the tokens' dtype."""
    mapping: mmap.mmap

    def __reduce__(self) -> tuple[Any, ...]:
        return _map_text, (self.stem, self.dtype, self.data.nbytes, self.file_starts.nbytes)

    def tokens(self, start: int, stop: int) -> Tensor:
        # Reading beyond the end of the file would end the process by SIGBUS.
        if self.mapping.size() < self.data.nbytes:
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
    if _is_intact(target, say):
        return target
    sources.survey()
    with _staging(folder) as staging:
        about = _make(sources, tokenizer, staging, say)
        sources.check_unchanged(files)
        write_manifest(staging, _FILES, **about)
        _publish(staging, target)
    return target


def _is_intact(cache: Path, say: Say | None = None) -> bool:
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


def _publish(staging: Path, target: Path) -> None:
    """Rename a cache into place. If another process was faster, keep its cache, which others may have mapped."""
    folder = target.parent
    with alone_in(folder):
        while not _is_intact(target):
            with _temporary(folder) as aside, suppress(FileNotFoundError):
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
    remedy = "name a --cache on a file system that all hosts of the run share"
    about = read_sealed(cache / MANIFEST_NAME, what="the cache of tokens", remedy=remedy)
    sizes = {name: file["bytes"] for name, file in about["files"].items()}
    training, held_out = (
        _map_text(cache / side, about["dtype"], sizes[f"{side}.tokens"], sizes[f"{side}.starts"]) for side in _SIDES
    )
    return Corpus(training, held_out, Counter(about["skipped"]), about["figures"])


def _map_text(stem: Path, dtype: str, token_bytes: int, start_bytes: int) -> MappedText:
    import numpy as np

    try:
        starts = np.fromfile(f"{stem}.starts", np.int64)
        with open(f"{stem}.tokens", "rb") as file:
            if (os.fstat(file.fileno()).st_size, starts.nbytes) != (token_bytes, start_bytes):
                raise _cut(stem)
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise _cut(stem) from error
    with warnings.catch_warnings():
        # PyTorch warns that the tensor is read-only; it is never written to.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tokens = torch.from_numpy(np.frombuffer(mapping, dtype))
    return MappedText(tokens, torch.from_numpy(starts), stem, dtype, mapping)


def _cut(stem: Path) -> RunError:
    return RunError(
        f"the cache of tokens: {stem}.tokens or .starts was cut while it was read, or is not on a file system that all "
        f"hosts of the run share; start again: {_REMEDY}"
    )


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A new temporary folder within ``folder``, removed unless it was renamed; also removes abandoned ones.

    Raises:
        RunError: the file system refuses to write.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for abandoned in filter(_is_abandoned, folder.glob(f"{_UNFINISHED}*")):
            shutil.rmtree(abandoned, ignore_errors=True)
        with _temporary(folder) as staging:
            yield staging
    except OSError as error:
        raise RunError(
            f"the cache of tokens cannot be written to {folder} ({error.strerror}); make room and allow writing, or "
            "name another folder with --cache"
        ) from error


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=folder, ignore_cleanup_errors=True) as path:
        yield Path(path)


def _is_abandoned(staging: Path) -> bool:
    """Whether nobody has written to a temporary folder for a day: its process was killed."""
    try:
        newest = max(path.lstat().st_mtime for path in (staging, *staging.iterdir()))
    except OSError:
        return False  # already removed, or not such a folder
    return time.time() - newest > _ABANDONED_SECONDS


class _Side:
    """The files of one side of the split while they are written."""

    def __init__(self, tokens: BinaryIO, starts: BinaryIO, dtype: np.dtype[Any]) -> None:
        self._tokens, self._starts, self._dtype = tokens, starts, dtype
        self.num_tokens = self.num_documents = self.num_bytes = 0

    def add(self, chunk: Chunk, tokens: Tokens, separator: int) -> None:
        """Write the tokens of the next chunk."""
        if chunk.is_first:
            self._starts.write(self.num_tokens.to_bytes(8, sys.byteorder))
            self._tokens.write(self._dtype.type(separator).tobytes())
            self.num_documents += 1
        self._tokens.write(tokens.astype(self._dtype, copy=False).tobytes())
        self.num_tokens += len(tokens) + chunk.is_first
        self.num_bytes += len(chunk.text) + chunk.is_first


def _make(sources: Sources, tokenizer: Tokenizer, folder: Path, say: Say | None) -> dict[str, Any]:
    """Write the files of a cache; returns the entries of its manifest."""
    import numpy as np

    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    started, progress = time.monotonic(), Progress(say)
    with ExitStack() as opened:
        files = [opened.enter_context(open(folder / name, "wb")) for name in _FILES]
        training, held_out = sides = _Side(files[0], files[1], dtype), _Side(files[2], files[3], dtype)
        for batch in _batches(sources.chunks()):
            texts = [chunk.text for chunk in batch]
            for chunk, tokens in zip(batch, tokenizer.encode(texts), strict=True):
                sides[chunk.is_held_out].add(chunk, tokens, tokenizer.separator)
            if progress.is_due():
                done = training.num_bytes + held_out.num_bytes
                pace = in_bytes(round(done / (time.monotonic() - started)))
                progress.tell(f"making tokens of --data: {in_bytes(done)} of {in_bytes(sources.num_bytes)}, {pace}/s")
    checksum = 0
    for side in _SIDES:
        with (
            open(folder / f"{side}.tokens", "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        ):
            checksum = zlib.crc32(mapped, checksum)
    numbers = (training.num_bytes, training.num_documents, held_out.num_bytes, held_out.num_documents, checksum)
    figures = dict(zip(CORPUS_KEYS, numbers, strict=True))
    if tokenizer.vocab_size > 256:
        figures |= {"training_tokens": training.num_tokens, "held_out_tokens": held_out.num_tokens}
    return {"dtype": dtype.name, "figures": figures, "skipped": dict(sources.skipped), "tokenizer": tokenizer.digest}


def _batches(chunks: Iterator[Chunk]) -> Iterator[list[Chunk]]:
    batch: list[Chunk] = []
    size = 0
    for chunk in chunks:
        batch.append(chunk)
        size += len(chunk.text)
        if size >= _AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
