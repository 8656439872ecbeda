"""A picture of scores of the tiles of a slide, drawn where they lie."""

from __future__ import annotations

from collections.abc import Mapping
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
    """What ``embed --maps``, ``embed --rollout`` or ``finetune --maps`` wrote of a slide."""

    values: Mapping[str, Tensor]
    """What the file holds: `attention` ``[L, H, N]``, probabilities of every layer and head; `rollout` ``[N]``;
    `contribution` ``[K, N]``, signed."""
    outputs: tuple[str, ...]
    """What the K contributions are to: classes, labels or values."""
    coordinates: Tensor
    """``[N, 2]``, upper left corners of the tiles, in pixels."""
    tile_size: int
    """In the same pixels."""
    size: tuple[float, float] | None
    """Width and height of the slide in the same pixels, if the file records them."""


def read_scores(path: Path, slide: str | None = None) -> TileScores:
    """Read a file of ``embed --maps`` or ``finetune --maps``.

    Args:
        path: the file.
        slide: the slide, in a file of a patient that has several.

    Raises:
        RunError: it is not one, or has no such slide; the message says what to do.
    """
    import h5py

    if not path.is_file():
        what, folder = ("it is a folder", path) if path.is_dir() else ("there is no such file", path.parent)
        there = ", ".join(file.name for file in sorted(folder.glob("*.h5"))[:5])
        raise RunError(
            f"{path}: {what}; name a file that `embed --maps`, `embed --rollout` or `finetune --maps` wrote: "
            f"{there or 'none is there'}"
        )
    try:
        with h5py.File(path, "r") as file:
            if "coords" not in file or not _AXES.keys() & file.keys():
                raise RunError(
                    f"{path} holds no scores of tiles; write them with `dilated-attention embed --maps` or --rollout, "
                    "or `finetune --maps`"
                )
            rows, attributes = _of_slide(file, path, slide)
            values = {name: torch.from_numpy(file[name][()]) for name in _AXES if name in file}
            outputs = tuple(map(str, file["contribution"].attrs["scores"])) if "contribution" in values else ()
            coordinates, tile_size = torch.from_numpy(file["coords"][()]), int(attributes["patch_size_level0"])
            sizes = [float(attributes[name]) for name in _SIZES if name in attributes]
    except (OSError, KeyError, IndexError, RuntimeError, ValueError, TypeError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{path} cannot be read as a file of `embed --maps` ({first_line(error)})") from error
    for name, of_tiles in values.items():
        if of_tiles.dim() != _AXES[name] or coordinates.shape != (of_tiles.shape[-1], 2):
            raise RunError(
                f"{path} has {name} {list(of_tiles.shape)} and coords {list(coordinates.shape)}, expected "
                "[layers, heads, tiles], [tiles] of a rollout or [scores, tiles] of contributions, and [tiles, 2]"
            )
    chosen = {name: of_tiles[..., rows] for name, of_tiles in values.items()}
    size = (sizes[0], sizes[1]) if len(sizes) == len(_SIZES) else None
    return TileScores(chosen, outputs, coordinates[rows], tile_size, size)


def _of_slide(file: Any, path: Path, slide: str | None) -> tuple[Tensor | slice, Mapping[str, Any]]:
    """The tiles of one slide in an HDF5 file, and the attributes of its coordinates."""
    attributes = file["coords"].attrs
    if "slide_index" not in file:
        if slide not in (None, path.stem):
            raise RunError(f"{path} is of one slide, {path.stem}; leave out --slide {slide}")
        return slice(None), attributes
    names = [Path(source).stem for source in file.attrs["source"]]
    if slide is None and len(names) == 1:
        slide = names[0]
    if slide not in names:
        raise RunError(f"{path} is of a patient with several slides: name one by --slide, of {', '.join(names)}")
    index, of_tiles = names.index(slide), torch.from_numpy(file["slide_index"][()])
    if of_tiles.shape != file["coords"].shape[:1]:
        raise ValueError(f"slide_index {list(of_tiles.shape)} is not one number per tile")
    return of_tiles == index, {name: of[index] for name, of in attributes.items()}


_AXES = {"attention": 3, "rollout": 1, "contribution": 2}
_SIZES = ("level0_width", "level0_height")


def of_attention(scores: TileScores, layer: int | None, head: int | None) -> tuple[Tensor, str]:
    """The attention of one layer (from 1; None = the last) and head (None = the mean), ``[N]``, and its name.

    Raises:
        RunError: there are no maps, or no such layer or head.
    """
    if "attention" not in scores.values:
        others = "--contribution NAME or --rollout" if "contribution" in scores.values else "--rollout"
        raise RunError(f"the file holds no attention: pass {others}, or embed the slide with --maps")
    attention = scores.values["attention"]
    layers, heads, _ = attention.shape
    layer = layers if layer is None else layer
    if not 1 <= layer <= layers:
        raise RunError(f"--layer must be 1 to {layers}, got {layer}")
    if head is not None and not 0 <= head < heads:
        raise RunError(f"--head must be 0 to {heads - 1}, got {head}")
    of_layer = attention[layer - 1]
    if head is None:
        return of_layer.mean(0), f"attention in layer {layer}, mean of {heads} heads"
    return of_layer[head], f"attention in layer {layer}, head {head}"


def of_rollout(scores: TileScores) -> tuple[Tensor, str]:
    """The rollout over all layers, ``[N]``, and its name.

    Raises:
        RunError: the file has none.
    """
    if "rollout" not in scores.values:
        raise RunError("the file holds no rollout: embed the slide with --rollout")
    return scores.values["rollout"], "attention rollout over all layers"


def of_contribution(scores: TileScores, output: str) -> tuple[Tensor, str]:
    """The contributions to one score, ``[N]``, and their name.

    Raises:
        RunError: the file has none to it.
    """
    if output not in scores.outputs:
        of = f"contributions to {', '.join(scores.outputs)}" if scores.outputs else "no contributions"
        raise RunError(f"--contribution {output}: the file holds {of}; pass one of them, or a file of finetune --maps")
    return scores.values["contribution"][scores.outputs.index(output)], f"contribution to the score of {output}"


def draw(scores: TileScores, values: Tensor, title: str, *, thumbnail: Path | None) -> Figure:
    """Draw the score of every tile as a coloured square.

    The colour is the score divided by the mean size of the scores: 1 is a tile like any other. Grey tiles have none. Of
    signed scores, red tiles are positive and blue ones negative.

    Args:
        scores: where the tiles lie.
        values: ``[N]``.
        title: title of the picture.
        thumbnail: picture of the whole slide, drawn below the tiles.

    Raises:
        RunError: the thumbnail cannot be drawn.
    """
    tiles, values = len(values), values.double()
    is_seen, is_signed = values != 0, bool((values < 0).any())
    relative = values / values.abs().mean().clamp(min=torch.finfo(torch.float64).tiny)
    with importing("drawing a heat map", "plot"):
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure

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
    corners = torch.tensor([[0, 0], [1, 0], [1, 1], [0, 1]])
    squares = scores.coordinates[:, None] + scores.tile_size * corners  # [N, 4, 2]
    alpha = 1.0 if thumbnail is None else 0.5
    hidden = squares[~is_seen].numpy()
    axes.add_collection(PolyCollection(hidden, facecolor="0.85", edgecolor="none", alpha=alpha))  # type: ignore[arg-type]
    shown = PolyCollection(
        squares[is_seen].numpy(),  # type: ignore[arg-type]
        cmap="coolwarm" if is_signed else "viridis",
        edgecolor="none",
        alpha=alpha,
    )
    shown.set_array(relative[is_seen].numpy())
    largest = max(float(relative.abs().quantile(_BRIGHTEST)) if tiles else 1.0, 1e-9)
    shown.set_clim(-largest if is_signed else 0.0, largest)
    axes.add_collection(shown)
    axes.set(xlim=(begin[0], end[0]), ylim=(end[1], begin[1]), aspect="equal", xlabel="pixels", ylabel="pixels")
    number = int((~is_seen).sum())
    grey = f"; {number:,} of {tiles:,} tiles unseen (grey)" if number else ""
    axes.set_title(f"{title}{grey}", fontsize=10)
    is_beyond = float(relative.abs().max()) > largest
    bar = figure.colorbar(shown, ax=axes, extend=("both" if is_signed else "max") if is_beyond else "neither")
    bar.set_label("relative to the mean size" if is_signed else "relative to the mean tile")
    return figure


def _picture(path: Path) -> Any:
    from matplotlib.image import imread

    try:
        return imread(path)
    except (OSError, ValueError, SyntaxError) as error:
        raise RunError(f"--thumbnail {path} cannot be read as a picture ({first_line(error)}); pass a PNG") from error
