"""The command ``dilated-attention eval``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import tyro

from dilated_attention_pytorch.training.model_evaluation import EvalSettings


@dataclass(kw_only=True, slots=True)
class Eval(EvalSettings):
    """Measure how well a model uses its context.

    Bits per byte of held-out text by context length, also beyond the trained length, and by position; bits for
    repeated random letters; key-value recall. Prints tables, writes the figures as JSON and a plot. Takes runs of
    `train` and of `extend`, finished or not, and transformers models.

        dilated-attention eval runs/mine --context-lengths 1024 4096 16384

    On other text, without the recall tasks:

        dilated-attention eval runs/mine --data texts/ --recall-texts 0 --output-file texts.json
    """

    model: tyro.conf.Positional[str]
    """Run folder, or a transformers model: a folder with config.json and weights, or a name on the hub."""
    output_file: Path | None = None
    """JSON file to write, with a plot next to it. Neither must exist. Default: eval.json in the folder."""

    def run_command(self) -> None:
        """Evaluate the model, print and write the results.

        Raises:
            RunError: see :func:`dilated_attention_pytorch.training.model_evaluation.evaluate_model`.
        """
        from dilated_attention_pytorch.training import preflight

        preflight.check_packages("training")
        from dilated_attention_pytorch.terminal import plain_console
        from dilated_attention_pytorch.training.model_evaluation import evaluate_model

        names = [entry.name for entry in dataclasses.fields(EvalSettings)]
        settings = EvalSettings(**{name: getattr(self, name) for name in names})
        evaluate_model(self.model, settings, self.output_file, plain_console())
