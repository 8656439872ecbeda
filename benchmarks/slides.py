"""Synthetic slides embedded from HDF5 by the command: tiles per second and peak memory.

    python -m benchmarks.slides [--slides 100] [--least 500] [--most 20000] [--precision float32]

Slides are files as TRIDENT writes them, with random features and different tiles; their sizes are log-uniform between
--least and --most. The encoder has the released sizes and random weights.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from dilated_attention_pytorch.slides import SlideEncoder, SlideEncoderConfig

from .study import Study, run

TILE_SIZE, SIDE = 512, 1000


@dataclass(frozen=True, kw_only=True)
class Slides(Study):
    """Settings."""

    slides: int = 100
    """Number of slides."""
    least: int = 500
    """Tiles of the smallest slide."""
    most: int = 20_000
    """Tiles of the largest slide."""
    layers: int = 12
    """Layers of the encoder."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """The command's --precision."""
    batch_tiles: int = 16_384
    """The command's --batch-tiles."""
    folder: Path | None = None
    """Where synthetic slides are stored during the run (6 kB a tile)."""


def make_slides(folder: Path, number: int, least: int, most: int) -> dict[str, int]:
    """Write slides; returns the number of tiles by slide."""
    import h5py

    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    sizes = {
        f"slide{index:04}": round(math.exp(draw.uniform(math.log(least), math.log(most)))) for index in range(number)
    }
    folder.mkdir()
    for name, tiles in sizes.items():
        places = torch.randperm(SIDE * SIDE, generator=generator)[:tiles].sort().values
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file["features"] = torch.randn(tiles, 1536, generator=generator).numpy()
            file["coords"] = (TILE_SIZE * torch.stack((places // SIDE, places % SIDE), dim=-1)).numpy()
            file["coords"].attrs["patch_size_level0"] = TILE_SIZE
    return sizes


def measure(given: Slides) -> dict[str, Any]:
    """Run the command in a process of its own; its time includes imports and the measurement of memory."""
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        features, out, checkpoint = Path(made) / "features", Path(made) / "out", Path(made) / "slide_encoder.pth"
        torch.save({"model": SlideEncoder(SlideEncoderConfig(num_layers=given.layers)).state_dict()}, checkpoint)
        sizes = make_slides(features, given.slides, given.least, given.most)
        command = f"-m dilated_attention_pytorch embed {features} --checkpoint {checkpoint} --output {out}"
        options = f"--precision {given.precision} --batch-tiles {given.batch_tiles} --threads {torch.get_num_threads()}"
        begun = time.perf_counter()
        process = subprocess.Popen([sys.executable, *command.split(), *options.split()], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - begun
        if process.returncode or {path.stem for path in out.glob("*.h5")} != sizes.keys():
            raise SystemExit(f"not published, because slides are missing (exit code {process.returncode})")
    results = {
        "layers": given.layers,
        "precision": given.precision,
        "slides": len(sizes),
        "tiles": sum(sizes.values()),
        "largest_slide": max(sizes.values()),
        "slides_a_minute": 60 * len(sizes) / seconds,
        "tiles_a_second": sum(sizes.values()) / seconds,
        "peak_bytes": usage.ru_maxrss * 1024,
    }
    print(results)
    return results


if __name__ == "__main__":
    tiny = {"slides": 12, "least": 20, "most": 60, "layers": 1}
    run(Slides, measure, text=__doc__, name="slides", group="slides", tiny=tiny)
