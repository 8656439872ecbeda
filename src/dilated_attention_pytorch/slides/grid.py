"""Grid positions of slide tiles and their sine-cosine embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention_pytorch.ops.validation import check_size
from dilated_attention_pytorch.tracing import require

_BASE = 10000.0


def tile_grid(coordinates: Tensor, tile_size: int, grid_size: int) -> Tensor:
    """Grid positions of tiles: ``floor(coordinates / tile_size)``.

    Args:
        coordinates: ``[..., 2]``, upper left corners of the tiles, in pixels.
        tile_size: edge length of a tile, in pixels.
        grid_size: tiles along each side of the largest slide.

    Returns:
        int64 of the same shape, 0 to ``grid_size - 1``.

    Raises:
        TypeError: coordinates are not numeric.
        ValueError: a tile lies outside the grid, or a coordinate is not finite.

    >>> from dilated_attention_pytorch.slides import tile_grid
    >>> tile_grid(torch.tensor([[0, 511], [512, 300]]), 256, 1000)
    tensor([[0, 1],
            [2, 1]])
    """
    check_size("tile_size", tile_size)
    if coordinates.dtype == torch.bool or coordinates.is_complex():
        raise TypeError(f"coordinates must be integers or floats in pixels, got {coordinates.dtype}")
    is_traced = torch.compiler.is_compiling()  # values are then checked when the graph runs
    if coordinates.is_floating_point():
        require(coordinates.isfinite().all(), ValueError, "coordinates must be finite, got NaN or infinity")
    # Low-precision floats cannot represent pixel coordinates exactly.
    wide = coordinates.double() if coordinates.is_floating_point() else coordinates.long()
    grid = torch.div(wide, tile_size, rounding_mode="floor").long()
    outside = ((grid < 0) | (grid >= grid_size)).any(dim=-1)
    if is_traced:
        torch._assert_async(~outside.any(), f"a tile is outside the grid of {grid_size} x {grid_size} tiles")
    elif bool(outside.any()):
        first = coordinates[outside][0].tolist()
        raise ValueError(
            f"the tile at {first} has grid position {grid[outside][0].tolist()}, outside the grid of {grid_size} x "
            f"{grid_size} tiles of {tile_size} pixels ({int(outside.sum())} tiles are outside); coordinates must count "
            "from 0, and tile_size must be in the same pixels (those of level 0 of the slide)"
        )
    return grid


def position_table(grid_size: int, embed_dim: int) -> Tensor:
    """Sine-cosine embedding of one coordinate, float32 ``[grid_size, embed_dim / 2]`` on the CPU.

    ``sin(n w_i), cos(n w_i)`` with ``w_i = 10000^(-4 i / E)``, i = 0 to E/4 - 1, computed in float64 and rounded as the
    authors' table is. In that table the first half of the width encodes the second coordinate.
    """
    quarter = embed_dim // 4
    frequencies = _BASE ** -(torch.arange(quarter, dtype=torch.float64, device="cpu") / quarter)
    angles = torch.arange(grid_size, dtype=torch.float64, device="cpu")[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=-1).float()
