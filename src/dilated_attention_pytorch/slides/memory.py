"""Measured memory of a slide encoder: batch limits of embedding, bytes of a training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention_pytorch.memory import free_memory, peak_memory
from dilated_attention_pytorch.training.autocast import autocast

from .encoder import SlideEncoder
from .titan import TitanEncoder

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


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingBytes:
    """Memory of a training step with recomputed layers: ``fixed_bytes + tiles * tile_bytes``."""

    tile_bytes: int
    """Peak bytes per tile of forward and backward."""
    fixed_bytes: int
    """Bytes of the gradients and of Adam's two moments of every trained weight; the weights are not counted."""


def measure_limits(
    encoder: SlideEncoder | TitanEncoder,
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
    shallow: SlideEncoder | TitanEncoder
    if isinstance(encoder, SlideEncoder):
        shallow = SlideEncoder(dataclasses.replace(encoder.config, num_layers=1))
    else:
        shallow = TitanEncoder(dataclasses.replace(encoder.config, num_layers=1))
    shallow.to(device).eval()

    def call(features: Tensor, grid: Tensor) -> None:
        with torch.inference_mode(), autocast(precision, device.type):
            shallow(features, grid, tile_size=1)

    tile_bytes = _measure_tile_bytes(call, shallow, device)
    if tile_bytes is None:
        return None
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


def measure_training_bytes(encoder: SlideEncoder, device: torch.device, precision: str) -> TrainingBytes | None:
    """Measure the memory of a training step whose layers are recomputed (``gradient_checkpointing_enable``).

    Runs forward and backward of at most two layers of the encoder's sizes, in training mode, on random slides of two
    lengths; every further layer keeps only its input. On a CPU, call :func:`.memory.return_freed_blocks` first: what
    malloc keeps of freed blocks differs from one length to the next by a quarter of the total.

    Args:
        encoder: the encoder to train; weights that require no gradient need no gradient and no moments.
        device, precision: as for the training run.

    Returns:
        the bytes; None on a system that reports no peak memory.
    """
    config = encoder.config
    layers = min(2, config.num_layers)
    shallow = SlideEncoder(dataclasses.replace(config, num_layers=layers)).to(device).train()
    shallow.gradient_checkpointing_enable()

    def call(features: Tensor, grid: Tensor) -> None:
        with autocast(precision, device.type):
            loss = shallow(features, grid, tile_size=1).layers.float().sum()
        loss.backward()

    tile_bytes = _measure_tile_bytes(call, shallow, device)
    if tile_bytes is None:
        return None
    # Autocast leaves the sum of the branches, each layer's input, in float32.
    inputs = (config.num_layers - layers) * config.embed_dim * shallow.cls_token.element_size()
    trained = sum(weight.nbytes for weight in encoder.parameters() if weight.requires_grad)
    return TrainingBytes(tile_bytes=tile_bytes + inputs, fixed_bytes=3 * trained)


def _measure_tile_bytes(
    call: Callable[[Tensor, Tensor], object], encoder: SlideEncoder | TitanEncoder, device: torch.device
) -> int | None:
    """Peak bytes per tile of ``call(features [1, N, C], grid cells [1, N, 2])``; None if no peak is reported."""

    def on_slide(tiles: int) -> None:
        side = encoder.config.grid_size if isinstance(encoder, SlideEncoder) else _MANY
        cells = torch.arange(tiles, device=device) % side**2
        grid = torch.stack((cells // side, cells % side), dim=-1)[None]
        call(torch.randn(1, tiles, encoder.config.feature_dim, device=device), grid)

    on_slide(_FEW)  # one-time allocations, such as compiled kernels and gradients
    peaks = []
    for tiles in (_FEW, _MANY):
        measured = peak_memory(lambda tiles=tiles: on_slide(tiles), device)  # type: ignore[misc]
        if measured is None:
            return None
        peaks.append(measured[0])
    return max(1, (peaks[1] - peaks[0]) // (_MANY - _FEW), peaks[1] // _MANY)
