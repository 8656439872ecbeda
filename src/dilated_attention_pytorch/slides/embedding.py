"""Batch embedding of slides: existing embeddings are kept, broken files are reported and skipped."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.machine import choose_device, require

from .claims import part_of, part_of_launcher
from .contents import num_tiles
from .encoder import SlideEncoder
from .files import Source, UnreadableFileError, find_slides
from .patients import read_patients
from .settings import EmbedSettings
from .titan import TitanEncoder
from .worker import Done, Worker

if TYPE_CHECKING:
    from .ray_engine import RayEngine

_POLL_SECONDS = 1.0
"""Pause before looking again at slides that other commands are embedding."""
PACKAGES: Mapping[str, Sequence[str]] = {"h5": ("h5py",), "parquet": ("h5py", "pyarrow")}
"""Packages that each output format needs; slide files themselves are HDF5."""


class TileProgress:
    """Tiles that are done, of all that a run has to embed.

    Args:
        tiles: number of tiles by slide.
        report: called with this object whenever it changes.
    """

    def __init__(self, tiles: Mapping[str, int], report: Callable[[TileProgress], None]) -> None:
        self.tiles_of_input, self._report = dict(tiles), report
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
        """A slide or patient is embedded, skipped, or embedded by another command."""
        self._tiles_of_slides += self.tiles_of_input[slide]
        self._tiles_under_way = max(0.0, self._tiles_under_way - self.tiles_of_input[slide])
        self.slides += 1
        self._report(self)


@dataclass(kw_only=True, slots=True)
class EmbedOutcome:
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
        if settings.engine == "ray":
            require("--engine ray", ("pandas", "pyarrow", "ray"), "ray")
        else:
            choose_device(settings.device)
        self.settings = settings
        found = find_slides(slides)
        self.inputs: dict[str, tuple[Path, ...]] = (
            {name: (path,) for name, path in found.items()}
            if settings.patients is None
            else read_patients(settings.patients, found)
        )
        if settings.numbers_of_part is not None:
            self.inputs = part_of(self.inputs, *settings.numbers_of_part)
        elif (part := part_of_launcher(os.environ)) is not None:
            self.inputs = part_of(self.inputs, *part) | self.inputs  # its own part first
        self._files = checkpoint, output
        is_local = settings.engine == "local"
        # Where Ray computes, the encoder here is checked alone.
        self.worker = Worker(checkpoint, output, settings if is_local else replace(settings, device="cpu", threads=0))

    @property
    def encoder(self) -> SlideEncoder | TitanEncoder:
        """The encoder, on its device."""
        return self.worker.encoder

    def run(
        self,
        *,
        say: Callable[[str], None] = lambda sentence: None,
        skip: Callable[[Path, str], None] = lambda path, reason: None,
        progress: Callable[[TileProgress], None] = lambda state: None,
    ) -> EmbedOutcome:
        """Embed every slide or patient that has no embedding yet.

        Commands that run at the same time over one folder share the work: each input is claimed by one of them, and all
        end when none is left. What a killed command had claimed is taken by another.

        Args:
            say: called with messages before the run.
            skip: called with each skipped file and the reason.
            progress: called whenever some tiles are done.

        Raises:
            RunError: the output folder holds another embedding of the same name, or another command began it with other
                settings; nothing was computed.
        """
        outcome, begun = EmbedOutcome(), time.monotonic()

        def fail(path: Path, reason: str) -> None:
            outcome.failed[path] = reason
            skip(path, reason)

        left: dict[str, tuple[Path, ...]] = {}
        store = self.worker.store
        for name, paths in self.inputs.items():
            try:
                source = Source.of(name, paths)
                before = store.before(source)
            except RunError as error:
                fail(error.path if isinstance(error, UnreadableFileError) else paths[0], str(error))
                continue
            if store.is_of(before, source):
                outcome.kept += 1
            else:
                left[name] = paths
        if outcome.kept:
            what = "slides" if self.settings.patients is None else "patients"
            say(f"{outcome.kept:,} of {len(self.inputs):,} {what} were embedded before")
        if not left:
            return outcome
        names = [*left]
        counted = TileProgress({name: sum(map(num_tiles, paths)) for name, paths in left.items()}, progress)

        def done(result: Done) -> None:
            if result.failed:
                fail(Path(result.failed), result.reason)
            elif result.tiles:
                outcome.embedded += 1
                outcome.tiles += result.tiles
            else:
                outcome.by_others += 1
            del left[result.name]
            counted.finish(result.name)

        try:
            with self._engine(counted.tiles_of_input) as engine:
                while left:
                    before_round = len(left)
                    engine.work([*left.items()], done, say=say, computing=counted.compute)
                    if len(left) == before_round:
                        time.sleep(_POLL_SECONDS)
        finally:
            self.worker.claims.release_all()
        self.worker.claims.remove(names)
        outcome.seconds = time.monotonic() - begun
        return outcome

    @contextmanager
    def _engine(self, tiles: Mapping[str, int]) -> Iterator[Worker | RayEngine]:
        """What computes: this process, or a Ray cluster."""
        if self.settings.engine == "local":
            yield self.worker
            return
        from .ray_engine import RayEngine, cluster

        with cluster(self.settings.ray_address):
            yield RayEngine(self._files, self.settings, self.encoder.config, tiles)
