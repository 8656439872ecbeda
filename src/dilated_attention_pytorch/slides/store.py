"""The output folder of slide embeddings: one atomically written file per slide, and the settings of all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.models import SlideEmbeddings
from dilated_attention_pytorch.output import check_free_folder, check_makeable, make_output, replacing, write_text

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
        """The current version of a slide's file."""
        status = path.stat()
        return Source(slide=slide, source=str(path), source_bytes=status.st_size, source_mtime_ns=status.st_mtime_ns)

    @property
    def version(self) -> tuple[int, int]:
        """Size and modification time, which do not change when a folder is moved."""
        return self.source_bytes, self.source_mtime_ns

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
            check_free_folder(
                self.folder, going_on=", or the one of an earlier `embed` command", beside=f"{SETTINGS_NAME}.part"
            )
            return
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
        """Create the folder and write the settings of its embeddings."""
        make_output(self.folder)
        if not (self.folder / SETTINGS_NAME).is_file():
            write_text(self.folder / SETTINGS_NAME, json.dumps(made_with, indent=1) + "\n")

    def path(self, slide: str) -> Path:
        """The output file of a slide."""
        return self.folder / f"{slide}.{self.kind}"

    def holds(self, source: Source) -> bool:
        """Whether an embedding of the slide's current file exists."""
        path = self.path(source.slide)
        if not path.is_file():
            return False
        before = _source_in_h5(path) if self.kind == "h5" else _source_in_parquet(path)
        return before == source.version

    def write(self, source: Source, tiles: int, embeddings: SlideEmbeddings) -> None:
        """Write one slide's embeddings, ``[E]`` and ``[L + 1, E]`` in float32."""
        with replacing(self.path(source.slide)) as staged:
            if self.kind == "h5":
                _write_h5(staged, {**source.to_dict(), "tiles": tiles}, embeddings)
            else:
                _write_parquet(staged, source, tiles, embeddings)


def _write_h5(path: Path, attributes: Mapping[str, str | int], embeddings: SlideEmbeddings) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for name, value in embeddings._asdict().items():
            file.create_dataset(name, data=value.numpy())
        file.attrs.update(attributes)


def _source_in_h5(path: Path) -> tuple[int, int] | None:
    """The stored :attr:`Source.version`; None for a damaged file."""
    import h5py

    try:
        with h5py.File(path, "r") as file:
            return int(file.attrs["source_bytes"]), int(file.attrs["source_mtime_ns"])
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


def _source_in_parquet(path: Path) -> tuple[int, int] | None:
    import pyarrow
    from pyarrow import parquet

    try:
        row = parquet.read_table(path, columns=["source_bytes", "source_mtime_ns"]).to_pylist()[0]
        return int(row["source_bytes"]), int(row["source_mtime_ns"])
    except (OSError, KeyError, IndexError, TypeError, pyarrow.ArrowException):
        return None


def _shown(before: Any, name: str) -> str:
    return str(before.get(name))[:16] if isinstance(before, dict) else "unknown"
