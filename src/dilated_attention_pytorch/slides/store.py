"""The output folder of slide embeddings: one atomically written file per slide, and the settings of all."""

from __future__ import annotations

import io
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.output import make_output, replacing, staged_name, sync

from .encoder import SlideEmbeddings
from .files import Source, is_same_file
from .folder import check_same, settings_of
from .reading import TileSequence
from .settings import FileKind
from .tools import Layout

SETTINGS_NAME = "_embed.json"
"""Readers of Parquet folders skip names that begin with an underscore."""
_NOT_COMPARED = ("checkpoint",)


class SequenceResult(NamedTuple):
    """What is computed of one sequence, on the CPU."""

    embeddings: SlideEmbeddings
    """``[E]`` and ``[L + 1, E]`` in float32."""
    of_tiles: Mapping[str, Tensor] = {}
    """Results per tile by name, float32: `attention` [L, H, N], `attention_to_class` [L, H],
    `rollout` [N], `states` [N, E]."""


class Store:
    """A folder of embeddings in one format.

    Args:
        folder: created by :meth:`begin` if missing.
        kind: file format.
        layout: names in the files; other than "own" in HDF5 only.
        by_patient: whether the embeddings are of patients, each of several slides.
    """

    def __init__(self, folder: Path, kind: FileKind, layout: Layout = "own", *, by_patient: bool = False) -> None:
        self.folder = folder
        self.kind: FileKind = kind
        self.layout: Layout = layout
        self.by_patient = by_patient

    def check(self, made_with: Mapping[str, Any]) -> None:
        """Raise :class:`RunError` unless the folder is free, or holds embeddings made with the same settings."""
        before = settings_of(self.folder, SETTINGS_NAME, command="embed")
        if before is not None:
            what = "embeddings that were made with other settings"
            check_same(self.folder, before, made_with, what=what, but=_NOT_COMPARED)

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

    def path(self, name: str) -> Path:
        """The output file of a slide or patient."""
        return self.folder / f"{name}.{self.kind}"

    def before(self, source: Source) -> Source | None:
        """The source of the embedding that the folder holds under a name, None if it holds none.

        Raises:
            RunError: the embedding cannot have its name, or something has it that no `embed` command wrote; that is
                never replaced.
        """
        path = self.path(source.name)
        _check_name(path, source.source)
        if not os.path.lexists(path):
            return None
        if any(is_same_file(path, file) for file in source.source):
            raise RunError(f"it lies where its embedding would, in --output {self.folder}; pass another --output")
        source_of_embedding = None
        if path.is_file() and not path.is_symlink():
            read = _source_in_h5 if self.kind == "h5" else _source_in_parquet
            source_of_embedding = read(path, self.by_patient)
        if source_of_embedding is None:
            raise RunError(
                f"{path} is not an embedding that `embed` wrote, or it is damaged; it is not replaced: move it "
                "away and run the same command again, or pass another --output"
            )
        return source_of_embedding

    def is_of(self, before: Source | None, source: Source) -> bool:
        """Whether an embedding is of the current versions of the files.

        Args:
            before: the source of the embedding; None if there is none.
            source: the files.

        Raises:
            RunError: it is of another slide or patient of the same name.
        """
        if before is not None and before.is_beside(source):
            expected, got = ", ".join(source.source), ", ".join(before.source)
            what, renamed = ("patient", source.name) if self.by_patient else ("slide", expected)
            raise RunError(
                f"--output {self.folder} holds the embedding of another {what} {source.name}: expected that of "
                f"{expected}, got that of {got}; pass another --output, or rename {renamed}"
            )
        return before is not None and before.versions == source.versions

    def write(self, sequence: TileSequence, result: SequenceResult) -> None:
        """Write the result of a sequence in place of an earlier one.

        Raises:
            RunError: meanwhile something else has the name; it is not replaced.
        """
        path, recorded = self.path(sequence.source.name), _recorded(sequence.source, self.by_patient)
        with replacing(path, check=lambda: self.before(sequence.source)) as staged:
            if self.kind == "h5":
                self._write_h5(staged, sequence, result, recorded)
            else:
                _write_parquet(staged, {**recorded, "tiles": sequence.num_tiles}, result.embeddings)

    def _write_h5(
        self, path: Path, sequence: TileSequence, result: SequenceResult, recorded: Mapping[str, Any]
    ) -> None:
        import h5py

        buffer = io.BytesIO()  # where a disk is full, HDF5 raises a RuntimeError when it closes a file
        with h5py.File(buffer, "w") as file:
            vector = result.embeddings.embedding.numpy()
            if self.layout == "own":
                file["embedding"] = vector
                file["layers"] = result.embeddings.layers.numpy()
            else:
                file["features"] = vector if self.layout == "trident" else vector[None]
            if self.layout == "trident":
                folder = str(self.folder.absolute())
                file["features"].attrs.update({"name": sequence.source.name, "savetodir": folder})
            for name, values in result.of_tiles.items():
                file[name] = values.numpy()
            if self.layout == "trident" or result.of_tiles:
                file["coords"] = torch.cat([slide.slide.coordinates for slide in sequence.slides]).numpy()
                file["coords"].attrs.update(_of_tiles(sequence, self.by_patient))
                if self.by_patient:
                    tiles = torch.tensor([len(slide.grid) for slide in sequence.slides])
                    index = torch.arange(len(tiles), dtype=torch.int32).repeat_interleave(tiles)
                    file["slide_index"] = index.numpy()
            file.attrs.update({**recorded, "tiles": sequence.num_tiles})
        path.write_bytes(buffer.getbuffer())

    def write_geojson(self, sequence: TileSequence, result: SequenceResult) -> None:
        """Write the attention to every tile, the mean over the heads of each layer, for QuPath (0.4 or later).

        Every slide whose pixels are those of level 0 gets a file. A tile is a square, with one measurement per layer.
        Source: QuPath, ``qupath/lib/io/QuPathTypeAdapters.java``.

        Raises:
            RunError: something else has the name; it is not replaced.
        """
        attention = result.of_tiles["attention"].mean(1).T.split([len(slide.grid) for slide in sequence.slides])
        for slide, scores_of_tiles in zip(sequence.slides, attention, strict=True):
            if "tile_size_um" in slide.slide.attributes:
                continue
            path = self.folder / f"{slide.path.stem}.geojson"
            size, features = slide.tile_size, []
            for (x, y), scores in zip(slide.slide.coordinates.tolist(), scores_of_tiles.tolist(), strict=True):
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
            with replacing(path, check=lambda path=path: _check_generated(path)) as staged:  # type: ignore[misc]
                staged.write_text(json.dumps(collection), encoding="utf-8")


_GENERATOR = "dilated-attention embed"
_LONGEST_NAME = 255
"""Bytes of a file's name that file systems allow."""


def _check_name(path: Path, source: Sequence[str]) -> None:
    """Raise :class:`RunError` if readers of the folder would skip the file, or no file can have the name."""
    try:
        "".join(source).encode()
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


def _of_tiles(sequence: TileSequence, by_patient: bool) -> dict[str, Any]:
    """What the files say of their tiles, as attributes; of a patient, what all slides have, a value for each."""
    of_slides = [
        {
            name: value
            for name, value in {**slide.slide.attributes, "patch_size_level0": slide.tile_size}.items()
            if isinstance(value, (str, int, float))
        }
        for slide in sequence.slides
    ]
    first = of_slides[0]
    if not by_patient:
        return first
    shared = [name for name, value in first.items() if all(type(one.get(name)) is type(value) for one in of_slides)]
    return {name: [one[name] for one in of_slides] for name in shared}


def _write_parquet(path: Path, recorded: Mapping[str, Any], embeddings: SlideEmbeddings) -> None:
    import pyarrow
    from pyarrow import parquet

    def column(value: Tensor) -> Any:
        kind = pyarrow.list_(pyarrow.float32(), value.shape[0])
        return pyarrow.array([value.numpy()], type=kind)

    columns = {name: pyarrow.array([value]) for name, value in recorded.items()}
    columns |= {"embedding": column(embeddings.embedding)}
    columns |= {f"layer_{layer}": column(value) for layer, value in enumerate(embeddings.layers)}
    parquet.write_table(pyarrow.table(columns), path)


def _recorded(source: Source, by_patient: bool) -> dict[str, Any]:
    """A source as attributes or columns; of a patient, each is a list."""
    files = {name: getattr(source, name) for name in _OF_FILES}
    if by_patient:
        return {"patient": source.name, **{name: list(values) for name, values in files.items()}}
    return {"slide": source.name, **{name: value for name, (value,) in files.items()}}


_OF_FILES = ("source", "source_bytes", "source_mtime_ns")


def _source_in_h5(path: Path, by_patient: bool) -> Source | None:
    """The stored :class:`Source`; None for a damaged file."""
    import h5py

    try:
        with h5py.File(path, "r") as file:
            return _source(file.attrs, by_patient) if file.keys() & {"embedding", "features"} else None
    except (OSError, KeyError, RuntimeError, ValueError, TypeError):
        return None


def _source_in_parquet(path: Path, by_patient: bool) -> Source | None:
    import pyarrow
    from pyarrow import parquet

    try:
        columns = ["patient" if by_patient else "slide", *_OF_FILES]
        return _source(parquet.read_table(path, columns=columns).to_pylist()[0], by_patient)
    except (OSError, KeyError, IndexError, ValueError, TypeError, pyarrow.ArrowException):
        return None


def _source(stored: Mapping[str, Any], by_patient: bool) -> Source:
    """The source of an embedding; raises ``KeyError`` or ``TypeError`` for other contents."""
    name = str(stored["patient" if by_patient else "slide"])
    source, sizes, times = (stored[one] if by_patient else [stored[one]] for one in _OF_FILES)
    if not len(source) == len(sizes) == len(times):
        raise TypeError("expected as many sizes and times as files")
    return Source(
        name=name,
        source=tuple(map(str, source)),
        source_bytes=tuple(map(int, sizes)),
        source_mtime_ns=tuple(map(int, times)),
    )
