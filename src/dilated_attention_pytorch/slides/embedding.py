"""Batch embedding of slides: existing embeddings are kept, broken files are reported and skipped."""

from __future__ import annotations

import hashlib
import math
import os
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.errors import RunError, shortened
from dilated_attention_pytorch.machine import choose_device, require, set_threads
from dilated_attention_pytorch.memory import in_bytes, is_out_of_memory
from dilated_attention_pytorch.ops import attention_calls, attention_maps, attention_rollout
from dilated_attention_pytorch.training.autocast import autocast

from .checkpoint import load_slide_encoder
from .claims import Claims, part_of, part_of_launcher
from .contents import num_tiles
from .encoder import SlideEmbeddings, SlideEncoder, SlideEncoderConfig, pack_slides
from .files import Slide, find_slides, read_slide
from .grid import tile_grid
from .memory import TileLimits, measure_limits
from .settings import EmbedSettings
from .store import SlideResult, Source, Store

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
_BATCH_TILES = 16384
_POLL_SECONDS = 1.0
"""Pause before looking again at slides that other commands are embedding."""
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
    slide: Slide
    tile_size: int


class TileProgress:
    """Tiles that are done, of all that a run has to embed.

    Args:
        tiles: number of tiles by slide.
        report: called with this object whenever it changes.
    """

    def __init__(self, tiles: Mapping[str, int], report: Callable[[TileProgress], None]) -> None:
        self._tiles, self._report = dict(tiles), report
        self.total_tiles, self.total_slides = sum(tiles.values()), len(tiles)
        self.slides = 0
        self._tiles_of_slides = 0
        self._tiles_under_way = 0.0

    @property
    def tiles(self) -> float:
        """Tiles that are done; of a batch that is being computed, the fraction of its layers."""
        return min(self.total_tiles, self._tiles_of_slides + self._tiles_under_way)

    def compute(self, tiles: float) -> None:
        """So many tiles of the current batch are computed."""
        self._tiles_under_way = tiles
        self._report(self)

    def finish(self, slide: str) -> None:
        """A slide is embedded, skipped, or embedded by another command."""
        self._tiles_of_slides += self._tiles[slide]
        self._tiles_under_way = max(0.0, self._tiles_under_way - self._tiles[slide])
        self.slides += 1
        self._report(self)


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Result of a run."""

    kept: int = 0
    """Slides whose embeddings existed."""
    embedded: int = 0
    """Slides embedded in this run."""
    by_others: int = 0
    """Slides embedded meanwhile by other commands over the same folder."""
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
        if settings.numbers_of_part is not None:
            self.paths = part_of(self.paths, *settings.numbers_of_part)
        elif (part := part_of_launcher(os.environ)) is not None:
            self.paths = part_of(self.paths, *part) | self.paths  # its own part first
        self.limits: TileLimits | None = None
        self._is_measured = False
        self.store = Store(output, settings.format, settings.vector.layout)
        self.encoder = _load(checkpoint, settings).to(self.device)
        self.made_with = settings.of_result(checkpoint, _digest(checkpoint))
        self.store.check(self.made_with)

    def run(
        self,
        *,
        say: Callable[[str], None] = lambda sentence: None,
        skip: Callable[[Path, str], None] = lambda path, reason: None,
        progress: Callable[[TileProgress], None] = lambda state: None,
    ) -> Outcome:
        """Embed every slide that has no embedding yet.

        Commands that run at the same time over one folder share the slides: each is claimed by one of them, and all end
        when none is left. A slide that a killed command had claimed is taken by another.

        Args:
            say: called with messages before the run.
            skip: called with each skipped file and the reason.
            progress: called whenever some tiles are done.

        Raises:
            RunError: the output folder holds the embedding of another slide of the same name, or another command began
                it with other settings; nothing was computed.
        """
        outcome, begun = Outcome(), time.monotonic()
        left: dict[str, Path] = {}
        for name, path in self.paths.items():
            try:
                source = Source.of(name, path)
                before = self.store.before(source)
            except RunError as error:
                outcome.failed[path] = str(error)
                skip(path, str(error))
                continue
            if self.store.is_of(before, source):
                outcome.kept += 1
            else:
                left[name] = path
        if outcome.kept:
            say(f"{outcome.kept:,} of {len(self.paths):,} slides were embedded before")
        if not left:
            return outcome
        counted = TileProgress({name: num_tiles(path) for name, path in left.items()}, progress)
        claims = Claims(self.store.folder)
        try:
            while left:
                before_round = len(left)
                self._embed_free(left, claims, outcome, say, skip, counted)
                if len(left) == before_round:
                    time.sleep(_POLL_SECONDS)
        finally:
            claims.end(is_complete=not left)
        outcome.seconds = time.monotonic() - begun
        return outcome

    def _embed_free(
        self,
        left: dict[str, Path],
        claims: Claims,
        outcome: Outcome,
        say: Callable[[str], None],
        skip: Callable[[Path, str], None],
        counted: TileProgress,
    ) -> None:
        """Embed the slides of ``left`` that no other command is embedding; they leave ``left``, and what others
        finished."""

        def finish(name: str) -> None:
            del left[name]
            claims.release(name)
            counted.finish(name)

        def fail(path: Path, reason: str) -> None:
            outcome.failed[path] = reason
            skip(path, reason)
            finish(path.stem)

        def claimed() -> Iterator[tuple[Source, Path]]:
            for name, path in [*left.items()]:
                if not claims.take(name):
                    continue
                try:
                    source = Source.of(name, path)
                    if self.store.is_of(self.store.before(source), source):
                        outcome.by_others += 1
                        finish(name)
                        continue
                except RunError as error:
                    fail(path, str(error))
                    continue
                yield source, path

        for batch in self._batches(claimed(), say, fail):
            with _counting_layers(self.encoder, counted, sum(len(slide.features) for slide in batch)):
                for slide, result in self._embed(batch, fail):
                    self.store.begin(self.made_with)  # the first result binds the folder to its settings
                    try:
                        self._write(slide, result)
                    except RunError as error:
                        fail(slide.path, str(error))
                        continue
                    outcome.embedded += 1
                    outcome.tiles += len(slide.features)
                    finish(slide.source.slide)

    def _write(self, slide: TileRows, result: SlideResult) -> None:
        """Write a slide's result.

        Raises:
            RunError: something else has the name.
        """
        # The embedding comes last: a slide that has one is finished.
        if self.settings.maps and "tile_size_um" not in slide.slide.attributes:
            self.store.write_geojson(slide.source, result)
        self.store.write(slide.source, result)

    def _limits(self, say: Callable[[str], None]) -> TileLimits | None:
        settings = self.settings
        limits = measure_limits(
            self.encoder,
            self.device,
            settings.precision,
            settings.batch_tiles or (_BATCH_TILES if self.device.type == "cuda" else 1),
            settings.memory,
            keeps_calls=settings.rollout,
        )
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
        slides: Iterable[tuple[Source, Path]],
        say: Callable[[str], None],
        fail: Callable[[Path, str], None],
    ) -> Iterator[list[TileRows]]:
        """Slides in order, batched up to the tile limit; a slide larger than a batch comes alone."""
        batch: list[TileRows] = []
        for source, path in slides:
            try:
                tiles = self._read(source, path)
                if not self._is_measured:
                    self.limits, self._is_measured = self._limits(say), True
                limits = self.limits
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
        coordinates = slide.coordinates.round() if self.settings.vector.rounds else slide.coordinates
        try:
            grid = tile_grid(coordinates, tile_size, config.grid_size)
        except (TypeError, ValueError) as error:
            remedy = "pass another --tile-size and --output" if recorded is None else "extract its features again"
            raise RunError(f"{error}; {remedy} if {tile_size} is wrong") from error
        return TileRows(source, path, slide.features, grid, slide, tile_size)

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
    ) -> Iterator[tuple[TileRows, SlideResult]]:
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
        for slide, result in zip(batch, computed, strict=True):
            if not all(bool(values.isfinite().all()) for values in (*result.embeddings, *result.of_tiles.values())):
                fail(slide.path, f"its embedding is not finite in {self.settings.precision}; {self._remedy(slide)}")
                continue
            yield slide, result

    def _remedy(self, slide: TileRows) -> str:
        """What to do about an embedding that is not finite."""
        if self.settings.precision != "float32":
            return "use --precision float32"
        largest = float(slide.features.abs().max())
        return f"its features are too large (up to {largest:.3g}), extract them again"

    def _compute(self, batch: list[TileRows]) -> list[SlideResult]:
        """Results of the slides of a batch, in float32 on the CPU."""
        settings, encoder = self.settings, self.encoder
        # The dtype can differ from file to file.
        features, grid, cu_seqlens = pack_slides([(slide.features.float(), slide.grid) for slide in batch])
        # Row 0 of every slide is its class token.
        rows = [(start + slide, stop + slide + 1) for slide, (start, stop) in enumerate(pairwise(cu_seqlens.tolist()))]
        states: list[Tensor] = []
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            stack.enter_context(autocast(settings.precision, self.device.type))
            pooled = self._pooled_rows(rows)
            maps = stack.enter_context(attention_maps(pooled)) if settings.maps else []
            calls = stack.enter_context(attention_calls()) if settings.rollout else []
            if settings.tiles is not None:
                stack.enter_context(_output_of(encoder, settings.tiles, states))
            embeddings, layers = encoder(
                features.to(self.device), grid.to(self.device), tile_size=1, cu_seqlens=cu_seqlens
            )
            rollout = attention_rollout(calls, pooled) if calls else None
        if settings.vector.layer is not None:
            embeddings = layers[:, settings.vector.layer]
        results = []
        for index, (slide, (first, stop)) in enumerate(zip(batch, rows, strict=True)):
            of_tiles = {} if rollout is None else {"rollout": rollout[0, index, first + 1 : stop]}
            if maps:
                attention = torch.stack([one[0, index, :, first:stop] for one in maps])
                of_tiles |= {"attention": attention[..., 1:], "attention_to_class": attention[..., 0]}
            if states:
                of_tiles["states"] = states[0][0, first + 1 : stop]
            of_tiles = {name: values.float().cpu().contiguous() for name, values in of_tiles.items()}
            vectors = SlideEmbeddings(embeddings[index].float().cpu(), layers[index].float().cpu())
            results.append(
                SlideResult(vectors, slide.slide.coordinates, slide.tile_size, slide.slide.attributes, of_tiles)
            )
        return results

    def _pooled_rows(self, rows: list[tuple[int, int]]) -> Tensor:
        """What the embedding is pooled from, as queries of an attention map: class tokens, or the mean of tiles."""
        if self.settings.vector.pooling == "class":
            return torch.tensor([first for first, _ in rows])
        weights = torch.zeros(len(rows), rows[-1][1])
        for slide, (first, stop) in enumerate(rows):
            weights[slide, first + 1 : stop] = 1 / (stop - first - 1)
        return weights


@contextmanager
def _counting_layers(encoder: SlideEncoder, counted: TileProgress, tiles: int) -> Iterator[None]:
    """Count the tiles of a batch by the layers that are computed."""
    layers = encoder.encoder.layers

    def count(index: int) -> Callable[..., None]:
        return lambda *_: counted.compute(tiles * (index + 1) / len(layers))

    hooks = [layer.register_forward_hook(count(index)) for index, layer in enumerate(layers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _output_of(encoder: SlideEncoder, layer: int, states: list[Tensor]) -> Iterator[None]:
    """Append the states ``[1, N, E]`` after ``layer`` to ``states``; after layer 0, the input of the first."""

    def keep_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        states.append(inputs[0])

    def keep_output(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        states.append(output)

    layers = encoder.encoder.layers
    hook = (
        layers[layer - 1].register_forward_hook(keep_output)
        if layer
        else layers[0].register_forward_pre_hook(keep_input)
    )
    with hook:
        yield


def _load(checkpoint: Path, settings: EmbedSettings) -> SlideEncoder:
    if checkpoint.suffix == ".safetensors":
        require("a .safetensors file", ("safetensors",), "slides")
    try:
        config = SlideEncoderConfig(
            num_heads=settings.num_heads, pooling=settings.vector.pooling, embed_dim=4 * settings.num_heads
        )
        encoder = load_slide_encoder(checkpoint, config=config, prefix=settings.prefix)
    except (ValueError, FileNotFoundError) as error:
        raise RunError(f"--checkpoint {error}") from error
    layers = encoder.config.num_layers
    for flag, layer in (("--layer", settings.vector.layer), ("--tiles", settings.tiles)):
        if layer is not None and layer > layers:
            of_tool = f", which --like {settings.like} takes" if flag == "--layer" and settings.like else ""
            raise RunError(f"{flag} must be 0 to {layers}, the layers of {checkpoint}, got {layer}{of_tool}")
    return encoder


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
