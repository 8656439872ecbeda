"""The command ``dilated-attention heatmap``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from dilated_attention_pytorch.errors import RunError


@dataclass(kw_only=True, slots=True)
class Heatmap:
    """Draw which tiles a slide embedding is made from.

    Each square is a tile where it lies on the slide. Its colour is the attention of the class token in one layer,
    divided by the mean over the tiles; grey tiles are not seen in that layer. --rollout draws what can reach the
    embedding through all layers; neither says whether a tile speaks for or against a diagnosis. --contribution does,
    for a model that finetune trained: red tiles speak for the class, blue ones against it.

        dilated-attention embed features/ --checkpoint slide_encoder.pth --output embeddings/ --maps
        dilated-attention heatmap embeddings/slide1.h5
    """

    file: tyro.conf.Positional[Path]
    """A file that `embed --maps`, `embed --rollout` or `finetune --maps` wrote."""
    output_file: Path | None = None
    """Picture to write; its ending selects the format. Default: beside the file, named after the slide."""
    slide: str | None = None
    """Slide of a patient (embed --patients). Default: the only one."""
    layer: int | None = None
    """Layer, from 1. Default: the last."""
    head: int | None = None
    """Head, from 0. Default: the mean over the heads."""
    rollout: bool = False
    """Draw the rollout over all layers."""
    contribution: str | None = None
    """Draw the contributions to this class, label or value."""
    thumbnail: Path | None = None
    """Picture of the whole slide, drawn below the tiles."""

    def run_command(self) -> None:
        """Write the picture.

        Raises:
            RunError: the file holds no maps, or the picture cannot be drawn or written.
        """
        from dilated_attention_pytorch.machine import require
        from dilated_attention_pytorch.output import check_new_file, replacing
        from dilated_attention_pytorch.progress import spinner

        for package, extra in (("h5py", "slides"), ("matplotlib", "plot")):
            require("drawing a heat map", (package,), extra)
        from matplotlib.backend_bases import FigureCanvasBase

        from dilated_attention_pytorch.slides.heatmap import (
            draw,
            of_attention,
            of_contribution,
            of_rollout,
            read_scores,
        )
        from dilated_attention_pytorch.terminal import plain_console

        of_all_layers = self.rollout + (self.contribution is not None)
        if of_all_layers + (self.layer is not None or self.head is not None) > 1:
            raise RunError(
                "--rollout and --contribution go through all layers and heads: leave out --layer and --head, and pass "
                "one of the two"
            )
        output = (
            self.file.with_name(f"{self.slide or self.file.stem}.png") if self.output_file is None else self.output_file
        )
        kinds = FigureCanvasBase.get_supported_filetypes()
        if output.suffix[1:].lower() not in kinds:
            raise RunError(f"--output-file {output}: pictures end in .{', .'.join(sorted(kinds))}")
        check_new_file(output)
        scores = read_scores(self.file, self.slide)
        if self.contribution is not None:
            values, what = of_contribution(scores, self.contribution)
        else:
            values, what = of_rollout(scores) if self.rollout else of_attention(scores, self.layer, self.head)
        title = f"{self.slide or self.file.stem}: {what}"
        with spinner(f"drawing {len(values):,} tiles", plain_console()), replacing(output) as staged:
            figure = draw(scores, values, title, thumbnail=self.thumbnail)
            figure.savefig(staged, format=output.suffix[1:].lower(), dpi=150)
        print(f"written: {output}")
