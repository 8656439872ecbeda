"""The command ``dilated-attention embed``."""

from __future__ import annotations

import dataclasses
import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from dilated_attention_pytorch.machine import require
from dilated_attention_pytorch.progress import progress_bar
from dilated_attention_pytorch.slides.settings import EmbedSettings

if TYPE_CHECKING:
    from dilated_attention_pytorch.slides.embedding import TileProgress

_SOME_FAILED = 1


@dataclass(kw_only=True, slots=True)
class Embed(EmbedSettings):
    """Embed whole slides with the slide encoder of GigaPath or TITAN.

    It runs on a CPU or any GPU, without flash-attn or timm. Slides are files of tile features, as TRIDENT, CLAM, STAMP,
    slide2vec or GigaPath's own pipeline write them: HDF5 with the datasets `features` [tiles, 1536] and `coords`
    [tiles, 2], or .pt dictionaries of the same. The checkpoint is slide_encoder.pth of prov-gigapath/prov-gigapath on
    the Hugging Face hub, or the same weights in safetensors; or the folder of MahmoodLab/TITAN, for features of CONCH
    v1.5.

    The output folder gets one file per slide (with --patients, one per patient), written atomically, and _embed.json
    with the settings. The same command again embeds what is missing, also after it was killed; a slide whose file
    changed is embedded again. Unreadable files are reported and skipped, and nothing that `embed` did not write is
    replaced. Exit code: 0 if every slide is embedded, 1 if some were skipped, 2 if nothing could start, 130 after
    Ctrl-C.

        dilated-attention embed features/ --checkpoint slide_encoder.pth --output embeddings/

    CLAM's files do not record the tile size; for tiles of 256 pixels at level 0:

        dilated-attention embed h5_files/ --checkpoint slide_encoder.pth --output embeddings/ --tile-size 256
    """

    slides: tyro.conf.Positional[tuple[Path, ...]]
    """Files of tile features (.h5, .hdf5, .pt, .npz), or folders that contain them."""
    checkpoint: Path
    """Weights: slide_encoder.pth, a .safetensors file, or TITAN's folder. The folder has config.json and
    model.safetensors; no code in it is executed."""
    output: Path
    """Output folder: a new one, or that of an earlier run of the same command."""

    def __post_init__(self) -> None:
        EmbedSettings.__post_init__(self)
        if not self.slides:
            raise ValueError("slides must name at least one file or folder, got none")

    def run_command(self) -> None:
        """Embed missing slides and report skipped files.

        Raises:
            RunError: nothing could start.
            SystemExit: with 1 if files were skipped, with 130 after Ctrl-C.
        """
        require("embedding slides", ("rich",), "slides")
        from dilated_attention_pytorch.slides import Embedder
        from dilated_attention_pytorch.terminal import plain_console

        console = plain_console(width=120)
        errors = console if sys.stdout.isatty() and sys.stderr.isatty() else plain_console(file=sys.stderr)
        settings = EmbedSettings(**{one.name: getattr(self, one.name) for one in dataclasses.fields(EmbedSettings)})
        what = "slides" if self.patients is None else "patients"
        embedder = Embedder(self.slides, self.checkpoint, self.output, settings)
        try:
            with progress_bar(console, "tiles") as show:

                def report(done: TileProgress) -> None:
                    show(f"{done.slides:,} of {done.total_slides:,} {what}", done.tiles, done.total_tiles)

                outcome = embedder.run(
                    say=lambda sentence: console.print(sentence, soft_wrap=True),
                    skip=lambda path, reason: errors.print(f"skipped {path}: {reason}", soft_wrap=True),
                    progress=report,
                )
        except KeyboardInterrupt:
            print(
                f"\ndilated-attention: stopped; what is embedded is kept in {shlex.quote(str(self.output))}, and the "
                "same command goes on",
                file=sys.stderr,
            )
            raise SystemExit(128 + signal.SIGINT) from None
        rate = f", {60 * outcome.embedded / outcome.seconds:,.1f} {what} a minute" if outcome.embedded else ""
        others = f"{outcome.by_others:,} embedded meanwhile by other commands, " if outcome.by_others else ""
        console.print(
            f"{outcome.embedded:,} {what} of {outcome.tiles:,} tiles embedded in {outcome.seconds:,.1f} s{rate}; "
            f"{outcome.kept:,} were there, {others}{len(outcome.failed):,} skipped; written: {self.output}",
            soft_wrap=True,
        )
        if outcome.failed:
            raise SystemExit(_SOME_FAILED)
