"""Tile feature files of TRIDENT, CLAM, GigaPath, STAMP and slide2vec: search and reading."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from dilated_attention_pytorch.errors import RunError

from .contents import AGAIN, HDF5, SUFFIXES, companions, number, read_content, text
from .placement import placement

_MOST_PIXELS = 2**31
_ENCODERS = ("encoder", "extractor", "encoder_name")
_TILE_SIZES = ("patch_size_level0", "tile_size_lv0")
_FEW, _SHARE = 4, 0.01
_PIXELS = 256
"""Of a tile in micrometres whose file does not say how many: fine enough, and coarser than the rounding of float32."""


class Slide(NamedTuple):
    """The tiles of a slide."""

    features: Tensor
    """``[N, C]``, in the dtype of the file."""
    coordinates: Tensor
    """``[N, 2]``, upper left corners of the tiles, in int64 or float64."""
    tile_size: int | None
    """Edge length of a tile in units of the coordinates, if the file gives it."""
    overlap: float = 0.0
    """Fraction of a tile that its neighbour covers too, as the file gives it."""
    spacing: int | None = None
    """Measured distance of neighbouring tiles; see :func:`.placement.placement`."""
    encoder: str | None = None
    """Name of the tile encoder, if the file gives it."""
    magnification: float | None = None
    """Magnification of the tiles (20 is 0.5 micrometres a pixel), if the file gives it."""
    attributes: Mapping[str, Any] = {}
    """What the file says of its tiles, by the names of the tools."""


class UnreadableFileError(RunError):
    """A file cannot be used."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(reason)
        self.path = path


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The files of one embedding, in order; if one changed, the embedding is made again."""

    name: str
    """Of the slide or the patient."""
    source: tuple[str, ...]
    """Absolute paths."""
    source_bytes: tuple[int, ...]
    source_mtime_ns: tuple[int, ...]

    @staticmethod
    def of(name: str, paths: Sequence[Path]) -> Source:
        """The current versions of files and of their :func:`.contents.companions`.

        Raises:
            UnreadableFileError: a file is missing, for example behind a link.
        """
        stats = [[status_of(file) for file in (path, *companions(path))] for path in paths]
        return Source(
            name=name,
            source=tuple(str(path.absolute()) for path in paths),
            source_bytes=tuple(sum(status.st_size for status in of_file) for of_file in stats),
            source_mtime_ns=tuple(max(status.st_mtime_ns for status in of_file) for of_file in stats),
        )

    @property
    def versions(self) -> tuple[tuple[str, int, int], ...]:
        """Slide, bytes and latest modification time of each file; a move of the folder does not change them."""
        slides = (Path(source).stem for source in self.source)
        return tuple(zip(slides, self.source_bytes, self.source_mtime_ns, strict=True))

    def is_beside(self, other: Source) -> bool:
        """Whether all its files still exist, and are others: moved files are not."""
        return all(map(os.path.exists, self.source)) and not any(
            is_same_file(one, another) for one in self.source for another in other.source
        )


def find_slides(paths: Sequence[Path]) -> dict[str, Path]:
    """The given files, and the files in given folders, by slide name.

    In a folder, an .npz file beside an HDF5 file of the same name is left out.

    Raises:
        RunError: a path does not exist or is not of a known kind, a folder is empty, or two files have one slide name.
    """
    slides: dict[str, Path] = {}
    for path in paths:
        for file in _files_of(path):
            before = slides.setdefault(file.stem, file)
            if not is_same_file(before, file):
                raise RunError(
                    f"{before} and {file} both belong to a slide {file.stem}, so their embeddings would be one file; "
                    "embed them into two folders"
                )
    return slides


def status_of(path: Path) -> os.stat_result:
    """The status of a file.

    Raises:
        UnreadableFileError: there is no such file, for example behind a link.
    """
    try:
        return path.stat()
    except OSError as error:
        raise UnreadableFileError(
            path, f"it cannot be opened ({error.strerror}); copy it again, or mend the link if it is one"
        ) from error


def is_same_file(one: str | Path, other: str | Path) -> bool:
    """Whether two paths lead to one file; a link that leads nowhere is only the same as itself."""
    try:
        return str(one) == str(other) or os.path.samefile(one, other)
    except OSError:
        return False


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(
            file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
        )
        if not files:
            raise RunError(
                f"the folder {path} holds no {', '.join(SUFFIXES)} file; pass the folder that holds them directly"
                f"{_feature_folders(path)}, as subfolders are not searched"
            )
        hdf5_stems = {file.stem for file in files if file.suffix.lower() in HDF5}
        return [file for file in files if file.suffix.lower() != ".npz" or file.stem not in hdf5_stems]
    if not path.exists():
        raise RunError(f"{path} does not exist; pass files of tile features ({', '.join(SUFFIXES)}) or their folder")
    if path.suffix.lower() not in SUFFIXES:
        raise RunError(
            f"{path} is not a file of tile features: its name must end in {', '.join(SUFFIXES)}. Slide images must "
            "first be tiled, and the tiles embedded, by TRIDENT, CLAM or GigaPath's own pipeline"
        )
    return [path]


def _feature_folders(path: Path) -> str:
    """The folders of features below a job folder of TRIDENT or CLAM, as text; else where they usually are."""
    below = [*path.glob("*/features_*"), *path.glob("features_*"), *path.glob("h5_files")]
    found = sorted(str(folder) for folder in below if folder.is_dir())
    return f": {' or '.join(found)}" if found else " (CLAM's h5_files, TRIDENT's features_...)"


def read_slide(path: Path, width: int | None = None) -> Slide:
    """Read the tiles of a file; the manual page on slides lists the formats. No code in the file is executed.

    Coordinates in micrometres (STAMP) become pixels of the tiles.

    Args:
        path: the file.
        width: width of the features that is needed; it is checked before they are read. None = any.

    Raises:
        RunError: the file is damaged or has other contents; the message says what was found and what to do.
    """
    mode = status_of(path).st_mode
    if not stat.S_ISREG(mode):
        raise RunError(f"it is {'a folder' if stat.S_ISDIR(mode) else 'a pipe or a device'}, expected a file")
    try:
        features, coordinates, attributes = read_content(path, width)
    except MemoryError as error:
        raise RunError(f"it needs more memory than available ({error}); embed it on another machine") from error
    tile_size, pixels = _tile_size(attributes)
    if pixels != 1:
        places = (coordinates * pixels).round()
        if not bool((places.abs() < _MOST_PIXELS).all()):
            raise RunError(f"its coordinates are beyond any slide, in tiles of the size that it records; {AGAIN}")
        coordinates = places.long()
    lie = placement(coordinates)
    if lie.repeated and lie.repeated == len(coordinates) - 1:
        raise RunError(f"its {len(coordinates):,} tiles all lie at one place, {lie.first}; {AGAIN}")
    if lie.repeated > max(_FEW, _SHARE * len(coordinates)):
        raise RunError(
            f"{lie.repeated:,} of its {len(coordinates):,} tiles lie at the place of another one, the first at "
            f"{lie.first}; {AGAIN}, one tile for a place"
        )
    return Slide(
        features,
        coordinates,
        tile_size,
        _overlap(attributes),
        lie.spacing,
        next(filter(None, (text(attributes.get(name)) for name in _ENCODERS)), None),
        _magnification(attributes),
        attributes,
    )


def _tile_size(attributes: Mapping[str, Any]) -> tuple[int | None, float]:
    """The edge length of a tile in pixels, None if there is none or no size, and the pixels in a unit of the
    coordinates."""
    of = {name: number(value) for name, value in attributes.items()}
    micrometres = of.get("tile_size_um") or (of.get("tile_size") if text(attributes.get("unit")) == "um" else None)
    size: float | None
    if micrometres is not None and micrometres > 0:  # STAMP
        size = of.get("tile_size_px") or _PIXELS
        pixels = round(size) / micrometres
    else:
        size, pixels = next(filter(None, map(of.get, _TILE_SIZES)), None), 1.0
        factor = of.get("downsample") or (1.0 if of.get("patch_level") == 0 else None)
        patch = of.get("patch_size")
        if size is None and patch is not None and factor is not None:
            size = patch * factor * (of.get("custom_downsample") or 1.0)
    return (round(size), pixels) if size is not None and 0.5 < size < _MOST_PIXELS else (None, 1.0)


def _overlap(attributes: Mapping[str, Any]) -> float:
    overlap, patch = number(attributes.get("overlap")), number(attributes.get("patch_size"))
    return overlap / patch if overlap and patch and 0 < overlap < patch else 0.0


def _magnification(attributes: Mapping[str, Any]) -> float | None:
    of = {name: number(value) for name, value in attributes.items()}
    recorded, pixels = of.get("target_magnification"), of.get("tile_size_px")
    micrometres = of.get("tile_size_um")
    spacing = of.get("requested_spacing_um") or (micrometres / pixels if micrometres and pixels else None)
    magnification = recorded or (10 / spacing if spacing else None)
    return magnification if magnification is not None and magnification > 0 else None
