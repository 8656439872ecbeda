"""What files of tile features hold: HDF5, ``torch.save`` and NumPy files, by the names that the tools give."""

from __future__ import annotations

import json
import math
import os
import stat
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.errors import RunError, first_line, shortened
from dilated_attention_pytorch.memory import check_memory, in_bytes

from .tensor_file import FLOATS, UnsafeFileError, check_dense, load_tensors

HDF5 = (".h5", ".hdf5")
SUFFIXES = (*HDF5, ".pt", ".npz")
FEATURES, COORDINATES = "features", "coords"
NAMES = {FEATURES: (FEATURES, "feats", "tile_embeds"), COORDINATES: (COORDINATES,)}
"""Names of the two arrays: features of TRIDENT, CLAM and slide2vec, feats of STAMP, tile_embeds of GigaPath."""
AGAIN = "extract its features again"

_ATTRIBUTES = (
    "encoder",
    "extractor",
    "encoder_name",
    "patch_size_level0",
    "tile_size_lv0",
    "patch_size",
    "patch_level",
    "downsample",
    "custom_downsample",
    "overlap",
    "target_magnification",
    "level0_magnification",
    "level0_width",
    "level0_height",
    "tile_size_px",
    "tile_size_um",
    "tile_size",
    "unit",
    "requested_spacing_um",
)
_SHOWN = 8
_MOST_COMPRESSED, _LARGE = 200, 2**26
"""Features of tiles shrink to half at most; data that shrank to less than a 200th are fill values."""
_MOST_PIXELS = 2**53
_BYTES_OF_TILE = 4 * 1536
_UNFINISHED = "it is cut short or still being written; wait for the program that writes it, or copy it again"


class Content(NamedTuple):
    """The arrays of a file, checked by themselves."""

    features: Tensor
    """``[N, C]`` in float16, bfloat16, float32 or float64."""
    coordinates: Tensor
    """``[N, 2]`` in int64 or float64."""
    attributes: Mapping[str, Any]
    """What the file says of its tiles, by the names of the tools."""


def read_content(path: Path, width: int | None) -> Content:
    """Read a file.

    Args:
        path: a regular file; its ending tells the format.
        width: width of the features that is needed, which is checked before they are read; None = any.

    Raises:
        RunError: the file is damaged or has other contents; the message says what was found and what to do.
    """
    suffix = path.suffix.lower()
    if suffix in HDF5:
        return _read_hdf5(path, width)
    return _read_torch(path, width) if suffix == ".pt" else _read_numpy(path, width)


def num_tiles(path: Path) -> int:
    """Number of tiles of a file, for progress alone: by the shape in HDF5, else a guess by its size; else 1."""
    import h5py

    try:
        status = path.stat()
        if path.suffix.lower() not in HDF5 or not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
            return max(1, status.st_size // _BYTES_OF_TILE)
        with h5py.File(path, "r") as file:
            return int(next(file[name].shape[-2] for name in NAMES[FEATURES] if name in file))
    except (OSError, KeyError, RuntimeError, ValueError, TypeError, AttributeError, IndexError, StopIteration):
        return 1


def _read_hdf5(path: Path, width: int | None) -> Content:
    import h5py

    try:
        with h5py.File(path, "r") as file:
            datasets = {}
            for name, names in NAMES.items():
                present = [known for known in names if known in file]
                if present and not isinstance(file.get(present[0], getlink=True), h5py.HardLink):
                    raise RunError(f"its {present[0]} are a link, to another place or file; copy them in")
                if present and isinstance(file[present[0]], h5py.Dataset):
                    datasets[name] = file[present[0]]
            if len(datasets) < len(NAMES):
                raise RunError(_without([name for name in NAMES if name not in datasets], list(file)))
            features, coordinates = datasets[FEATURES], datasets[COORDINATES]
            for name, dataset in datasets.items():
                _check_kind(name, dataset.dtype)
            _check_shapes(features.shape, coordinates.shape, width)
            for name, dataset in datasets.items():
                _check_stored(name, dataset)
            attributes: dict[str, Any] = {}
            for holder in (file, features, coordinates):
                attributes |= {name: _plain(holder.attrs[name]) for name in _ATTRIBUTES if name in holder.attrs}
            return _content(_tensor(FEATURES, features[()]), _tensor(COORDINATES, coordinates[()]), attributes)
    except PermissionError as error:
        raise RunError(f"it cannot be opened: {os.strerror(error.errno or 0)}") from error
    except BlockingIOError as error:
        raise RunError(f"another program is writing it ({first_line(error)}); embed it when that has ended") from error
    except (OSError, KeyError, RuntimeError, ValueError, TypeError, OverflowError) as error:
        reason = first_line(error)
        remedy = (
            _UNFINISHED if "truncated" in reason or "already open for write" in reason else f"copy it again, or {AGAIN}"
        )
        raise RunError(f"it cannot be read as HDF5 ({reason}); {remedy}") from error


def _plain(value: Any) -> Any:
    """A scalar or a short array of NumPy as values of Python; anything else (h5py.Empty, ...) as it is."""
    import numpy

    return value.tolist() if isinstance(value, (numpy.generic, numpy.ndarray)) and value.size <= _SHOWN else value


def _check_stored(name: str, dataset: Any) -> None:
    """Raise unless the numbers of a dataset are in this file, and as many bytes as they claim."""
    size = dataset.size * dataset.dtype.itemsize
    if dataset.external:
        raise RunError(f"the numbers of {name} lie in another file ({shortened(dataset.external[0][0])}); copy them in")
    check_memory(
        2 * size,
        "cpu",
        what=f"reading its {name} {list(dataset.shape)}",
        remedy="embed it on a machine with more memory",
    )
    _check_claim(name, size, dataset.id.get_storage_size())


def _check_claim(name: str, size: int, stored: int) -> None:
    """Raise if ``stored`` compressed bytes claim to be far more numbers than features of tiles can shrink from."""
    if size > max(_LARGE, _MOST_COMPRESSED * stored):
        raise RunError(
            f"{in_bytes(stored)} of its {name} claim to be {in_bytes(size)}: most of them were never written; {AGAIN}"
        )


def _check_kind(name: str, dtype: Any) -> None:
    if dtype.kind not in "fiu" or dtype.itemsize > 8:
        raise RunError(f"{name} must hold numbers of at most 64 bits, got {dtype}; {AGAIN}")


def _tensor(name: str, values: Any) -> Tensor:
    """The numbers of an array in native byte order."""
    _check_kind(name, values.dtype)
    return torch.from_numpy(values.astype(values.dtype.newbyteorder("="), copy=False))


def _read_torch(path: Path, width: int | None) -> Content:
    content = _load(path)
    if isinstance(content, Tensor):
        return _beside(path, content, width)
    if not isinstance(content, Mapping):
        raise RunError(f'it holds a {type(content).__name__}, expected {{"{FEATURES}": ..., "{COORDINATES}": ...}}')
    arrays: dict[str, Tensor] = {}
    for name, names in NAMES.items():
        present = [content[known] for known in names if isinstance(content.get(known), Tensor)]
        arrays |= {name: present[0]} if present else {}
    if len(arrays) < len(NAMES):
        raise RunError(_without([name for name in NAMES if name not in arrays], list(content)))
    for name, value in arrays.items():
        _check_tensor(name, value)
    _check_shapes(arrays[FEATURES].shape, arrays[COORDINATES].shape, width)
    return _content(arrays[FEATURES], arrays[COORDINATES], {n: content[n] for n in _ATTRIBUTES if n in content})


def _load(path: Path) -> Any:
    try:
        return load_tensors(path)
    except UnsafeFileError as error:
        raise RunError(
            f"it holds objects other than tensors ({error}), which are not loaded, as that would execute code from the "
            "file; save a dictionary of tensors"
        ) from error
    except ValueError as error:
        raise RunError(f"it cannot be read as tensors ({error}); copy it again, or {AGAIN}") from error


def _check_tensor(name: str, value: Tensor) -> None:
    try:
        check_dense(name, value)
    except ValueError as error:
        raise RunError(f"{error}; {AGAIN}") from error


def _read_numpy(path: Path, width: int | None) -> Content:
    return _beside(path, _arrays(path, (FEATURES,))[FEATURES], width)


def _beside(path: Path, features: Tensor, width: int | None) -> Content:
    """The content of a file of features alone, whose coordinates another file has, as slide2vec writes them."""
    _check_tensor(FEATURES, features)
    _check_features(features.shape, width)
    meta_file = _meta(path)
    if not meta_file.is_file():
        raise RunError(
            "it holds only features, and tile coordinates are needed too; pass the HDF5 file next to it (CLAM: "
            f'h5_files), or save {{"{FEATURES}": ..., "{COORDINATES}": ...}}'
        )
    attributes, coordinates_at = _recorded(path, meta_file)
    try:
        arrays = _arrays(coordinates_at, ("x", "y"))
    except RunError as error:
        raise RunError(f"of its coordinates {coordinates_at}: {error}") from error
    if arrays["x"].dim() != 1 or arrays["x"].shape != arrays["y"].shape:
        raise RunError(
            f"x and y of {coordinates_at} must be [tiles], got {list(arrays['x'].shape)} and {list(arrays['y'].shape)}"
        )
    coordinates = torch.stack((arrays["x"], arrays["y"]), dim=1)
    _check_shapes(features.shape, coordinates.shape, width)
    return _content(features, coordinates, attributes)


def companions(path: Path) -> list[Path]:
    """The other files that the tiles of slide2vec's file ``path`` are read from, as far as they are there."""
    meta_file = _meta(path)
    if path.suffix.lower() in HDF5 or not meta_file.is_file():
        return []
    try:
        return [meta_file, _recorded(path, meta_file)[1]]
    except RunError:  # for the reader, if it needs the file at all
        return [meta_file]


def _meta(path: Path) -> Path:
    return path.with_name(f"{path.stem}.meta.json")


def _recorded(path: Path, meta_file: Path) -> tuple[dict[str, Any], Path]:
    """What ``meta_file`` says of the tiles of ``path``, and the file of their coordinates."""
    try:
        attributes = json.loads(meta_file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise RunError(f"{meta_file.name} next to it cannot be read ({first_line(error)}); copy it again") from error
    if not isinstance(attributes, dict):
        raise RunError(
            f"{meta_file.name} next to it holds a {type(attributes).__name__}, expected what slide2vec writes"
        )
    recorded = attributes.get("coordinates_npz_path")
    places = [path.parent.parent / "tiles" / f"{path.stem}.coordinates.npz"]
    if isinstance(recorded, str) and recorded.isprintable():
        places.insert(0, Path(recorded))
    coordinates_at = next((place for place in places if place.is_file()), None)
    if coordinates_at is None:
        raise RunError(f"its coordinates are not there: expected {' or '.join(map(str, places))}; copy that file too")
    return attributes, coordinates_at


def _arrays(path: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Arrays of a file of ``numpy.savez``."""
    import numpy

    try:
        with zipfile.ZipFile(path) as archive:
            stored = {record.filename: record for record in archive.infolist()}
        missing = [name for name in names if f"{name}.npy" not in stored]
        if missing:
            raise RunError(_without(missing, [name.removesuffix(".npy") for name in stored]))
        for name in names:
            record = stored[f"{name}.npy"]
            _check_claim(name, record.file_size, record.compress_size)
            check_memory(2 * record.file_size, "cpu", what=f"reading its {name}", remedy="embed it elsewhere")
        with numpy.load(path, allow_pickle=False) as file:
            return {name: _tensor(name, file[name]) for name in names}
    except (
        OSError,
        EOFError,
        KeyError,
        ValueError,
        TypeError,
        RuntimeError,
        OverflowError,
        SyntaxError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise RunError(f"it cannot be read as NumPy arrays ({first_line(error)}); copy it again, or {AGAIN}") from error


def _check_features(shape: Sequence[int] | None, width: int | None) -> None:
    if shape is None or 0 in shape:
        raise RunError("it has no tiles: no tissue was found on the slide; check its segmentation")
    if len(shape) == 1:
        raise RunError(
            f"its {FEATURES} are one vector {list(shape)}, of a whole slide or of one tile whose axis was removed; "
            "pass a vector for every tile, [tiles, width]"
        )
    if len(shape) != 2 and not (len(shape) == 3 and shape[0] == 1):
        raise RunError(f"{FEATURES} must be [tiles, width] or [1, tiles, width], got {list(shape)}; {AGAIN}")
    if width is not None and shape[-1] != width:
        raise RunError(
            f"its features have width {shape[-1]:,}, and this encoder takes {width:,}: extract them with the tile "
            "encoder that it was trained with (GigaPath's gives 1,536)"
        )


def _check_shapes(features: Sequence[int] | None, coordinates: Sequence[int] | None, width: int | None) -> None:
    """Raise unless the shapes are those of features and coordinates of the same tiles."""
    _check_features(features, width)
    assert features is not None
    coordinates = (0, 2) if coordinates is None else coordinates  # an HDF5 dataset without numbers
    if tuple(coordinates) == (2,):
        raise RunError(
            f"its {COORDINATES} [2] are of one tile whose axis was removed (squeeze); save them as [1, 2], and the "
            f"{FEATURES} as [1, width]"
        )
    if len(coordinates) not in (2, 3) or coordinates[-1] != 2 or (len(coordinates) == 3 and coordinates[0] != 1):
        raise RunError(f"{COORDINATES} must be [tiles, 2] or [1, tiles, 2], got {list(coordinates)}; {AGAIN}")
    if features[-2] != coordinates[-2]:
        raise RunError(
            f"it has {features[-2]:,} rows of {FEATURES} and {coordinates[-2]:,} of {COORDINATES}; {AGAIN}, or wait if "
            "it is still being written"
        )


def _content(features: Tensor, coordinates: Tensor, attributes: Mapping[str, Any]) -> Content:
    """The checked content."""
    features, coordinates = (x.detach().reshape(x.shape[-2:]) for x in (features, coordinates))
    if features.dtype not in FLOATS:
        raise RunError(f"{FEATURES} must be floats of 16 to 64 bits, got {features.dtype}; {AGAIN}")
    broken, unwritten = [
        torch.cat([is_so(rows) for rows in features.split(4096)])
        for is_so in (lambda rows: ~rows.isfinite().all(dim=1), lambda rows: (rows == 0).all(dim=1))
    ]
    for which, words in ((broken, "not finite"), (unwritten, "all 0, as if they were never written")):
        if bool(which.any()):
            raise RunError(
                f"{FEATURES} of {int(which.sum()):,} of its {len(features):,} tiles are {words}, the first in row "
                f"{int(which.int().argmax()):,}; {AGAIN}"
            )
    if coordinates.is_complex() or coordinates.dtype == torch.bool:
        raise RunError(f"{COORDINATES} must be integers or floats in pixels, got {coordinates.dtype}; {AGAIN}")
    coordinates = coordinates.double() if coordinates.is_floating_point() else coordinates.long()
    if not bool((coordinates.abs() < _MOST_PIXELS).all()):
        raise RunError(f"{COORDINATES} are not finite or beyond any slide; {AGAIN}")
    return Content(features, coordinates, attributes)


def number(value: Any) -> float | None:
    """A finite number, or the first of a few about equal ones (CLAM stores one factor per axis); None otherwise."""
    if isinstance(value, Tensor):
        value = value.tolist() if value.numel() <= _SHOWN and value.layout == torch.strided else None
    values = value if isinstance(value, (list, tuple)) else [value]
    if not 0 < len(values) <= _SHOWN or not all(isinstance(one, (int, float)) for one in values):
        return None
    try:
        found = [float(one) for one in values]
    except OverflowError:
        return None
    is_one = all(math.isfinite(one) and math.isclose(one, found[0], rel_tol=0.01) for one in found)
    return found[0] if is_one else None


def text(value: Any) -> str | None:
    """A text, or None for anything else, or for the word None, which TRIDENT writes for it."""
    value = value.decode(errors="replace") if isinstance(value, bytes) else value
    return value.strip() if isinstance(value, str) and value.strip() not in ("", "None") else None


def _without(missing: list[str], present: Sequence[Any]) -> str:
    names = ", ".join(shortened(str(name), 40) for name in present[:_SHOWN])
    holds = f"it holds {names}" if present else "it is empty"
    return f"it has no {' and no '.join(missing)} ({holds}); pass files of tile features as TRIDENT or CLAM write them"
