"""The output folder of slide embeddings: one atomically written file per slide, and the settings of all."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.models import SlideEmbeddings
from dilated_attention_pytorch.output import check_free_folder, check_makeable, make_output, replacing, sync

from .files import is_same_file
from .settings import FileKind

SETTINGS_NAME = "_embed.json"
"""Readers of Parquet folders skip names that begin with an underscore."""
_NOT_COMPARED = ("checkpoint",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The source file of an embedding; a changed file is embedded again."""

    slide: str
    source: str
    source_bytes: int
    source_mtime_ns: int

    @staticmethod
    def of(slide: str, path: Path) -> Source:
        """The current version of a slide's file.

        Raises:
            RunError: there is no such file, for example behind a link.
        """
        try:
            status = path.stat()
        except OSError as error:
            raise RunError(
                f"it cannot be opened ({error.strerror}); copy it again, or mend the link if it is one"
            ) from error
        return Source(
            slide=slide,
            source=str(path.absolute()),
            source_bytes=status.st_size,
            source_mtime_ns=status.st_mtime_ns,
        )

    @property
    def version(self) -> tuple[int, int]:
        """Size and modification time, which do not change when a folder is moved."""
        return self.source_bytes, self.source_mtime_ns

    def is_beside(self, other: Source) -> bool:
        """Whether its file still exists, and is another one: a moved file is not."""
        return os.path.exists(self.source) and not is_same_file(self.source, other.source)

    def to_dict(self) -> dict[str, str | int]:
        """The fields by name."""
        return {
            "slide": self.slide,
            "source": self.source,
            "source_bytes": self.source_bytes,
            "source_mtime_ns": self.source_mtime_ns,
        }


class Store:
    """A folder of embeddings in one format.

    Args:
        folder: created by :meth:`begin` if missing.
        kind: file format.
    """

    def __init__(self, folder: Path, kind: FileKind) -> None:
        self.folder = folder
        self.kind: FileKind = kind

    def check(self, made_with: Mapping[str, Any]) -> None:
        """Raise :class:`RunError` unless the folder is free, or holds embeddings made with the same settings."""
        file = self.folder / SETTINGS_NAME
        if not file.is_file():
            try:
                check_free_folder(
                    self.folder, going_on=", or the one of an earlier `embed` command", beside=f"{SETTINGS_NAME}.*"
                )
                return
            except RunError:
                # Another command may have begun the folder meanwhile.
                if not file.is_file():
                    raise
        check_makeable(self.folder)
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RunError(f"{file} is damaged ({error}); pass another --output, or remove the folder") from error
        compared = [name for name in made_with if name not in _NOT_COMPARED]
        differ = [name for name in compared if not isinstance(before, dict) or before.get(name) != made_with[name]]
        if differ:
            was = ", ".join(f"{name} {_shown(before, name)}, now {str(made_with[name])[:16]}" for name in differ)
            raise RunError(
                f"--output {self.folder} holds embeddings that were made with other settings ({was}); pass another "
                "--output, or the same settings again"
            )

    def begin(self, made_with: Mapping[str, Any]) -> None:
        """Create the folder and write the settings of its embeddings; other commands may do so at the same time.

        Raises:
            RunError: another command began the folder with other settings.
        """
        make_output(self.folder)
        file = self.folder / SETTINGS_NAME
        if not file.is_file():
            staged = file.with_name(f"{SETTINGS_NAME}.{secrets.token_hex(8)}.part")
            try:
                staged.write_text(json.dumps(made_with, indent=1) + "\n", encoding="utf-8")
                sync(staged)
                _name_first(staged, file)
            finally:
                staged.unlink(missing_ok=True)
            sync(self.folder)
        self.check(made_with)

    def check_names(self, slides: Mapping[str, Path]) -> None:
        """Raise :class:`RunError` if readers of the folder would skip the file of a slide."""
        for slide, path in slides.items():
            if self.kind == "parquet" and slide.startswith(("_", ".")):
                raise RunError(
                    "readers of a folder of Parquet files skip names that begin with _ or a dot: expected another "
                    f"name of a slide, got {slide} ({path}); rename it, or pass --format h5"
                )

    def path(self, slide: str) -> Path:
        """The output file of a slide."""
        return self.folder / f"{slide}.{self.kind}"

    def holds(self, source: Source) -> bool:
        """Whether an embedding of the slide's current file exists.

        Raises:
            RunError: the embedding is of another slide of the same name.
        """
        path = self.path(source.slide)
        if not path.is_file():
            return False
        before = _source_in_h5(path) if self.kind == "h5" else _source_in_parquet(path)
        if before is None:
            return False
        if before.is_beside(source):
            raise RunError(
                f"--output {self.folder} holds the embedding of another slide {source.slide}: expected that of "
                f"{source.source}, got that of {before.source}; pass another --output, or rename {source.source}"
            )
        return before.version == source.version

    def write(self, source: Source, tiles: int, embeddings: SlideEmbeddings) -> None:
        """Write one slide's embeddings, ``[E]`` and ``[L + 1, E]`` in float32."""
        with replacing(self.path(source.slide), hidden=True) as staged:
            if self.kind == "h5":
                _write_h5(staged, {**source.to_dict(), "tiles": tiles}, embeddings)
            else:
                _write_parquet(staged, source, tiles, embeddings)


def _name_first(staged: Path, file: Path) -> None:
    """Give a staged file its name, unless another command was first."""
    try:
        os.link(staged, file)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        os.replace(staged, file)


def _write_h5(path: Path, attributes: Mapping[str, str | int], embeddings: SlideEmbeddings) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for name, value in embeddings._asdict().items():
            file.create_dataset(name, data=value.numpy())
        file.attrs.update(attributes)


def _source_in_h5(path: Path) -> Source | None:
    """The stored :class:`Source`; None for a damaged file."""
    import h5py

    try:
        with h5py.File(path, "r") as file:
            return _source(file.attrs)
    except (OSError, KeyError, RuntimeError, ValueError, TypeError):
        return None


def _write_parquet(path: Path, source: Source, tiles: int, embeddings: SlideEmbeddings) -> None:
    import pyarrow
    from pyarrow import parquet

    def column(value: Tensor) -> Any:
        kind = pyarrow.list_(pyarrow.float32(), value.shape[0])
        return pyarrow.array([value.numpy()], type=kind)

    columns = {name: pyarrow.array([value]) for name, value in source.to_dict().items()}
    columns |= {"tiles": pyarrow.array([tiles]), "embedding": column(embeddings.embedding)}
    columns |= {f"layer_{layer}": column(value) for layer, value in enumerate(embeddings.layers)}
    parquet.write_table(pyarrow.table(columns), path)


def _source_in_parquet(path: Path) -> Source | None:
    import pyarrow
    from pyarrow import parquet

    try:
        columns = ["slide", "source", "source_bytes", "source_mtime_ns"]
        return _source(parquet.read_table(path, columns=columns).to_pylist()[0])
    except (OSError, KeyError, IndexError, TypeError, pyarrow.ArrowException):
        return None


def _source(stored: Mapping[str, Any]) -> Source:
    return Source(
        slide=str(stored["slide"]),
        source=str(stored["source"]),
        source_bytes=int(stored["source_bytes"]),
        source_mtime_ns=int(stored["source_mtime_ns"]),
    )


def _shown(before: Any, name: str) -> str:
    return str(before.get(name))[:16] if isinstance(before, dict) else "unknown"
