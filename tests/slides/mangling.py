"""Slides and checkpoints mangled at random: each is embedded as it is, or refused in a sentence; nothing hangs or ends.

A trial mangles one whole file and embeds it beside a whole slide, or loads it as a checkpoint.
What must be refused and was not is a wrong result, and so is another embedding of the whole slide.
"""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import sys
import tempfile
import traceback
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
from dilated_attention_pytorch.slides import Embedder, EmbedSettings, load_slide_encoder, worker
from dilated_attention_pytorch.slides.memory import TileLimits
from slides.made_slides import SIZE, WIDTH, checkpoint, tiles_of, write_hdf5

_SECONDS = 60
Values = dict[str, Any]


def _odd_number(draw: random.Random) -> Any:
    return draw.choice(
        [10**400, -1, 0, 1e300, float("nan"), float("inf"), "512", b"512", [], [512, 256], [[512]], True, 1j, 2**63]
    )


def _odd_attribute(draw: random.Random) -> Any:
    """A value that only an attribute of HDF5 can have."""
    return draw.choice(
        [
            h5py.Empty("f8"),
            h5py.Empty("S4"),
            h5py.Reference(),
            np.longdouble("1e4000"),
            np.float16(512),
            np.bool_(True),
            np.zeros(0),
            np.arange(9.0),
            np.full((2, 2), 512),
            np.full(7, np.nan),
            np.array([b"512", b"x"]),
            np.array([(512, 1.0)], dtype="i4,f8"),
            np.array(2**64 - 1, dtype="u8"),
        ]
    )


def _odd_tensor(draw: random.Random, like: Tensor) -> Any:
    float8 = [torch.float8_e4m3fn, torch.float8_e5m2]
    return draw.choice(
        [
            lambda: like.float().to_sparse(),
            lambda: like.float().to_sparse_csr(),
            lambda: like.to("meta"),
            lambda: like.float().to(draw.choice(float8)),
            lambda: like.float() * 1j,
            lambda: like.bool(),
            lambda: like.new_ones(1, 1).expand(10**11, like.shape[-1]),
            lambda: like[:, :0],
            lambda: like[:0],
            lambda: like[0, 1:],
            lambda: like[None, None],
            lambda: torch.nested.nested_tensor([like.float(), like.float()[:2]]),
            lambda: None,
            lambda: [like],
            lambda: {"a": like},
            lambda: "text",
        ]
    )()


def _bytes_changed(path: Path, draw: random.Random) -> bool:
    """Cut a file, flip bits, or write other bytes into it; whether it must be refused."""
    whole = bytearray(path.read_bytes())
    way = draw.randrange(5)
    if way == 0:
        path.write_bytes(whole[: draw.randrange(len(whole))])
        return True
    if way == 1:
        path.write_bytes(whole + bytes(draw.randrange(1, 9999)))
        return False
    if way == 2:
        path.write_bytes(bytes(draw.randrange(256) for _ in range(draw.randrange(3000))))
        return True
    first = draw.choice([96, 800, 4000, len(whole)])  # most of what a format says stands at its beginning
    for _ in range(draw.choice([1, 1, 3, 30])):
        place = draw.randrange(min(first, len(whole)))
        whole[place] = draw.choice([whole[place] ^ (1 << draw.randrange(8)), 0, 255])
    path.write_bytes(whole)
    return False


def _write(path: Path, content: Values, attributes: Values) -> None:
    if path.suffix == ".pt":
        torch.save({**content, **attributes}, path)
    elif path.suffix == ".npz":
        np.savez_compressed(path, features=content["features"])
        x, y = np.asarray(content["coords"]).T
        (path.parent.parent / "tiles").mkdir(exist_ok=True)
        np.savez_compressed(path.parent.parent / "tiles" / f"{path.stem}.coordinates.npz", x=x, y=y)
        told = {"tile_size_lv0": SIZE, "encoder_name": "gigapath"}
        path.with_name(f"{path.stem}.meta.json").write_text(json.dumps(told))
    else:
        write_hdf5(path, content["features"], content["coords"], **attributes)


def mangle_slide(path: Path, draw: random.Random) -> bool:
    """Write a mangled slide; whether it must be refused."""
    features, corners = tiles_of(draw.choice([1, 2, 9, 40]), draw.randrange(2**31))
    content, attributes = {"features": features, "coords": corners}, {"patch_size_level0": SIZE}
    way = draw.randrange(9)
    if way <= 2 or path.suffix == ".npz":
        _write(path, content, attributes)
        beside = path.with_name(f"{path.stem}.meta.json")
        return _bytes_changed(beside if path.suffix == ".npz" and draw.random() < 0.3 else path, draw)
    name = draw.choice(["features", "coords"])
    if way == 3 and path.suffix == ".pt":
        content[name] = _odd_tensor(draw, content[name])
    elif way == 3:
        number = draw.choice([np.longdouble, np.complex64, np.bool_, "S4", np.float16, np.uint8])
        content[name] = content[name].numpy().astype(number)
        _write(path, content, attributes)
        return number not in (np.float16, np.uint8)
    elif way == 4:
        value = draw.choice([float("nan"), float("inf"), -1e30, 3.4e38, 1e308])
        content[name] = content[name].double()
        content[name][draw.randrange(len(features)), 0] = value
    elif way == 5:
        content[name] = content[name] * 0
        _write(path, content, attributes)
        return name == "features" or len(features) > 1
    elif way == 6:
        told = draw.choice(["patch_size_level0", "downsample", "tile_size_um", "encoder", "target_magnification"])
        value = _odd_number(draw)
        if path.suffix != ".pt" and (isinstance(value, list) or value == 10**400 or draw.random() < 0.5):
            value = _odd_attribute(draw)
        _write(path, content, {**attributes, told: value})
        return False
    elif way == 7:
        _write(path, content, {**attributes, **draw.choice([{"encoder": "uni_v2"}, {"target_magnification": 5}])})
        return True
    else:
        return _odd_file(path, content, draw)
    _write(path, content, attributes)
    return True


def _odd_file(path: Path, content: Values, draw: random.Random) -> bool:
    """A file that is none, or one of another structure."""
    way = draw.randrange(8) if path.suffix == ".h5" else draw.randrange(4)
    if way == 0:
        os.mkfifo(path)
    elif way == 1:
        path.mkdir()
    elif way == 2:
        path.symlink_to(draw.choice(["nothing", "/dev/zero", str(path)]))
    elif path.suffix == ".pt":
        torch.save(draw.choice([content["features"], [1], None, {1: 2}, {"tile_embeds": content["features"]}]), path)
    else:
        with h5py.File(path, "w") as file:
            if way == 3:
                file["features"] = h5py.Empty("f4")
            elif way == 4:
                file["features"] = h5py.SoftLink("/features")
            elif way == 5:
                file["features"] = h5py.ExternalLink(draw.choice(["x.h5", path.name, "/dev/zero"]), "features")
            elif way == 6:
                file.create_group("features")
            else:
                shape = (draw.choice([10**7, 10**12]), WIDTH)
                file.create_dataset("features", shape=shape, dtype="f4", chunks=(10**4, WIDTH), compression=9)
            file["coords"] = content["coords"]
    return True


def mangle_checkpoint(path: Path, whole: dict[str, Tensor], draw: random.Random) -> bool:
    """Write a mangled checkpoint; whether it must be refused."""
    content: dict[Any, Any] = dict(whole)
    name = draw.choice(list(content))
    way = draw.randrange(9)
    if way <= 2:
        torch.save({"model": content}, path)
        return _bytes_changed(path, draw)
    if way == 3:
        content[name] = _odd_tensor(draw, content[name].reshape(-1, content[name].shape[-1]))
    elif way == 4:
        content[name] = draw.choice([content[name][:-1], content[name] * float("nan"), content[name].long()])
    elif way == 5:
        del content[name]
    elif way == 6:
        layer = draw.choice([7, 20_000, 10**8, 10**30, -1, "x", "9" * 5000])
        content[f"encoder.layers.{layer}.ffn.fc1.weight"] = content[name]
    elif way == 7:
        content[draw.choice([7, None, (1, 2), b"a", "a\nb", "x" * 10**5, "\udcff"])] = content[name]
    else:
        side = draw.choice([1, 3, 10**5])
        width = content["cls_token"].shape[-1]
        table = torch.zeros(1, 1, width).expand(1, side**2 + draw.choice([0, 1]), width)
        content["pos_embed"] = table if side > 3 else table.clone() + 0.5
    torch.save(draw.choice([content, {"model": content}]), path)
    if draw.random() < 0.1 and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as stored, zipfile.ZipFile(path.with_suffix(".z"), "w", zipfile.ZIP_DEFLATED) as new:
            for record in stored.namelist():
                new.writestr(record, stored.read(record))
        path.with_suffix(".z").replace(path)
    return True


def run_batch(seed: int, number: int) -> collections.Counter[str]:
    """Run some trials in this process; counts what happened, and prints what should not have."""
    draw, counts = random.Random(seed), collections.Counter[str]()
    limits = TileLimits(tile_bytes=10**4, of_batch=10**5, of_slide=10**6)
    with (
        warnings.catch_warnings(action="ignore"),  # of odd tensors, when they are made
        pytest.MonkeyPatch.context() as monkeypatch,
        tempfile.TemporaryDirectory() as name,
    ):
        monkeypatch.setattr(worker, "measure_limits", lambda *_, **__: limits)
        folder = Path(name)
        weights = checkpoint(folder)
        whole = torch.load(weights, weights_only=True)["model"]
        good = write_hdf5(folder / "good.h5", *tiles_of(9, 1), patch_size_level0=SIZE)
        encoder, result = load_slide_encoder(weights), None
        for trial in range(number):
            signal.alarm(_SECONDS)
            place = folder / str(trial) / "tile_embeddings"
            place.mkdir(parents=True)
            way = draw.choice([".h5", ".h5", ".pt", ".npz", "checkpoint"])
            try:
                if way == "checkpoint":
                    path = place / "weights.pth"
                    must_fail = mangle_checkpoint(path, whole, draw)
                    outcome = _loaded(path, encoder)
                else:
                    path = place / f"slide{way}"
                    must_fail = mangle_slide(path, draw)
                    told = Embedder([path], weights, place / "out", EmbedSettings()) if not path.is_dir() else None
                    outcome = "refused: it is a folder"
                    if told is not None:
                        told.inputs["good"] = (good,)
                        outcome, result = _embedded(told, path, place / "out", result)
            except RunError as error:
                outcome = f"refused: {error}"
            except Exception:  # noqa: BLE001 - that there is none is what is counted
                traceback.print_exc()
                outcome = "traceback"
            if outcome == "taken" and must_fail:
                outcome = "wrong"
            if "\n" in outcome or len(outcome) > 1500:
                outcome = f"no sentence: {outcome[:200]!r}"
            kind = outcome.partition(":")[0]
            counts[f"{way} {kind}"] += 1
            if kind not in ("taken", "refused"):
                print(f"seed {seed}, trial {trial}, {way}: {outcome}", file=sys.stderr)
    signal.alarm(0)
    return counts


def _loaded(path: Path, like: torch.nn.Module) -> str:
    try:
        found = load_slide_encoder(path)
    except (ValueError, FileNotFoundError) as error:
        return f"refused: {error}"
    finite = all(bool(value.isfinite().all()) for value in found.state_dict().values())
    return "taken" if finite and found.state_dict().keys() == like.state_dict().keys() else "wrong"


def _embedded(embedder: Embedder, path: Path, out: Path, result: Tensor | None) -> tuple[str, Tensor | None]:
    outcome = embedder.run()
    with h5py.File(out / "good.h5") as file:
        embedding = torch.from_numpy(file["embedding"][()])
    if result is not None and not torch.allclose(result, embedding, rtol=0, atol=1e-5):
        return "wrong", result
    if path in outcome.failed:
        return f"refused: {outcome.failed[path]}", embedding
    with h5py.File(out / f"{path.stem}.h5") as file:
        finite = bool(torch.from_numpy(file["layers"][()]).isfinite().all())
    return "taken" if finite else "wrong", embedding
