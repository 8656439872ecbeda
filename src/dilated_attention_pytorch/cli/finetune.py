"""The command ``dilated-attention finetune``."""

from __future__ import annotations

import dataclasses
import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.machine import require
from dilated_attention_pytorch.progress import progress_bar
from dilated_attention_pytorch.slides.finetune.settings import FinetuneSettings

_PACKAGES = ("accelerate", "filelock", "h5py", "plotly", "rich", "safetensors", "sklearn", "transformers")


@dataclass(kw_only=True, slots=True)
class Finetune(FinetuneSettings):
    """Fine-tune GigaPath's slide encoder on labels, and test it.

    Slides are files of tile features as for `embed`; LABELS is a CSV or TSV file with the columns slide and label, and
    optionally patient and split. The test is on held-out patients.

    The output folder gets a folder for each fold and seed (model.safetensors, predictions.csv, run.json), metrics.json
    and report.html. The same command again goes on with what is missing, also after it was killed; commands that run at
    the same time over one folder share its runs. `dilated-attention embed --prefix slide_encoder.` takes the weights.
    Exit code: 0 if all is written, 2 if something must be changed, 130 after Ctrl-C.

        dilated-attention finetune features/ labels.csv --checkpoint slide_encoder.pth --output runs/task --folds 5

    A linear probe on embeddings that `embed` wrote:

        dilated-attention finetune embeddings/ labels.csv --freeze --output runs/probe
    """

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SLIDES... LABELS")]
    """Files of tile features, or folders that contain them (with --freeze also embeddings that `embed` wrote); last,
    the file of the labels, one slide a line."""
    checkpoint: Path | None = None
    """Weights: slide_encoder.pth, or a .safetensors file. None for embeddings."""
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
        if self.engine == "ray":
            require("--engine ray", ("pandas", "pyarrow", "ray"), "ray")
        from dilated_attention_pytorch.training.process_group import num_processes

        if num_processes() > 1:
            raise RunError(
                "finetune trains one run in one process: start the same command once per GPU (CUDA_VISIBLE_DEVICES), "
                "without torchrun; commands over one --output share its folds and seeds"
            )
        from dilated_attention_pytorch.slides.finetune.run import Finetuner
        from dilated_attention_pytorch.terminal import plain_console

        console = plain_console(width=120)
        names = [one.name for one in dataclasses.fields(FinetuneSettings)]
        settings = FinetuneSettings(**{name: getattr(self, name) for name in names})
        tuner = Finetuner(self.paths[:-1], self.paths[-1], self.checkpoint, self.output, settings)
        try:
            with progress_bar(console, "tiles") as show:
                outcome = tuner.run(
                    say=lambda sentence: console.print(sentence, soft_wrap=True),
                    progress=lambda state: show(state.what, state.tiles, state.total_tiles),
                )
        except KeyboardInterrupt:
            print(
                f"\ndilated-attention: stopped; finished epochs are kept in {shlex.quote(str(self.output))}, and the "
                "same command goes on",
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
