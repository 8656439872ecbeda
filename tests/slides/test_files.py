"""Tile features are read as TRIDENT, CLAM and torch.save write them; what is broken says what and what to do."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.slides import read_slide
from dilated_attention_pytorch.slides.files import find_slides
from slides.made_slides import SIZE, WIDTH, tiles_of, write_hdf5

TRIDENT = {"patch_size": 256, "patch_size_level0": SIZE, "level0_magnification": 40, "target_magnification": 20}
CLAM = {"patch_size": 256, "patch_level": 1, "downsample": np.array([2.0, 2.0])}


@pytest.mark.parametrize("has_batch", [False, True])
@pytest.mark.parametrize(
    ("attributes", "tile_size"),
    [
        (TRIDENT, 512),
        (CLAM, 512),
        ({}, None),
        ({"patch_size": 256}, None),
        ({"patch_size_level0": [512, 256]}, None),
        ({"patch_size_level0": [512, 512]}, 512),
    ],
)
def test_hdf5_files_of_trident_and_clam_are_read(
    attributes: dict[str, Any], tile_size: int | None, has_batch: bool, tmp_path: Path
) -> None:
    features, corners = tiles_of(37, 0)
    path = write_hdf5(tmp_path / "a.h5", features, corners.int(), has_batch=has_batch, **attributes)
    slide = read_slide(path)
    assert torch.equal(slide.features, features)
    assert torch.equal(slide.coordinates.long(), corners)
    assert slide.tile_size == tile_size


def test_files_that_grew_by_chunks_in_half_precision_and_big_endian_are_read(tmp_path: Path) -> None:
    features, corners = tiles_of(37, 0)
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for name, data in (("features", features.half().numpy()), ("coords", corners.numpy().astype(">i8"))):
            dataset = file.create_dataset(name, data=data[:5], maxshape=(None, data.shape[1]), chunks=(5, 2))
            dataset.resize(37, axis=0)
            dataset[5:] = data[5:]
    slide = read_slide(tmp_path / "a.hdf5")
    assert torch.equal(slide.features, features.half())
    assert torch.equal(slide.coordinates, corners)


def test_an_ending_in_capitals_is_the_same_ending(tmp_path: Path) -> None:
    features, corners = tiles_of(7, 0)
    write_hdf5(tmp_path / "a.H5", features, corners)
    torch.save({"features": features, "coords": corners}, tmp_path / "b.PT")
    for name in ("a.H5", "b.PT"):
        assert torch.equal(read_slide(tmp_path / name).features, features)


@pytest.mark.parametrize("has_batch", [False, True])
def test_dictionaries_of_tensors_are_read(has_batch: bool, tmp_path: Path) -> None:
    features, corners = tiles_of(7, 0)
    content: dict[str, Any] = {"features": features, "coords": corners}
    if has_batch:
        content = {name: value[None] for name, value in content.items()}
    torch.save({**content, "patch_size_level0": SIZE}, tmp_path / "a.pt")
    slide = read_slide(tmp_path / "a.pt")
    assert torch.equal(slide.features, features)
    assert torch.equal(slide.coordinates, corners)
    assert slide.tile_size == SIZE


FEATURES, CORNERS = tiles_of(7, 0)


def with_nan() -> Tensor:
    features = FEATURES.clone()
    features[3, 2] = float("nan")
    features[5, 0] = float("inf")
    return features


BROKEN: list[tuple[str, Any, str]] = [
    ("a.h5", b"", "it cannot be read as HDF5"),
    ("a.h5", b"slide" * 999, "it cannot be read as HDF5"),
    ("a.h5", "cut", "it cannot be read as HDF5 (Unable to synchronously open file (truncated file"),
    ("a.h5", {}, "it has no features and no coords (it is empty); pass files of tile features as TRIDENT"),
    ("a.h5", {"coords": CORNERS, "x": CORNERS}, "it has no features (it holds coords, x)"),
    ("a.h5", {"features": FEATURES}, "it has no coords (it holds features)"),
    ("a.h5", {"features": FEATURES, "coords": CORNERS[:6]}, "it has 7 rows of features and 6 of coords; extract"),
    ("a.h5", {"features": FEATURES[:0], "coords": CORNERS[:0]}, "it has no tiles: no tissue was found on the slide"),
    ("a.h5", {"features": with_nan(), "coords": CORNERS}, "of 2 of its 7 tiles are not finite, the first in row 3"),
    ("a.h5", {"features": CORNERS, "coords": CORNERS}, "features must be floats, got torch.int64"),
    ("a.h5", {"features": FEATURES, "coords": FEATURES}, "coords must be [tiles, 2], got [7, 12]"),
    ("a.h5", {"features": FEATURES[0], "coords": CORNERS}, "must be [tiles, width] or [1, tiles, width], got [12]"),
    ("a.h5", {"features": torch.stack((FEATURES, FEATURES)), "coords": CORNERS}, "got [2, 7, 12]"),
    ("a.h5", "folder", "it cannot be opened: Is a directory"),
    ("a.h5", {"features": np.array([b"a", b"b"]), "coords": CORNERS}, "features must hold numbers, got |S1"),
    ("a.h5", "endless", "of memory, and"),
    ("a.pt", b"slide" * 999, "it cannot be read as tensors (it is no file of torch.save, or a damaged one)"),
    ("a.pt", pickle.dumps({"path": Path("a")}), "it cannot be read as tensors (it is no file of torch.save, or a"),
    ("a.pt", "cut", "it cannot be read as tensors"),
    ("a.pt", FEATURES, "it holds only features, and tile coordinates are needed too; pass the HDF5 file next to it"),
    ("a.pt", [FEATURES], "it holds a list, expected"),
    ("a.pt", {"features": FEATURES, "path": Path("a")}, "it holds objects other than tensors (an object pathlib."),
    ("a.pt", {"features": FEATURES, "coords": 3}, "it has no coords (it holds features, coords)"),
]


def write_broken(path: Path, content: Any) -> None:
    """A file that holds ``content``, or one that is "cut", or of "endless" features, or a "folder"."""
    whole = {"features": FEATURES.repeat(99, 1), "coords": CORNERS.repeat(99, 1)}
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str) and content == "folder":
        path.mkdir()
    elif isinstance(content, str) and content == "endless":
        with h5py.File(path, "w") as file:
            file.create_dataset("features", shape=(10**12, WIDTH), dtype="f4", chunks=(1, WIDTH))
            file["coords"] = CORNERS
    elif path.suffix == ".pt":
        torch.save(whole if isinstance(content, str) else content, path)
    else:
        with h5py.File(path, "w") as file:
            for name, value in (whole if isinstance(content, str) else content).items():
                file[name] = value
    if isinstance(content, str) and content == "cut":
        path.write_bytes(path.read_bytes()[:-2000])


@pytest.mark.parametrize(("name", "content", "message"), BROKEN, ids=lambda value: str(value)[:30])
def test_a_broken_file_says_what_is_wrong(name: str, content: Any, message: str, tmp_path: Path) -> None:
    write_broken(tmp_path / name, content)
    with pytest.raises(RunError) as raised:
        read_slide(tmp_path / name)
    assert message in str(raised.value)


def test_files_and_folders_are_found_by_the_name_of_the_slide_and_once(tmp_path: Path) -> None:
    for name in ("b.h5", "a.pt", "c.hdf5", "E.H5", "f.Pt", "notes.txt", ".hidden.h5"):
        (tmp_path / name).touch()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "d.h5").touch()
    found = find_slides([tmp_path / "c.hdf5", tmp_path, tmp_path / "a.pt", tmp_path / "deep" / "d.h5"])
    assert list(found) == ["c", "E", "a", "b", "f", "d"]
    assert list(find_slides([tmp_path / "E.H5"])) == ["E"]
    (tmp_path / "deep" / "a.h5").symlink_to("nothing.h5")
    for paths, message in (
        ([tmp_path, tmp_path / "deep"], "both belong to a slide a, so their embeddings would be one file"),
        ([tmp_path / "e.h5"], "e.h5 does not exist; pass files of tile features (.h5, .hdf5, .pt)"),
        ([tmp_path / "notes.txt"], "is not a file of tile features: its name must end in .h5, .hdf5, .pt"),
        ([tmp_path / "deep" / "empty"], "holds no .h5, .hdf5, .pt file; pass the folder that holds them directly"),
    ):
        (tmp_path / "deep" / "empty").mkdir(exist_ok=True)
        with pytest.raises(RunError) as raised:
            find_slides(paths)
        assert message in str(raised.value)
