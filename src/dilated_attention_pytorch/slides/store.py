"""The output folder of slide embeddings: one atomically written file per slide, and the settings of all."""

from __future__ import annotations

import io
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.output import (
    check_free_folder,
    check_makeable,
    make_output,
    replacing,
    staged_name,
    sync,
)

from .contents import companions
from .encoder import SlideEmbeddings
from .files import is_same_file, status_of
from .settings import FileKind
from .tools import Layout

SETTINGS_NAME = "_embed.json"
"""Readers of Parquet folders skip names that begin with an underscore."""
_OWN_NAMES = f"{SETTINGS_NAME}.*"
"""What other commands that begin at the same time may have written: settings under way, and locks of slides."""
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
        """The current version of a slide's file and of its :func:`.contents.companions`.

        Raises:
            RunError: there is no such file, for example behind a link.
        """
        stats = [status_of(file) for file in (path, *companions(path))]
        return Source(
            slide=slide,
            source=str(path.absolute()),
            source_bytes=sum(status.st_size for status in stats),
            source_mtime_ns=max(status.st_mtime_ns for status in stats),
        )

    @property
    def version(self) -> tuple[int, int]:
        """Bytes and latest modification time, which do not change when a folder is moved."""
        return self.source_bytes, self.source_mtime_ns

    def is_beside(self, other: Source) -> bool:
        """Whether its file still exists, and is another one: a moved file is not."""
        return os.path.exists(self.source) and not is_same_file(self.source, other.source)


class SlideResult(NamedTuple):
    """What is computed of one slide, on the CPU."""

    embeddings: SlideEmbeddings
    """``[E]`` and ``[L + 1, E]`` in float32."""
    coordinates: Tensor
    """``[N, 2]``, as the file of the slide has them, in pixels."""
    tile_size: int
    """In the same pixels."""
    attributes: Mapping[str, Any] = {}
    """What the file says of its tiles."""
    of_tiles: Mapping[str, Tensor] = {}
    """Results per tile by name, float32: `attention` [L, H, N], `attention_to_class` [L, H],
    `rollout` [N], `states` [N, E]."""


class Store:
    """A folder of embeddings in one format.

    Args:
        folder: created by :meth:`begin` if missing.
        kind: file format.
        layout: names in the files; other than "own" in HDF5 only.
    """

    def __init__(self, folder: Path, kind: FileKind, layout: Layout = "own") -> None:
        self.folder = folder
        self.kind: FileKind = kind
        self.layout: Layout = layout

    def check(self, made_with: Mapping[str, Any]) -> None:
        """Raise :class:`RunError` unless the folder is free, or holds embeddings made with the same settings."""
        file = self.folder / SETTINGS_NAME
        if not file.is_file():
            try:
                check_free_folder(self.folder, going_on=", or the one of an earlier `embed` command", beside=_OWN_NAMES)
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
        before = before if isinstance(before, dict) else {}
        compared = [name for name in {**made_with, **before} if name not in _NOT_COMPARED]
        differ = [name for name in compared if before.get(name) != made_with.get(name)]
        if differ:
            was = ", ".join(f"{name} {_shown(before, name)}, now {_shown(made_with, name)}" for name in differ)
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

    def path(self, slide: str) -> Path:
        """The output file of a slide."""
        return self.folder / f"{slide}.{self.kind}"

    def before(self, source: Source) -> Source | None:
        """The source of the embedding that the folder holds under a slide's name, None if it holds none.

        Raises:
            RunError: the embedding cannot have its name, or something has it that no `embed` command wrote; that is
                never replaced.
        """
        path = self.path(source.slide)
        _check_name(path, source.source)
        if not os.path.lexists(path):
            return None
        if is_same_file(path, source.source):
            raise RunError(f"it lies where its embedding would, in --output {self.folder}; pass another --output")
        source_of_embedding = None
        if path.is_file() and not path.is_symlink():
            source_of_embedding = _source_in_h5(path) if self.kind == "h5" else _source_in_parquet(path)
        if source_of_embedding is None:
            raise RunError(
                f"{path} is not an embedding that `embed` wrote, or it is damaged; it is not replaced: move it "
                "away and run the same command again, or pass another --output"
            )
        return source_of_embedding

    def is_of(self, before: Source | None, source: Source) -> bool:
        """Whether an embedding is of the current version of a slide's file.

        Args:
            before: the source of the embedding; None if there is none.
            source: the file.

        Raises:
            RunError: it is of another slide of the same name.
        """
        if before is not None and before.is_beside(source):
            raise RunError(
                f"--output {self.folder} holds the embedding of another slide {source.slide}: expected that of "
                f"{source.source}, got that of {before.source}; pass another --output, or rename {source.source}"
            )
        return before is not None and before.version == source.version

    def write(self, source: Source, result: SlideResult) -> None:
        """Write one slide's result in place of an earlier one.

        Raises:
            RunError: meanwhile something else has the name; it is not replaced.
        """
        path = self.path(source.slide)
        with replacing(path, check=lambda: self.before(source)) as staged:
            if self.kind == "h5":
                _write_h5(staged, source, result, self.layout, path)
            else:
                _write_parquet(staged, source, len(result.coordinates), result.embeddings)

    def write_geojson(self, source: Source, result: SlideResult) -> None:
        """Write the attention to every tile, the mean over the heads of each layer, for QuPath (0.4 or later).

        A tile is a square in pixels of level 0, with one measurement per layer. Source: QuPath,
        ``qupath/lib/io/QuPathTypeAdapters.java``.

        Raises:
            RunError: something else has the name; it is not replaced.
        """
        path = self.folder / f"{source.slide}.geojson"
        attention = result.of_tiles["attention"].mean(1).T.tolist()  # [N][L]
        size, features = result.tile_size, []
        for (x, y), scores in zip(result.coordinates.tolist(), attention, strict=True):
            ring = [[x, y], [x + size, y], [x + size, y + size], [x, y + size], [x, y]]
            measurements = {f"attention layer {layer}": score for layer, score in enumerate(scores, start=1)}
            features.append(
                {
                    "type": "Feature",
                    "geometry": {"type": "Polygon", "coordinates": [ring]},
                    "properties": {"objectType": "tile", "measurements": measurements},
                }
            )
        collection = {"type": "FeatureCollection", "generator": _GENERATOR, "features": features}
        with replacing(path, check=lambda: _check_generated(path)) as staged:
            staged.write_text(json.dumps(collection), encoding="utf-8")


_GENERATOR = "dilated-attention embed"
_LONGEST_NAME = 255
"""Bytes of a file's name that file systems allow."""


def _check_name(path: Path, source: str) -> None:
    """Raise :class:`RunError` if readers of the folder would skip the file, or no file can have the name."""
    try:
        source.encode()
    except UnicodeEncodeError as error:
        raise RunError("its path is not valid UTF-8, in which the embedding records it; rename it") from error
    if path.suffix == ".parquet" and path.name.startswith(("_", ".")):
        raise RunError(
            "readers of a folder of Parquet files skip names that begin with _ or a dot; rename it, or pass --format h5"
        )
    length = len(os.fsencode(staged_name(path)))
    if length > _LONGEST_NAME:
        raise RunError(
            f"its name is too long by {length - _LONGEST_NAME} bytes for the file of its embedding; rename it"
        )


def _check_generated(path: Path) -> None:
    """Raise :class:`RunError` if a GeoJSON file that `embed` did not write has the name."""
    if not os.path.lexists(path):
        return
    begin = b""
    if path.is_file() and not path.is_symlink():
        with path.open("rb") as file:
            begin = file.read(200)
    if f'"generator": "{_GENERATOR}"'.encode() not in begin:
        raise RunError(f"{path} was not written by `embed`; it is not replaced: move it away, or pass another --output")


def _name_first(staged: Path, file: Path) -> None:
    """Give a staged file its name, unless another command was first."""
    try:
        os.link(staged, file)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        os.replace(staged, file)


def _write_h5(path: Path, source: Source, result: SlideResult, layout: Layout, output: Path) -> None:
    import h5py

    buffer = io.BytesIO()  # where a disk is full, HDF5 raises a RuntimeError when it closes a file
    with h5py.File(buffer, "w") as file:
        vector = result.embeddings.embedding.numpy()
        if layout == "own":
            file["embedding"] = vector
            file["layers"] = result.embeddings.layers.numpy()
        else:
            file["features"] = vector if layout == "trident" else vector[None]
        if layout == "trident":
            file["features"].attrs.update({"name": source.slide, "savetodir": str(output.parent)})
        for name, values in result.of_tiles.items():
            file[name] = values.numpy()
        if layout == "trident" or result.of_tiles:
            file["coords"] = result.coordinates.numpy()
            recorded = {n: value for n, value in result.attributes.items() if isinstance(value, (str, int, float))}
            file["coords"].attrs.update({**recorded, "patch_size_level0": result.tile_size})
        file.attrs.update({**asdict(source), "tiles": len(result.coordinates)})
    path.write_bytes(buffer.getbuffer())


def _source_in_h5(path: Path) -> Source | None:
    """The stored :class:`Source`; None for a damaged file."""
    import h5py

    try:
        with h5py.File(path, "r") as file:
            return _source(file.attrs) if file.keys() & {"embedding", "features"} else None
    except (OSError, KeyError, RuntimeError, ValueError, TypeError):
        return None


def _write_parquet(path: Path, source: Source, tiles: int, embeddings: SlideEmbeddings) -> None:
    import pyarrow
    from pyarrow import parquet

    def column(value: Tensor) -> Any:
        kind = pyarrow.list_(pyarrow.float32(), value.shape[0])
        return pyarrow.array([value.numpy()], type=kind)

    columns = {name: pyarrow.array([value]) for name, value in asdict(source).items()}
    columns |= {"tiles": pyarrow.array([tiles]), "embedding": column(embeddings.embedding)}
    columns |= {f"layer_{layer}": column(value) for layer, value in enumerate(embeddings.layers)}
    parquet.write_table(pyarrow.table(columns), path)


def _source_in_parquet(path: Path) -> Source | None:
    import pyarrow
    from pyarrow import parquet

    try:
        columns = [field.name for field in fields(Source)]
        return _source(parquet.read_table(path, columns=columns).to_pylist()[0])
    except (OSError, KeyError, IndexError, TypeError, pyarrow.ArrowException):
        return None


def _source(stored: Mapping[str, Any]) -> Source:
    """The source of an embedding; raises ``KeyError`` or ``TypeError`` for other contents."""
    return Source(
        slide=str(stored["slide"]),
        source=str(stored["source"]),
        source_bytes=int(stored["source_bytes"]),
        source_mtime_ns=int(stored["source_mtime_ns"]),
    )


def _shown(settings: Mapping[str, Any], name: str) -> str:
    return str(settings.get(name))[:16]
