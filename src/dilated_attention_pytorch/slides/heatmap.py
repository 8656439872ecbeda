"""A picture of the attention to the tiles of a slide, drawn where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.errors import RunError, first_line
from dilated_attention_pytorch.installation import importing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 8.0
"""Inches."""
_BRIGHTEST = 0.99
"""Quantile of the scores that gets the last colour; a few tiles would otherwise leave the others dark."""


class TileScores(NamedTuple):
    """What ``embed --maps`` wrote of a slide."""

    attention: Tensor
    """``[L, H, N]``, probabilities of every layer and head."""
    coordinates: Tensor
    """``[N, 2]``, upper left corners of the tiles, in pixels."""
    tile_size: int
    """In the same pixels."""
    size: tuple[float, float] | None
    """Width and height of the slide in the same pixels, if the file records them."""


def read_scores(path: Path) -> TileScores:
    """Read a file of ``embed --maps``.

    Raises:
        RunError: it is not one; the message says what to do.
    """
    import h5py

    try:
        with h5py.File(path, "r") as file:
            if "attention" not in file or "coords" not in file:
                raise RunError(f"{path} holds no attention to tiles; write it with `dilated-attention embed --maps`")
            attributes = file["coords"].attrs
            scores = TileScores(
                torch.from_numpy(file["attention"][()]),
                torch.from_numpy(file["coords"][()]),
                int(attributes["patch_size_level0"]),
                tuple(float(attributes[name]) for name in _SIZES) if set(_SIZES) <= attributes.keys() else None,  # type: ignore[arg-type]
            )
    except (OSError, KeyError, RuntimeError, ValueError, TypeError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{path} cannot be read as a file of `embed --maps` ({first_line(error)})") from error
    if scores.attention.dim() != 3 or scores.coordinates.shape != (scores.attention.shape[2], 2):
        raise RunError(
            f"{path} has attention {list(scores.attention.shape)} and coords {list(scores.coordinates.shape)}, "
            "expected [layers, heads, tiles] and [tiles, 2]"
        )
    return scores


_SIZES = ("level0_width", "level0_height")


def draw(scores: TileScores, name: str, *, layer: int, head: int | None, thumbnail: Path | None) -> Figure:
    """Draw the attention to every tile as a coloured square.

    The colour is the attention divided by the mean over the tiles: 1 is a tile like any other. Grey tiles are not seen
    at all in this layer.

    Args:
        scores: see :func:`read_scores`.
        name: name of the slide.
        layer: 1 to L.
        head: 0 to H - 1; None = the mean over the heads.
        thumbnail: picture of the whole slide, drawn below the tiles.

    Raises:
        RunError: a layer or head does not exist, or the thumbnail cannot be drawn.
    """
    layers, heads, tiles = scores.attention.shape
    if not 1 <= layer <= layers:
        raise RunError(f"--layer must be 1 to {layers}, got {layer}")
    if head is not None and not 0 <= head < heads:
        raise RunError(f"--head must be 0 to {heads - 1}, got {head}")
    of_layer = scores.attention[layer - 1]
    values = (of_layer.mean(0) if head is None else of_layer[head]).double()
    is_seen = values > 0
    relative = values / values.mean().clamp(min=torch.finfo(torch.float64).tiny)
    with importing("drawing a heat map", "plot"):
        from matplotlib.collections import PatchCollection
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle

    begin, end = scores.coordinates.amin(0).tolist(), (scores.coordinates.amax(0) + scores.tile_size).tolist()
    if thumbnail is not None:
        if scores.size is None:
            raise RunError(
                "--thumbnail is drawn below the tiles where the file records the size of the slide (TRIDENT 0.2.2 or "
                "later: level0_width, level0_height), and this one does not; leave it out"
            )
        begin, end = [0.0, 0.0], list(scores.size)
    width, height = end[0] - begin[0], end[1] - begin[1]
    figure = Figure(
        figsize=(_WIDTH, max(2.5, min(4 * _WIDTH, (_WIDTH - 1.5) * height / width + 1))), layout="constrained"
    )
    axes = figure.subplots()
    if thumbnail is not None:
        axes.imshow(_picture(thumbnail), extent=(begin[0], end[0], end[1], begin[1]))
    squares = [Rectangle(corner, scores.tile_size, scores.tile_size) for corner in scores.coordinates.tolist()]
    alpha = 1.0 if thumbnail is None else 0.5
    hidden = [square for square, seen in zip(squares, is_seen.tolist(), strict=True) if not seen]
    axes.add_collection(PatchCollection(hidden, facecolor="0.85", edgecolor="none", alpha=alpha))
    shown = PatchCollection(
        [square for square, seen in zip(squares, is_seen.tolist(), strict=True) if seen],
        cmap="viridis",
        edgecolor="none",
        alpha=alpha,
    )
    shown.set_array(relative[is_seen].numpy())
    largest = float(relative.quantile(_BRIGHTEST)) if tiles else 1.0
    shown.set_clim(0.0, max(largest, 1e-9))
    axes.add_collection(shown)
    axes.set(xlim=(begin[0], end[0]), ylim=(end[1], begin[1]), aspect="equal", xlabel="pixels", ylabel="pixels")
    which = f"mean of {heads} heads" if head is None else f"head {head}"
    number = int((~is_seen).sum())
    axes.set_title(f"{name}: layer {layer}, {which}; {number:,} of {tiles:,} tiles unseen (grey)", fontsize=10)
    bar = figure.colorbar(shown, ax=axes, extend="max" if float(relative.max()) > largest else "neither")
    bar.set_label("attention, relative to the mean tile")
    return figure


def _picture(path: Path) -> Any:
    from matplotlib.image import imread

    try:
        return imread(path)
    except (OSError, ValueError, SyntaxError, ImportError) as error:
        raise RunError(f"--thumbnail {path} cannot be read as a picture ({first_line(error)}); pass a PNG") from error
