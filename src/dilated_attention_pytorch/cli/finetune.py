"""The command ``dilated-attention finetune``."""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.machine import require
from dilated_attention_pytorch.slides.finetune.settings import FinetuneSettings

if TYPE_CHECKING:
    from dilated_attention_pytorch.slides.finetune.run import FinetuneProgress

_PACKAGES = ("accelerate", "filelock", "h5py", "plotly", "rich", "safetensors", "transformers")
_LINE_SECONDS = 5.0
"""Between two lines of progress where the output is no terminal."""


@dataclass(kw_only=True, slots=True)
class Finetune(FinetuneSettings):
    """Fine-tune GigaPath's slide encoder on labels of slides or patients, and test it on patients held out.

    Slides are files of tile features as for `embed`; LABELS is a CSV or TSV file with the columns slide and label, and
    optionally patient and split.

        dilated-attention finetune features/ labels.csv --checkpoint slide_encoder.pth --output runs/task --folds 5

    A linear probe on embeddings that `embed` wrote:

        dilated-attention finetune embeddings/ labels.csv --freeze --output runs/probe

    The output folder gets a folder for each fold and seed (model.safetensors, predictions.csv, run.json), metrics.json
    and report.html. The same command again goes on with what is missing, also after it was killed; commands that run at
    the same time over one folder share its runs. `dilated-attention embed --prefix slide_encoder.` takes the weights.
    Exit code: 0 if all is written, 2 if something must be changed, 130 after Ctrl-C.
    """

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SLIDES... LABELS")]
    """Files of tile features, or folders that contain them (with --freeze also embeddings that `embed` wrote); and last
    the CSV or TSV file of the labels, one slide a line."""
    checkpoint: Path | None = None
    """Weights of the slide encoder: slide_encoder.pth, or a .safetensors file; none for embeddings."""
    output: Path
    """Output folder: a new one, or that of an earlier run of the same command."""

    def __post_init__(self) -> None:
        FinetuneSettings.__post_init__(self)
        if len(self.paths) < 2:
            raise ValueError(
                f"name at least one file or folder of slides, and then the labels, got {list(map(str, self.paths))}"
            )

    def run_command(self) -> None:
        """Train all runs that are not finished.

        Raises:
            RunError: something must be changed; the message says what.
            SystemExit: with 130 after Ctrl-C.
        """
        require("fine-tuning", (*_PACKAGES, *(("peft",) if self.lora is not None else ())), "finetune")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RunError(
                "finetune trains one run in one process: start the same command once per GPU (CUDA_VISIBLE_DEVICES), "
                "without torchrun; commands over one --output share its folds and seeds"
            )
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        from dilated_attention_pytorch.slides.finetune.run import Finetuner
        from dilated_attention_pytorch.terminal import plain_console

        console = plain_console(width=120)
        names = [one.name for one in dataclasses.fields(FinetuneSettings)]
        settings = FinetuneSettings(**{name: getattr(self, name) for name in names})
        tuner = Finetuner(self.paths[:-1], self.paths[-1], self.checkpoint, self.output, settings)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} tiles", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
            bar, last, what = bars.add_task("", total=None), time.monotonic(), ""

            def report(state: FinetuneProgress) -> None:
                nonlocal last, what
                if state.what != what:
                    what = state.what
                    bars.reset(bar)
                bars.update(bar, completed=state.tiles, total=state.total_tiles, description=what)
                if not console.is_terminal and time.monotonic() - last >= _LINE_SECONDS:
                    last = time.monotonic()
                    console.print(f"{what}, {state.tiles:,} of {state.total_tiles:,} tiles", soft_wrap=True)

            try:
                outcome = tuner.run(say=lambda sentence: console.print(sentence, soft_wrap=True), progress=report)
            except KeyboardInterrupt:
                bars.stop()
                print(
                    f"\ndilated-attention: stopped; finished epochs are kept in {shlex.quote(str(self.output))}, and "
                    "the same command goes on",
                    file=sys.stderr,
                )
                raise SystemExit(128 + signal.SIGINT) from None
        if outcome.metrics is None:
            missing = outcome.total - outcome.finished
            console.print(
                f"{missing:,} of {outcome.total:,} runs are with other commands; the last one writes the metrics"
            )
            return
        for name, of in outcome.metrics["pooled"].items():
            console.print(
                f"{name}: {of['value']:.3f} ({of['low']:.3f} to {of['high']:.3f}, 95 % of resamples of patients)"
            )
        console.print(
            f"runs trained: {outcome.runs:,}; there before: {outcome.total - outcome.runs:,}; written: {self.output}",
            soft_wrap=True,
        )
