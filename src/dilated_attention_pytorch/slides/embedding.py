"""Batch embedding of slides: existing embeddings are kept, broken files are reported and skipped."""

from __future__ import annotations

import hashlib
import math
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.errors import RunError, shortened
from dilated_attention_pytorch.machine import choose_device, require, set_threads
from dilated_attention_pytorch.memory import in_bytes, is_out_of_memory
from dilated_attention_pytorch.training.autocast import autocast

from .checkpoint import load_slide_encoder
from .encoder import SlideEmbeddings, SlideEncoder, SlideEncoderConfig, pack_slides
from .files import Slide, find_slides, read_slide
from .grid import tile_grid
from .memory import TileLimits, measure_limits
from .settings import EmbedSettings
from .store import Source, Store

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
PACKAGES: Mapping[str, Sequence[str]] = {"h5": ("h5py",), "parquet": ("h5py", "pyarrow")}
"""Packages that each output format needs; slide files themselves are HDF5."""


class TileRows(NamedTuple):
    """A slide as input of the encoder."""

    source: Source
    path: Path
    features: Tensor
    """``[N, C]``."""
    grid: Tensor
    """Grid positions ``[N, 2]``, in tiles."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Result of a run."""

    kept: int = 0
    """Slides whose embeddings existed."""
    embedded: int = 0
    """Slides embedded in this run."""
    tiles: int = 0
    """Number of their tiles."""
    seconds: float = 0.0
    """Seconds of reading, computing and writing them."""
    failed: dict[Path, str] = field(default_factory=dict)
    """Skipped files and the reasons."""


class Embedder:
    """An encoder and an output folder for its embeddings.

    All settings are validated on construction; nothing is written before :meth:`run`.

    Args:
        slides: files of tile features, or folders of them; see :func:`find_slides`.
        checkpoint: weights of the encoder; see :func:`load_slide_encoder`.
        output: folder of the embeddings. Embeddings of an earlier run with the same settings are kept.
        settings: all other options.

    Raises:
        RunError: an input is missing or invalid, or the output cannot be written. The message says what to do.
    """

    def __init__(self, slides: Sequence[Path], checkpoint: Path, output: Path, settings: EmbedSettings) -> None:
        require("embedding slides", PACKAGES[settings.format], "slides")
        self.settings = settings
        self.device = torch.device(choose_device(settings.device))
        set_threads(settings.threads)
        self.paths = find_slides(slides)
        self.store = Store(output, settings.format)
        self.encoder = _load(checkpoint, settings).to(self.device)
        self.made_with = settings.of_result(checkpoint, _digest(checkpoint))
        self.store.check(self.made_with)

    def run(
        self,
        *,
        say: Callable[[str], None] = lambda sentence: None,
        skip: Callable[[Path, str], None] = lambda path, reason: None,
        advance: Callable[[str], None] = lambda slide: None,
    ) -> Outcome:
        """Embed every slide that has no embedding yet.

        Args:
            say: called with messages before the run.
            skip: called with each skipped file and the reason.
            advance: called with the name of every slide that is embedded, skipped or already present.

        Raises:
            RunError: the output folder holds the embedding of another slide of the same name, or another command began
                it with other settings; nothing was computed.
        """
        outcome, begun = Outcome(), time.monotonic()

        def fail(path: Path, reason: str) -> None:
            outcome.failed[path] = reason
            skip(path, reason)
            advance(path.stem)

        self.store.begin(self.made_with)
        left: list[tuple[Source, Path]] = []
        for name, path in self.paths.items():
            try:
                source = Source.of(name, path)
                before = self.store.before(source)
            except RunError as error:
                fail(path, str(error))
                continue
            if self.store.is_of(before, source):
                outcome.kept += 1
                advance(name)
            else:
                left.append((source, path))
        if outcome.kept:
            say(f"{outcome.kept:,} of {len(self.paths):,} slides were embedded before")
        if not left:
            return outcome
        for batch in self._batches(left, say, fail):
            for slide, embeddings in self._embed(batch, fail):
                try:
                    self.store.write(slide.source, len(slide.features), embeddings)
                except RunError as error:
                    fail(slide.path, str(error))
                    continue
                outcome.embedded += 1
                outcome.tiles += len(slide.features)
                advance(slide.source.slide)
        outcome.seconds = time.monotonic() - begun
        return outcome

    def _limits(self, say: Callable[[str], None]) -> TileLimits | None:
        settings = self.settings
        limits = measure_limits(self.encoder, self.device, settings.precision, settings.batch_tiles, settings.memory)
        if limits is None:
            say("memory cannot be measured on this system: slides are embedded one by one")
        else:
            say(
                f"a tile takes {limits.tile_bytes / 1e3:,.0f} kB on this device (measured): {limits.of_batch:,} tiles "
                "at once"
            )
        return limits

    def _batches(
        self,
        slides: Sequence[tuple[Source, Path]],
        say: Callable[[str], None],
        fail: Callable[[Path, str], None],
    ) -> Iterator[list[TileRows]]:
        """Slides in order, batched up to the tile limit; a slide larger than a batch comes alone."""
        batch: list[TileRows] = []
        limits, is_measured = None, False
        for source, path in slides:
            try:
                tiles = self._read(source, path)
                if not is_measured:
                    limits, is_measured = self._limits(say), True
                self._check_size(len(tiles.grid), limits)
            except RunError as error:
                fail(path, str(error))
                continue
            together = sum(len(slide.features) for slide in batch) + len(tiles.features)
            if batch and (limits is None or together > limits.of_batch):
                yield batch
                batch = []
            batch.append(tiles)
        if batch:
            yield batch

    def _read(self, source: Source, path: Path) -> TileRows:
        """The tiles of a file in the form that the encoder takes.

        Raises:
            RunError: the file does not match the encoder.
        """
        config = self.encoder.config
        slide = read_slide(path, config.feature_dim)
        if Source.of(source.slide, path).version != source.version:
            raise RunError("it changed while it was read; run the same command again when it is written")
        self._check_origin(slide)
        recorded, given = slide.tile_size, self.settings.tile_size
        if recorded is not None and given is not None and recorded != given:
            raise RunError(
                f"expected tiles of {given} pixels (--tile-size), got a file that records {recorded}; embed it without "
                f"--tile-size into another folder, or extract its features again if {recorded} is wrong"
            )
        tile_size = recorded or given
        if tile_size is None:
            raise RunError(
                "it does not give its tile size (the attribute patch_size_level0 of coords, a number of at least 1); "
                f"pass --tile-size{_guess(slide.spacing)}, and another --output"
            )
        self._check_spacing(slide, tile_size)
        try:
            grid = tile_grid(slide.coordinates, tile_size, config.grid_size)
        except (TypeError, ValueError) as error:
            remedy = "pass another --tile-size and --output" if recorded is None else "extract its features again"
            raise RunError(f"{error}; {remedy} if {tile_size} is wrong") from error
        return TileRows(source, path, slide.features, grid)

    def _check_origin(self, slide: Slide) -> None:
        """Raise :class:`RunError` if the file records another tile encoder or magnification than is meant."""
        settings = self.settings
        if slide.encoder is not None and _plain(slide.encoder) != _plain(settings.encoder):
            name = shortened(slide.encoder)
            raise RunError(
                f"its features are of the tile encoder {name}, as it records, expected {settings.encoder}: extract "
                f"them with that one, or pass --encoder {shlex.quote(name)} if the checkpoint was trained on {name}"
            )
        recorded = slide.magnification
        if recorded is not None and not math.isclose(recorded, settings.magnification, rel_tol=_TOLERANCE):
            raise RunError(
                f"its tiles are magnified {recorded:.3g} times, as it records, expected {settings.magnification:g}: "
                f"extract them at that one, or pass --magnification {recorded:.3g} if the checkpoint was trained on it"
            )

    def _check_spacing(self, slide: Slide, tile_size: int) -> None:
        """Raise :class:`RunError` if the tiles stand at another distance than the tile size says."""
        given = self.settings.tile_spacing
        expected = given or max(1, round(tile_size * (1 - slide.overlap)))
        if slide.spacing is None or abs(slide.spacing - expected) <= 1 + _OF_SPACING * expected:
            return
        if given is not None:
            raise RunError(f"expected tiles {given} pixels apart (--tile-spacing), got tiles {slide.spacing} apart")
        is_from_settings = slide.tile_size is None
        remedy = (
            f"pass --tile-size {slide.spacing} and another --output"
            if is_from_settings
            else "extract its features again"
        )
        raise RunError(
            f"its tiles stand {slide.spacing} pixels apart, and a tile is {tile_size} pixels "
            f"({'--tile-size' if is_from_settings else 'as the file records'}): {remedy} if that is wrong, or pass "
            f"--tile-spacing {slide.spacing} if the tiles overlap or have gaps"
        )

    def _check_size(self, tiles: int, limits: TileLimits | None) -> None:
        """Raise :class:`RunError` if a slide does not fit into memory alone."""
        if limits is not None and tiles > limits.of_slide:
            needed, given = tiles * limits.tile_bytes, limits.of_slide * limits.tile_bytes
            from_where = "pass a larger --memory" if self.settings.memory is not None else "use a device with more"
            raise RunError(
                f"its {tiles:,} tiles take about {in_bytes(needed)}, and {in_bytes(given)} are available; {from_where}"
            )

    def _embed(
        self, batch: list[TileRows], fail: Callable[[Path, str], None]
    ) -> Iterator[tuple[TileRows, SlideEmbeddings]]:
        try:
            computed = self._compute(batch)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if len(batch) > 1:
                for slide in batch:
                    yield from self._embed([slide], fail)
            else:
                fail(batch[0].path, "memory ran out; use a device with more, or close other programs on this one")
            return
        for slide, embedding, layers in zip(batch, *computed, strict=True):
            if not bool(layers.isfinite().all() and embedding.isfinite().all()):
                fail(slide.path, f"its embedding is not finite in {self.settings.precision}; {self._remedy(slide)}")
                continue
            yield slide, SlideEmbeddings(embedding, layers)

    def _remedy(self, slide: TileRows) -> str:
        """What to do about an embedding that is not finite."""
        if self.settings.precision != "float32":
            return "use --precision float32"
        largest = float(slide.features.abs().max())
        return f"its features are too large (up to {largest:.3g}), extract them again"

    def _compute(self, batch: list[TileRows]) -> SlideEmbeddings:
        """Embeddings of the slides of a batch, in float32 on the CPU."""
        # The dtype can differ from file to file.
        slides = [(slide.features.float(), slide.grid) for slide in batch]
        features, grid, cu_seqlens = pack_slides(slides)
        with torch.inference_mode(), autocast(self.settings.precision, self.device.type):
            embeddings = self.encoder(
                features.to(self.device), grid.to(self.device), tile_size=1, cu_seqlens=cu_seqlens
            )
        return SlideEmbeddings(*(value.float().cpu() for value in embeddings))


def _load(checkpoint: Path, settings: EmbedSettings) -> SlideEncoder:
    if checkpoint.suffix == ".safetensors":
        require("a .safetensors file", ("safetensors",), "slides")
    try:
        config = SlideEncoderConfig(
            num_heads=settings.num_heads, pooling=settings.pooling, embed_dim=4 * settings.num_heads
        )
        return load_slide_encoder(checkpoint, config=config, prefix=settings.prefix)
    except (ValueError, FileNotFoundError) as error:
        raise RunError(f"--checkpoint {error}") from error


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


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
