"""Slides and checkpoints with bytes changed at random are embedded, or refused in a sentence; nothing hangs or ends.

A trial changes one whole file and embeds it beside a whole slide, or loads it as a checkpoint. What must be refused and
was not is a wrong result, and so is another embedding of the whole slide. Files of other contents, each of a kind, are
in ``test_files`` and ``test_encoder``.
"""

from __future__ import annotations

import collections
import json
import random
import signal
import sys
import tempfile
import traceback
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.slides import Embedder, EmbedSettings, load_slide_encoder, worker
from dilated_attention_pytorch.slides.memory import TileLimits
from slides.made_slides import SIZE, checkpoint, tiles_of, write_hdf5

_SECONDS = 60


def change_bytes(path: Path, draw: random.Random) -> bool:
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


def write_slide(path: Path, draw: random.Random) -> list[Path]:
    """Write a whole slide; returns the files that are read."""
    features, corners = tiles_of(draw.choice([1, 2, 9, 40]), draw.randrange(2**31))
    if path.suffix == ".pt":
        torch.save({"features": features, "coords": corners, "patch_size_level0": SIZE}, path)
    elif path.suffix == ".h5":
        write_hdf5(path, features, corners, patch_size_level0=SIZE)
    else:
        np.savez_compressed(path, features=features)
        (path.parent.parent / "tiles").mkdir()
        x, y = corners.numpy().T
        np.savez_compressed(path.parent.parent / "tiles" / f"{path.stem}.coordinates.npz", x=x, y=y)
        meta = path.with_name(f"{path.stem}.meta.json")
        meta.write_text(json.dumps({"tile_size_lv0": SIZE, "encoder_name": "gigapath"}))
        return [path, path, meta]
    return [path]


def run_batch(seed: int, number: int) -> collections.Counter[str]:
    """Run some trials in this process; counts what happened, and prints what should not have."""
    draw, counts = random.Random(seed), collections.Counter[str]()
    limits = TileLimits(tile_bytes=10**4, of_batch=10**5, of_slide=10**6)
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as name:
        monkeypatch.setattr(worker, "measure_limits", lambda *_, **__: limits)
        folder = Path(name)
        weights = checkpoint(folder)
        good = write_hdf5(folder / "good.h5", *tiles_of(9, 1), patch_size_level0=SIZE)
        expected: Tensor | None = None
        for trial in range(number):
            signal.alarm(_SECONDS)
            place = folder / str(trial) / "tile_embeddings"
            place.mkdir(parents=True)
            way = draw.choice([".h5", ".h5", ".pt", ".npz", "checkpoint"])
            try:
                if way == "checkpoint":
                    path = place / "weights.pth"
                    path.write_bytes(weights.read_bytes())
                    must_fail = change_bytes(path, draw)
                    outcome = load(path)
                else:
                    path = place / f"slide{way}"
                    must_fail = change_bytes(draw.choice(write_slide(path, draw)), draw)
                    embedder = Embedder([path], weights, place / "out", EmbedSettings())
                    embedder.inputs["good"] = (good,)
                    outcome, expected = embed(embedder, path, place / "out", expected)
            except (RunError, ValueError) as error:
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


def load(path: Path) -> str:
    encoder = load_slide_encoder(path)
    return "taken" if all(bool(value.isfinite().all()) for value in encoder.state_dict().values()) else "wrong"


def embed(embedder: Embedder, path: Path, out: Path, expected: Tensor | None) -> tuple[str, Tensor | None]:
    outcome = embedder.run()
    with h5py.File(out / "good.h5") as file:
        embedding = torch.from_numpy(file["embedding"][()])
    if expected is not None and not torch.allclose(expected, embedding, rtol=0, atol=1e-5):
        return "wrong", expected
    if path in outcome.failed:
        return f"refused: {outcome.failed[path]}", embedding
    with h5py.File(out / f"{path.stem}.h5") as file:
        finite = bool(torch.from_numpy(file["layers"][()]).isfinite().all())
    return "taken" if finite else "wrong", embedding
