"""Tile files in the form that the encoder takes: checked against the settings, a slide or a patient at a time."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.errors import RunError, shortened

from .encoder import SlideEncoderConfig
from .files import Slide, Source, UnreadableFileError, read_slide
from .settings import TileSettings
from .titan import TitanConfig

_GIGAPATH = (
    "gigapath",
    "gigapathtile",
    "gigapathtileencoder",
    "gigapathslide",
    "provgigapath",
    "provgigapathtile",
    "provgigapathslide",
    "provgigapathprovgigapath",
)
"""Names of GigaPath's tile encoder; slide2vec records that of the slide encoder for features on the way to it."""
_TOLERANCE, _OF_SPACING = 0.1, 0.02
"""Of a magnification, as scanners differ, and of a spacing, as tools round it."""
_OTHER_OUTPUT = "with another --output if this one holds embeddings"


class TileRows(NamedTuple):
    """The tiles of one slide as input of the encoder."""

    path: Path
    features: Tensor
    """``[N, C]``."""
    grid: Tensor
    """Grid positions ``[N, 2]``, in tiles."""
    slide: Slide
    tile_size: int


class TileSequence(NamedTuple):
    """One sequence of the encoder: the tiles of a slide, or those of the slides of a patient one after another."""

    source: Source
    slides: Sequence[TileRows]

    @property
    def num_tiles(self) -> int:
        return sum(len(slide.grid) for slide in self.slides)

    @property
    def features(self) -> Tensor:
        """``[N, C]`` in float32; the dtype can differ from file to file."""
        return torch.cat([slide.features.float() for slide in self.slides])

    @property
    def grid(self) -> Tensor:
        """Grid positions ``[N, 2]``, of each tile in its own slide."""
        return torch.cat([slide.grid for slide in self.slides])


def read_sequence(
    name: str, paths: Sequence[Path], config: SlideEncoderConfig | TitanConfig, settings: TileSettings
) -> TileSequence:
    """Read the slides of one sequence in the given order.

    Args:
        name: of the slide or the patient.
        paths: files of tile features.
        config, settings: what the files must match.

    Raises:
        UnreadableFileError: a file does not match the encoder, is damaged, or changed while it was read.
    """
    source, slides = Source.of(name, paths), []
    for path in paths:
        try:
            slides.append(read_tiles(path, config, settings))
        except RunError as error:
            raise UnreadableFileError(path, str(error)) from error
    for path, before, now in zip(paths, source.versions, Source.of(name, paths).versions, strict=True):
        if before != now:
            raise UnreadableFileError(
                path, "it changed while it was read; run the same command again when it is written"
            )
    return TileSequence(source, slides)


def read_tiles(path: Path, config: SlideEncoderConfig | TitanConfig, settings: TileSettings) -> TileRows:
    """The tiles of a file in the form that the encoder takes.

    Raises:
        RunError: the file does not match the encoder.
    """
    slide = read_slide(path, config.feature_dim)
    _check_origin(slide, settings, settings.encoder or config.tile_encoder)
    recorded, given = slide.tile_size, settings.tile_size
    if recorded is not None and given is not None and recorded != given:
        raise RunError(
            f"expected tiles of {given} pixels (--tile-size), got a file that records {recorded}; embed it without "
            f"--tile-size into another folder, or extract its features again if {recorded} is wrong"
        )
    tile_size = recorded or given
    if tile_size is None:
        raise RunError(
            "it does not give its tile size (the attribute patch_size_level0 of coords, a number of at least 1); "
            f"pass --tile-size{_guess(slide.spacing)}, {_OTHER_OUTPUT}"
        )
    _check_spacing(slide, tile_size, settings.tile_spacing)
    coordinates = slide.coordinates.round() if settings.rounds else slide.coordinates
    try:
        grid = config.grid_of(coordinates, tile_size)
    except (TypeError, ValueError) as error:
        remedy = "pass another --tile-size and --output" if recorded is None else "extract its features again"
        raise RunError(f"{error}; {remedy} if {tile_size} is wrong") from error
    return TileRows(path, slide.features, grid, slide, tile_size)


def _check_origin(slide: Slide, settings: TileSettings, encoder: str) -> None:
    """Raise :class:`RunError` if the file records another tile encoder or magnification than is meant."""
    if slide.encoder is not None and _plain(slide.encoder) != _plain(encoder):
        name = shortened(slide.encoder)
        raise RunError(
            f"its features are of the tile encoder {name}, as it records, expected {encoder}: extract "
            f"them with that one, or pass --encoder {shlex.quote(name)} if the checkpoint was trained on {name}"
        )
    recorded = slide.magnification
    if recorded is not None and not math.isclose(recorded, settings.magnification, rel_tol=_TOLERANCE):
        raise RunError(
            f"its tiles are magnified {recorded:.3g} times, as it records, expected {settings.magnification:g}: "
            f"extract them at that one, or pass --magnification {recorded:.3g} if the checkpoint was trained on it"
        )


def _check_spacing(slide: Slide, tile_size: int, given: int | None) -> None:
    """Raise :class:`RunError` if the tiles stand at another distance than the tile size says."""
    expected = given or max(1, round(tile_size * (1 - slide.overlap)))
    if slide.spacing is None or abs(slide.spacing - expected) <= 1 + _OF_SPACING * expected:
        return
    if given is not None:
        raise RunError(f"expected tiles {given} pixels apart (--tile-spacing), got tiles {slide.spacing} apart")
    is_from_settings = slide.tile_size is None
    remedy = f"pass --tile-size {slide.spacing}, {_OTHER_OUTPUT}" if is_from_settings else "extract its features again"
    raise RunError(
        f"its tiles stand {slide.spacing} pixels apart, and a tile is {tile_size} pixels "
        f"({'--tile-size' if is_from_settings else 'as the file records'}): {remedy} if that is wrong, or pass "
        f"--tile-spacing {slide.spacing} if the tiles overlap or have gaps"
    )


def _guess(spacing: int | None) -> str:
    """The tile size suggested by the distance of tiles, as text after a flag."""
    if spacing is None:
        return " PIXELS"
    return f" (tiles are {spacing} apart: --tile-size {spacing} if they do not overlap)"


def _plain(encoder: str) -> str:
    """A name for comparison: without its hub and the digest of its code (STAMP), in small letters, digits and letters
    only; GigaPath's names are one."""
    name = re.sub(r"-[0-9a-f]{8}$", "", encoder.lower().removeprefix("hf_hub:").removeprefix("hf-hub:"))
    name = re.sub(r"[^a-z0-9]", "", name)
    return "gigapath" if name in _GIGAPATH else name
