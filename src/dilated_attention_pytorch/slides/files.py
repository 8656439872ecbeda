"""Tile feature files of TRIDENT, CLAM and GigaPath: search and reading."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.memory import check_memory
from dilated_attention_pytorch.models.tensor_file import UnsafeFileError, first_line, load_tensors

HDF5 = (".h5", ".hdf5")
SUFFIXES = (*HDF5, ".pt")
FEATURES, COORDINATES, TILE_SIZE = "features", "coords", "patch_size_level0"

_SHOWN = 8
_MOST_PIXELS = 2**31


class Slide(NamedTuple):
    """The tiles of a slide."""

    features: Tensor
    """``[N, C]``, in the dtype of the file."""
    coordinates: Tensor
    """``[N, 2]``, upper left corners of the tiles."""
    tile_size: int | None
    """Edge length of a tile in units of the coordinates, if the file gives it."""


def find_slides(paths: Sequence[Path]) -> dict[str, Path]:
    """The given files, and the files in given folders, by slide name.

    Raises:
        RunError: a path does not exist or is not of a known kind, a folder is empty, or two files have one slide name.
    """
    found: dict[str, Path] = {}
    for path in paths:
        for file in _files_of(path):
            before = found.setdefault(file.stem, file)
            if not is_same_file(before, file):
                raise RunError(
                    f"{before} and {file} both belong to a slide {file.stem}, so their embeddings would be one file; "
                    "embed them into two folders"
                )
    return found


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
                f"the folder {path} holds no {', '.join(SUFFIXES)} file; pass the folder that holds them directly ("
                "CLAM's h5_files, TRIDENT's features_...), as subfolders are not searched"
            )
        return files
    if not path.exists():
        raise RunError(f"{path} does not exist; pass files of tile features ({', '.join(SUFFIXES)}) or their folder")
    if path.suffix.lower() not in SUFFIXES:
        raise RunError(
            f"{path} is not a file of tile features: its name must end in {', '.join(SUFFIXES)}. Slide images must "
            "first be tiled, and the tiles embedded, by TRIDENT, CLAM or GigaPath's own pipeline"
        )
    return [path]


def read_slide(path: Path) -> Slide:
    """Read the tiles of a file: ``features`` and ``coords``, with or without a leading axis of length 1.

    In HDF5 they are datasets; the tile size is the attribute ``patch_size_level0`` of ``coords`` (TRIDENT), or
    ``patch_size`` times ``downsample`` (CLAM). In a ``.pt`` file all three are entries of a dict, which is read without
    executing code.

    Raises:
        RunError: the file is damaged or has other contents; the message says what was found and what to do.
    """
    try:
        features, coordinates, tile_size = _read_hdf5(path) if path.suffix.lower() in HDF5 else _read_torch(path)
    except MemoryError as error:
        raise RunError(f"it needs more memory than available ({error}); embed it on another machine") from error
    features, coordinates = (_without_batch(x, name) for x, name in ((features, FEATURES), (coordinates, COORDINATES)))
    if coordinates.shape[1] != 2:
        raise RunError(f"{COORDINATES} must be [tiles, 2], got {list(coordinates.shape)}; {_AGAIN}")
    if len(features) != len(coordinates):
        raise RunError(
            f"it has {len(features):,} rows of {FEATURES} and {len(coordinates):,} of {COORDINATES}; {_AGAIN}"
        )
    if not len(features):
        raise RunError("it has no tiles: no tissue was found on the slide; check its segmentation")
    if not features.is_floating_point():
        raise RunError(f"{FEATURES} must be floats, got {features.dtype}; {_AGAIN}")
    broken = ~features.isfinite().all(dim=1)
    if bool(broken.any()):
        raise RunError(
            f"{FEATURES} of {int(broken.sum()):,} of its {len(features):,} tiles are not finite, the first in row "
            f"{int(broken.int().argmax()):,}; {_AGAIN}"
        )
    return Slide(features, coordinates, tile_size)


_AGAIN = "extract its features again"


def _read_hdf5(path: Path) -> tuple[Tensor, Tensor, int | None]:
    import h5py

    try:
        with h5py.File(path, "r") as file:
            missing = [name for name in (FEATURES, COORDINATES) if not isinstance(file.get(name), h5py.Dataset)]
            if missing:
                raise RunError(_without(missing, list(file)))
            features, coordinates = file[FEATURES], file[COORDINATES]
            check_memory(
                features.size * features.dtype.itemsize,
                "cpu",
                what=f"reading its {FEATURES} {list(features.shape)}",
                remedy="embed it on a machine with more memory",
            )
            return (
                _tensor(features),
                _tensor(coordinates),
                _tile_size({**file.attrs, **features.attrs, **coordinates.attrs}),
            )
    except (PermissionError, IsADirectoryError) as error:
        raise RunError(f"it cannot be opened: {os.strerror(error.errno or 0)}") from error
    except (OSError, KeyError, RuntimeError, ValueError, TypeError) as error:
        raise RunError(f"it cannot be read as HDF5 ({first_line(error)}); copy it again, or {_AGAIN}") from error


def _tensor(dataset: Any) -> Tensor:
    """The values of a dataset in native byte order."""
    values = dataset[()]
    if values.dtype.kind not in "fiu":
        raise RunError(f"{dataset.name.lstrip('/')} must hold numbers, got {values.dtype}; {_AGAIN}")
    return torch.from_numpy(values.astype(values.dtype.newbyteorder("="), copy=False))


def _read_torch(path: Path) -> tuple[Tensor, Tensor, int | None]:
    try:
        content = load_tensors(path)
    except UnsafeFileError as error:
        raise RunError(
            f"it holds objects other than tensors ({error}), which are not loaded, as that would execute code from the "
            "file; save a dictionary of tensors"
        ) from error
    except ValueError as error:
        raise RunError(f"it cannot be read as tensors ({error}); copy it again, or {_AGAIN}") from error
    if isinstance(content, Tensor):
        raise RunError(
            "it holds only features, and tile coordinates are needed too; pass the HDF5 file next to it (CLAM: "
            f'h5_files), or save {{"{FEATURES}": ..., "{COORDINATES}": ...}}'
        )
    if not isinstance(content, Mapping):
        raise RunError(f'it holds a {type(content).__name__}, expected {{"{FEATURES}": ..., "{COORDINATES}": ...}}')
    missing = [name for name in (FEATURES, COORDINATES) if not isinstance(content.get(name), Tensor)]
    if missing:
        raise RunError(_without(missing, [str(name) for name in content]))
    return content[FEATURES], content[COORDINATES], _tile_size(content)


def _without_batch(x: Tensor, name: str) -> Tensor:
    without = x[0] if x.dim() == 3 and x.shape[0] == 1 else x
    if without.dim() != 2:
        raise RunError(f"{name} must be [tiles, width] or [1, tiles, width], got {list(x.shape)}; {_AGAIN}")
    return without


def _tile_size(attributes: Mapping[str, Any]) -> int | None:
    """Edge length of a tile in pixels of level 0; None if the attributes give none, or NaN or infinity."""
    size = _number(attributes.get(TILE_SIZE))
    if size is None and "downsample" in attributes:
        patch, factor = _number(attributes.get("patch_size")), _number(attributes["downsample"])
        size = None if patch is None or factor is None else patch * factor
    return round(size) if size is not None and 0.5 < size < _MOST_PIXELS else None


def _number(value: Any) -> float | None:
    """A number, or the first of a sequence of about equal ones (CLAM stores one factor per axis); None otherwise."""
    try:
        numbers = torch.as_tensor(value, dtype=torch.float64).flatten()
        return float(numbers[0]) if torch.allclose(numbers, numbers[0], rtol=0.01, atol=0) else None
    except (TypeError, ValueError, RuntimeError, IndexError):
        return None


def _without(missing: list[str], there: list[str]) -> str:
    holds = f"it holds {', '.join(there[:_SHOWN])}" if there else "it is empty"
    return f"it has no {' and no '.join(missing)} ({holds}); pass files of tile features as TRIDENT or CLAM write them"
