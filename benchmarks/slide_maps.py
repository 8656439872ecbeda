"""Embedding with and without attention maps of all layers and heads, and the error of bfloat16 by layer.

    python -m benchmarks.slide_maps [--tiles 20000 100000] [--only maps bfloat16]

Maps: the command on one synthetic slide of each size, with and without --maps, each in a process of its own; seconds
and peak memory include imports and the measurement of memory. Error: largest difference of a layer's state under
bfloat16 from that in float32, over the standard deviation of the state. The encoder has the released sizes and random
weights.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dilated_attention_pytorch.slides import SlideEncoder, SlideEncoderConfig
from dilated_attention_pytorch.training.autocast import autocast

from .slides import make_slides
from .study import Study, run, seconds

Part = Literal["maps", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class SlideMaps(Study):
    """Settings."""

    only: tuple[Part, ...] = ("maps", "bfloat16")
    """What to measure."""
    tiles: tuple[int, ...] = (20_000, 100_000)
    """Tiles of the slides that are embedded."""
    rounded_tiles: int = 5000
    """Tiles of the slide that is computed in bfloat16."""
    layers: int = 12
    """Layers of the encoder."""


def embed(features: Path, checkpoint: Path, output: Path, *options: str) -> dict[str, Any]:
    """Run the command in a process of its own."""
    command = f"-m dilated_attention_pytorch embed {features} --checkpoint {checkpoint} --output {output}"
    words = [sys.executable, *command.split(), "--threads", str(torch.get_num_threads()), *options]
    begun = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    taken = time.perf_counter() - begun
    if process.returncode:
        raise SystemExit(f"not published: exit code {process.returncode} of {' '.join(words)}")
    return {"seconds": taken, "peak_bytes": usage.ru_maxrss * 1024}


def maps(given: SlideMaps) -> list[dict[str, Any]]:
    """Each slide without and with maps.

    Raises:
        SystemExit: the command failed, or embeddings differ by more than rounding explains.
    """
    import h5py

    points = []
    for tiles in given.tiles:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint, features = Path(folder) / "slide_encoder.pth", Path(folder) / "features"
            torch.save({"model": SlideEncoder(SlideEncoderConfig(num_layers=given.layers)).state_dict()}, checkpoint)
            (name,) = make_slides(features, 1, tiles, tiles)
            outputs = [Path(folder) / "plain", Path(folder) / "mapped"]
            plain = embed(features, checkpoint, outputs[0])
            mapped = embed(features, checkpoint, outputs[1], "--maps")
            vectors = [torch.from_numpy(h5py.File(output / f"{name}.h5")["embedding"][()]) for output in outputs]
            torch.testing.assert_close(vectors[0], vectors[1])
        point = {
            "tiles": tiles,
            "plain": plain,
            "maps": mapped,
            "seconds_ratio": mapped["seconds"] / plain["seconds"],
            "more_bytes": mapped["peak_bytes"] - plain["peak_bytes"],
        }
        print(point, flush=True)
        points.append(point)
    return points


@torch.no_grad()
def rounded(given: SlideMaps) -> dict[str, Any]:
    """Seconds of both precisions, and the error of bfloat16 by layer, 0 to the number of layers."""
    encoder = SlideEncoder(SlideEncoderConfig(num_layers=given.layers)).eval()
    features = torch.randn(1, given.rounded_tiles, encoder.config.feature_dim)
    cells = torch.randperm(encoder.config.grid_size**2)[: given.rounded_tiles].sort().values
    grid = torch.stack((cells // encoder.config.grid_size, cells % encoder.config.grid_size), dim=-1)[None]
    states: list[Tensor] = []
    encoder.encoder.layers[0].register_forward_pre_hook(lambda module, inputs: states.append(inputs[0]))
    for layer in encoder.encoder.layers:
        layer.register_forward_hook(lambda module, inputs, output: states.append(output))
    taken, found = {}, {}
    for precision in ("float32", "bfloat16"):
        states.clear()
        with autocast(precision, "cpu"):
            taken[precision] = seconds(lambda: encoder(features, grid, tile_size=1))
        found[precision] = [*states]
    errors = [float((low.float() - full).abs().max() / full.std()) for full, low in zip(*found.values(), strict=True)]
    result = {"tiles": given.rounded_tiles, "seconds": taken, "errors": errors}
    print(result, flush=True)
    return result


def measure(given: SlideMaps) -> dict[str, Any]:
    """The parts that are asked for."""
    parts = {"maps": maps, "bfloat16": rounded}
    return {"layers": given.layers, **{name: parts[name](given) for name in given.only}}


if __name__ == "__main__":
    tiny = {"tiles": (300,), "rounded_tiles": 300, "layers": 2}
    run(SlideMaps, measure, text=__doc__, name="slide_maps", group="slides", tiny=tiny)
