"""Batch limits of a slide encoder from measured memory per tile."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from dilated_attention_pytorch.memory import free_memory, peak_memory
from dilated_attention_pytorch.training.autocast import autocast

from .encoder import SlideEncoder

_FEW, _MANY = 1024, 6144
_OF_FREE = 0.5
"""Fraction of free memory for a batch; the rest is for the next slide and for other processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TileLimits:
    """Tile limits of one encoder call."""

    tile_bytes: int
    """Peak bytes per tile of a call, without the weights."""
    of_batch: int
    """Most tiles per batch."""
    of_slide: int
    """Most tiles of a single slide."""


def measure_limits(
    encoder: SlideEncoder,
    device: torch.device,
    precision: str,
    batch_tiles: int,
    memory: float | None,
    *,
    keeps_calls: bool = False,
) -> TileLimits | None:
    """Measure the memory per tile and compute how many tiles fit.

    Runs one layer of the encoder's sizes on random slides of two lengths; the difference of the peaks gives the bytes
    per tile. Later layers reuse the memory of the first.

    Args:
        encoder: the encoder whose sizes are used.
        device, precision: as for the embedding run.
        batch_tiles: upper limit of tiles per batch.
        memory: memory limit of a call, in gigabytes; None = the free memory.
        keeps_calls: whether queries and keys of all layers stay in memory.

    Returns:
        the limits; None on a system that reports neither peak nor free memory.
    """
    shallow = SlideEncoder(dataclasses.replace(encoder.config, num_layers=1)).to(device).eval()

    def call(tiles: int) -> None:
        features = torch.randn(1, tiles, encoder.config.feature_dim, device=device)
        side = encoder.config.grid_size
        cells = torch.arange(tiles, device=device) % side**2
        grid = torch.stack((cells // side, cells % side), dim=-1)[None]
        with torch.inference_mode(), autocast(precision, device.type):
            shallow(features, grid, tile_size=1)

    call(_FEW)  # one-time allocations, such as compiled kernels
    peaks = []
    for tiles in (_FEW, _MANY):
        measured = peak_memory(lambda tiles=tiles: call(tiles), device)  # type: ignore[misc]
        if measured is None:
            return None
        peaks.append(measured[0])
    tile_bytes = max(1, (peaks[1] - peaks[0]) // (_MANY - _FEW), peaks[1] // _MANY)
    if keeps_calls:
        element = 4 if precision == "float32" else 2
        tile_bytes += 2 * element * encoder.config.num_layers * encoder.config.embed_dim
    try:
        free = free_memory(device)
    except NotImplementedError:
        if memory is None:
            return None
        free = 0
    budget, most = (int(memory * 10**9),) * 2 if memory is not None else (int(free * _OF_FREE), free)
    return TileLimits(
        tile_bytes=tile_bytes, of_batch=max(1, min(batch_tiles, budget // tile_bytes)), of_slide=most // tile_bytes
    )
