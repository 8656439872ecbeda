"""Tile features are read as TRIDENT, CLAM and torch.save write them; what is broken says what and what to do."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import warnings
import zipfile
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
        ({**CLAM, "custom_downsample": 2}, 1024),
        ({"patch_size": 256, "patch_level": 0, "custom_downsample": 2}, 512),
        ({"patch_size": 256, "patch_level": 1, "custom_downsample": 2}, None),
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
    batch = (None,) if has_batch else ()
    torch.save({"features": features[batch], "coords": corners[batch], "patch_size_level0": SIZE}, tmp_path / "a.pt")
    slide = read_slide(tmp_path / "a.pt")
    assert torch.equal(slide.features, features)
    assert torch.equal(slide.coordinates, corners)
    assert slide.tile_size == SIZE


@pytest.mark.parametrize("attributes", [{"tile_size_um": 100.1, "tile_size_px": 224}, {"tile_size": 100.1}])
def test_the_micrometres_of_stamp_become_places_in_tiles(attributes: dict[str, Any], tmp_path: Path) -> None:
    features, corners = tiles_of(37, 0)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["feats"] = features.half()
        file["coords"] = (corners / SIZE * 100.1).float()
        file.attrs.update({**attributes, "unit": "um", "extractor": "gigapath"})
    slide = read_slide(tmp_path / "a.h5")
    assert torch.equal(slide.features, features.half())
    assert slide.tile_size == attributes.get("tile_size_px", 256)
    assert torch.equal(slide.coordinates // slide.tile_size, corners // SIZE)
    assert (slide.encoder, slide.spacing) == ("gigapath", slide.tile_size)
    assert slide.magnification == (pytest.approx(10 * 224 / 100.1) if "tile_size_px" in attributes else None)


def test_what_gigapath_computes_is_read_where_it_is_saved(tmp_path: Path) -> None:
    features, corners = tiles_of(7, 0)
    torch.save({"tile_embeds": features.half(), "coords": corners.float()}, tmp_path / "a.pt")
    slide = read_slide(tmp_path / "a.pt")
    assert torch.equal(slide.features, features.half())
    assert torch.equal(slide.coordinates, corners.double())
    assert slide.tile_size is slide.encoder is slide.magnification is None


@pytest.mark.parametrize("suffix", [".pt", ".npz"])
@pytest.mark.parametrize("is_moved", [False, True])
def test_the_files_of_slide2vec_are_read_together(is_moved: bool, suffix: str, tmp_path: Path) -> None:
    features, corners = tiles_of(7, 0)
    folder, tiles = tmp_path / "run" / "tile_embeddings", tmp_path / "run" / "tiles"
    folder.mkdir(parents=True)
    tiles.mkdir()
    if suffix == ".pt":
        torch.save(features.half(), folder / "a.pt")
    else:
        np.savez_compressed(folder / "a.npz", features=features.half().numpy(), tile_index=np.arange(7))
    x, y = corners.numpy().T
    np.savez_compressed(tiles / "a.coordinates.npz", x=x, y=y, tile_index=np.arange(7))
    told = {
        "encoder_name": "gigapath",
        "coordinates_npz_path": str(tiles / "a.coordinates.npz"),
        "tile_size_lv0": SIZE,
        "requested_spacing_um": 0.5,
    }
    (folder / "a.meta.json").write_text(json.dumps(told))
    if is_moved:
        folder = (tmp_path / "run").rename(tmp_path / "moved") / "tile_embeddings"
    slide = read_slide(folder / f"a{suffix}")
    assert torch.equal(slide.features, features.half())
    assert torch.equal(slide.coordinates, corners)
    assert (slide.tile_size, slide.encoder, slide.magnification) == (SIZE, "gigapath", 20.0)
    (folder.parent / "tiles" / "a.coordinates.npz").unlink()
    assert "its coordinates are not there: expected " in refusal(folder / f"a{suffix}")
    (folder / "a.meta.json").write_text("[")
    assert "a.meta.json next to it cannot be read (Expecting value" in refusal(folder / f"a{suffix}")


def test_what_a_file_says_of_its_encoder_magnification_and_overlap_is_read(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.h5", *tiles_of(7, 0), **TRIDENT, overlap=64)
    for name, encoder in (("uni_v2", "uni_v2"), (b"uni_v2", "uni_v2"), ("None", None), (7, None)):
        with h5py.File(path, "a") as file:
            file["features"].attrs["encoder"] = name
        slide = read_slide(path)
        assert (slide.encoder, slide.magnification, slide.overlap) == (encoder, 20.0, 0.25)


FEATURES, CORNERS = tiles_of(7, 0)


@pytest.mark.parametrize(
    "value",
    [
        *(h5py.Empty("f8"), h5py.Reference(), np.zeros(0), np.arange(9), np.array([b"x"]), np.array([np.nan]), "512"),
        *(np.array([(512, 1.0)], dtype="i4,f8"), np.longdouble("1e4000"), np.full((2, 2), 512), 1e300, -1, 1j),
    ],
)
def test_an_attribute_that_is_no_number_is_none_that_is_there(value: Any, tmp_path: Path) -> None:
    slide = read_slide(write_hdf5(tmp_path / "a.h5", *tiles_of(7, 0), patch_size_level0=value, encoder=value))
    assert slide.tile_size is None
    assert slide.encoder == (value if isinstance(value, str) else None)


def with_nan() -> Tensor:
    features = FEATURES.clone()
    features[3, 2] = float("nan")
    features[5, 0] = float("inf")
    return features


def quantised() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch is about to remove them
        return torch.quantize_per_tensor(FEATURES, 0.1, 0, torch.qint8)


def nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a prototype
        return torch.nested.nested_tensor([FEATURES, FEATURES[:2]])


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
    ("a.h5", {"features": CORNERS, "coords": CORNERS}, "features must be floats of 16 to 64 bits, got torch.int64"),
    ("a.h5", {"features": FEATURES, "coords": FEATURES}, "coords must be [tiles, 2] or [1, tiles, 2], got [7, 12]"),
    (
        "a.h5",
        {"features": FEATURES[0], "coords": CORNERS},
        "its features are one vector [12], of a whole slide or of one tile whose axis was",
    ),
    ("a.h5", {"features": torch.stack((FEATURES, FEATURES)), "coords": CORNERS}, "got [2, 7, 12]"),
    ("a.h5", "folder", "it is a folder, expected a file"),
    (
        "a.h5",
        {"features": np.array([b"a", b"b"]), "coords": CORNERS},
        "features must hold numbers of at most 64 bits, got |S1",
    ),
    ("a.h5", "endless", "of memory, and"),
    ("a.pt", b"slide" * 999, "it cannot be read as tensors (it is not a file of torch.save, or it is damaged)"),
    ("a.pt", pickle.dumps({"path": Path("a")}), "it cannot be read as tensors (it is not a file of torch.save, or it"),
    ("a.pt", "cut", "it cannot be read as tensors"),
    ("a.pt", FEATURES, "it holds only features, and tile coordinates are needed too; pass the HDF5 file next to it"),
    ("a.pt", [FEATURES], "it holds a list, expected"),
    ("a.pt", {"features": FEATURES, "path": Path("a")}, "it holds objects other than tensors (an object pathlib."),
    ("a.pt", {"features": FEATURES, "coords": 3}, "it has no coords (it holds features, coords)"),
    ("a.h5", {"features": np.zeros((0,), np.float32), "coords": CORNERS[:0]}, "it has no tiles: no tissue was found"),
    ("a.h5", {"features": FEATURES[:1], "coords": CORNERS[0]}, "coords [2] are of one tile whose axis was removed"),
    ("a.h5", {"features": h5py.Empty("f4"), "coords": CORNERS}, "it has no tiles"),
    ("a.h5", {"features": FEATURES, "coords": h5py.Empty("i4")}, "7 rows of features and 0 of coords"),
    (
        "a.h5",
        {"features": FEATURES * 0, "coords": CORNERS},
        "of 7 of its 7 tiles are all 0, as if they were never writ",
    ),
    ("a.h5", {"features": FEATURES.numpy().astype(np.longdouble), "coords": CORNERS}, "at most 64 bits, got float128"),
    ("a.h5", {"features": FEATURES, "coords": CORNERS * float("nan")}, "coords are not finite or beyond any slide"),
    ("a.h5", {"features": FEATURES, "coords": CORNERS * 1e300}, "coords are not finite or beyond any slide"),
    ("a.h5", {"features": FEATURES, "coords": CORNERS * 0 + 5}, "its 7 tiles all lie at one place, [5, 5]"),
    ("a.h5", {"features": FEATURES.repeat(2, 1), "coords": CORNERS.repeat(2, 1)}, "7 of its 14 tiles lie at the place"),
    (
        "a.h5",
        {"features": h5py.ExternalLink("b.h5", "features"), "coords": CORNERS},
        "its features are a link, to another place or file",
    ),
    ("a.h5", "claims", "of its features claim to be"),
    ("a.h5", "written", "another program is writing it ([Errno 11] Unable to synchronously open file"),
    ("a.h5", "pipe", "it is a pipe or a device, expected a file"),
    ("a.h5", "device", "it is a pipe or a device, expected a file"),
    (
        "a.pt",
        {"features": FEATURES.to(torch.float8_e4m3fn), "coords": CORNERS},
        "16 to 64 bits, got torch.float8_e4m3f",
    ),
    (
        "a.pt",
        {"features": FEATURES.to_sparse(), "coords": CORNERS},
        "must be a dense tensor, got one that is sparse_coo",
    ),
    (
        "a.pt",
        {"features": quantised(), "coords": CORNERS},
        "is quantised t",
    ),
    ("a.pt", {"features": nested(), "coords": CORNERS}, "must be a dense tensor, got one that is nested"),
    ("a.pt", {"features": FEATURES > 0, "coords": CORNERS}, "features must be floats of 16 to 64 bits, got torch.bool"),
    ("a.pt", {"features": [FEATURES], "coords": CORNERS}, "it has no features (it holds features, coords)"),
    ("a.h5", "group", "it has no features (it holds coords, features)"),
    ("a.pt", {"features": torch.empty(7, 12, device="meta"), "coords": CORNERS}, "one that is meta, without numbers"),
    ("a.pt", {"features": torch.ones(1, 1).expand(10**9, 12), "coords": CORNERS}, "expanded from 4 bytes"),
    (
        "a.pt",
        {"features": FEATURES, "coords": CORNERS * 1j},
        "coords must be integers or floats in pixels, got torch.c",
    ),
    ("a.pt", "claims", "its records are compressed, and torch.save compresses none"),
    ("a.npz", b"slide" * 99, "it cannot be read as NumPy arrays (File is not a zip file)"),
    ("a.npz", {"x": FEATURES.numpy()}, "it has no features (it holds x)"),
    (
        "a.npz",
        {"features": FEATURES.numpy().astype(object)},
        "it cannot be read as NumPy arrays (Object arrays cannot be",
    ),
    ("a.npz", {"features": np.zeros((10**6, 30), np.float32)}, "of its features claim to be"),
    ("a.npz", {"features": FEATURES.numpy()}, "it holds only features, and tile coordinates are needed too"),
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
            file.create_dataset("coords", shape=(10**12, 2), dtype="i4", chunks=(1, 2))
    elif isinstance(content, str) and content == "group":
        with h5py.File(path, "w") as file:
            file.create_group("features")
            file["coords"] = CORNERS
    elif isinstance(content, str) and content == "pipe":
        os.mkfifo(path)
    elif isinstance(content, str) and content == "device":
        path.symlink_to("/dev/zero")
    elif isinstance(content, str) and content == "claims" and path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            file.create_dataset("features", shape=(2 * 10**6, WIDTH), dtype="f4", chunks=(10**5, WIDTH), compression=9)
            file["features"][:10] = 1.0
            file.create_dataset("coords", shape=(2 * 10**6, 2), dtype="i4", chunks=(10**5, 2))
    elif isinstance(content, str) and content == "claims":
        torch.save(whole, path)
        with zipfile.ZipFile(path) as stored, zipfile.ZipFile(f"{path}.z", "w", zipfile.ZIP_DEFLATED) as packed:
            for name in stored.namelist():
                packed.writestr(name, stored.read(name))
        Path(f"{path}.z").replace(path)
    elif path.suffix == ".npz":
        np.savez_compressed(path, **content)
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
    if content == "written":
        writer = "import h5py, sys\nwith h5py.File(sys.argv[1], 'w'): print('open', flush=True); sys.stdin.read()"
        command = [sys.executable, "-c", writer, str(tmp_path / name)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            refused = refusal(tmp_path / name)
            process.communicate("")
    else:
        write_broken(tmp_path / name, content)
        refused = refusal(tmp_path / name)
    assert message in refused


def refusal(path: Path) -> str:
    with pytest.raises(RunError) as raised:
        read_slide(path)
    return str(raised.value)


def test_files_and_folders_are_found_by_the_name_of_the_slide_and_once(tmp_path: Path) -> None:
    for name in ("b.h5", "a.pt", "c.hdf5", "E.H5", "f.Pt", "notes.txt", ".hidden.h5"):
        (tmp_path / name).touch()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "d.h5").touch()
    found = find_slides([tmp_path / "c.hdf5", tmp_path, tmp_path / "a.pt", tmp_path / "deep" / "d.h5"])
    assert list(found) == ["c", "E", "a", "b", "f", "d"]
    assert list(find_slides([tmp_path / "E.H5"])) == ["E"]
    (tmp_path / "b.npz").touch()
    (tmp_path / "g.npz").touch()
    assert [file.name for file in find_slides([tmp_path]).values()] == [
        "E.H5",
        "a.pt",
        "b.h5",
        "c.hdf5",
        "f.Pt",
        "g.npz",
    ]
    (tmp_path / "deep" / "a.h5").symlink_to("nothing.h5")
    for paths, message in (
        ([tmp_path, tmp_path / "deep"], "both belong to a slide a, so their embeddings would be one file"),
        ([tmp_path / "e.h5"], "e.h5 does not exist; pass files of tile features (.h5, .hdf5, .pt, .npz)"),
        ([tmp_path / "notes.txt"], "is not a file of tile features: its name must end in .h5, .hdf5, .pt, .npz"),
        (
            [tmp_path / "deep" / "empty"],
            "holds no .h5, .hdf5, .pt, .npz file; pass the folder that holds them directly",
        ),
    ):
        (tmp_path / "deep" / "empty").mkdir(exist_ok=True)
        with pytest.raises(RunError) as raised:
            find_slides(paths)
        assert message in str(raised.value)
