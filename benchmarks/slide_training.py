"""A training step of the slide encoder on a large slide: peak memory in one process, and over ranks that share it.

    python -m benchmarks.slide_training [--tiles 45680] [--ranks 2] [--layers 12]

Forward and backward of an encoder of the released sizes in float32, with recomputed layers and without dropout, on
random features that all processes map from one file. The peak is that of the step: features, activations, gradients.
Ranks are processes of this machine that communicate over gloo and split the threads. The gate: the mean of the ranks'
gradients must equal the gradients of one process.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dilated_attention_pytorch.memory import peak_memory, resident, return_freed_blocks
from dilated_attention_pytorch.slides import SlideEncoder, SlideEncoderConfig
from dilated_attention_pytorch.slides.memory import measure_training_bytes

from .parallel import on_ranks
from .study import Study, run

TOLERANCE = 1e-4
"""Of a weight's gradient, relative to its largest value; float32."""
LEAST = 1e-3
"""Gradients smaller than this part of the largest, such as those of key biases, are compared with that part."""


@dataclass(frozen=True, kw_only=True)
class SlideTraining(Study):
    """Settings."""

    tiles: int = 45_680
    """Tiles of the slide; the default is the slide of prov-gigapath issue 12, which took 39.7 GB there."""
    ranks: int = 2
    """Processes that share the slide."""
    layers: int = 12
    """Layers of the encoder."""


def step(file: str, tiles: int, layers: int, threads: int) -> dict[str, Any]:
    """Forward and backward on this rank; rank 0 writes the mean gradients to ``FILE.WORLD``."""
    world, cpu = dist.get_world_size(), torch.device("cpu")
    torch.set_num_threads(max(1, threads // world))
    return_freed_blocks()
    mesh = init_device_mesh("cpu", (world,)) if world > 1 else None
    config = SlideEncoderConfig(num_layers=layers, dropout=0.0, drop_path=0.0)
    torch.manual_seed(0)
    encoder, target = SlideEncoder(config), torch.randn(config.embed_dim)
    shallow = SlideEncoder(replace(config, num_layers=1))
    planned = measure_training_bytes(encoder, cpu, "float32") if world == 1 else None

    def call(encoder: SlideEncoder, tiles: int) -> Tensor:
        encoder.gradient_checkpointing_enable()
        features = torch.from_file(file, size=tiles * config.feature_dim).view(1, tiles, config.feature_dim)
        side = config.grid_size
        grid = torch.stack((torch.arange(tiles) // side, torch.arange(tiles) % side), dim=-1)
        loss = (encoder(features, grid[None], tile_size=1, mesh=mesh).embedding @ target).mean()
        loss.backward()
        return loss.detach()

    call(shallow, min(tiles, 256))  # one-time allocations
    start = time.perf_counter()
    measured = peak_memory(lambda: call(encoder, tiles), cpu)
    seconds, whole = time.perf_counter() - start, resident("VmHWM")
    assert measured is not None
    for weight in encoder.parameters():
        assert weight.grad is not None
        dist.all_reduce(weight.grad)
        weight.grad /= world
    if dist.get_rank() == 0:
        torch.save({name: weight.grad for name, weight in encoder.named_parameters()}, f"{file}.{world}")
    return {
        "seconds": seconds,
        "peak_bytes": measured[0],
        "process_bytes": whole,
        "loss": float(measured[1]),
        # The weights' gradients, a third of what is fixed, are of the step; Adam's moments are not.
        "planned_bytes": None if planned is None else planned.tile_bytes * tiles + planned.fixed_bytes // 3,
    }


def measure(given: SlideTraining) -> dict[str, Any]:
    """The step in one process, then over the ranks.

    Raises:
        SystemExit: gradients differ by more than rounding explains.
    """
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/features"
        with Path(file).open("wb") as features:
            for _ in range(given.tiles):
                features.write(torch.randn(SlideEncoderConfig().feature_dim).numpy().tobytes())
        (alone,) = on_ranks(1, step, file, given.tiles, given.layers, threads)
        print(alone, flush=True)
        of_ranks = on_ranks(given.ranks, step, file, given.tiles, given.layers, threads)
        print(of_ranks, flush=True)
        expected, found = (torch.load(f"{file}.{world}") for world in (1, given.ranks))
    sizes = {name: float(gradient.abs().max()) for name, gradient in expected.items()}
    differences = {
        name: float((found[name] - want).abs().max()) / max(sizes[name], LEAST * max(sizes.values()))
        for name, want in expected.items()
    }
    worst = max(differences, key=differences.__getitem__)
    if not differences[worst] < TOLERANCE:
        raise SystemExit(f"not published: the gradient of {worst} differs by {differences[worst]:.1e}")
    return {
        "layers": given.layers,
        "dtype": "float32",
        "tiles": given.tiles,
        "one_process": alone,
        "ranks": of_ranks,
        "share": max(one["peak_bytes"] for one in of_ranks) / alone["peak_bytes"],
        "largest_gradient_difference": differences[worst],
    }


if __name__ == "__main__":
    tiny = {"tiles": 700, "layers": 1}
    run(SlideTraining, measure, text=__doc__, name="slide_training", group="slide training", tiny=tiny)
