"""``dilated-attention eval``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import tyro

from dilated_attention_pytorch.training.model_evaluation import EvalSettings


@dataclass(kw_only=True, slots=True)
class Eval(EvalSettings):
    """Measure a model by how far back it reads: bits per byte, and what it still knows of what it read.

    Bits per byte of held-out text by the number of tokens that the model reads, also beyond its own length, and by
    position; the bits that it takes for random letters where they come again; values by the keys that they came with.
    Tables on the terminal, figures as JSON, and a picture beside them. It takes runs of `train` and of `extend`,
    finished or not, and models of transformers.

        dilated-attention eval runs/mine --lengths 1024 4096 16384
    """

    model: tyro.conf.Positional[str]
    """Run folder, or a model of transformers: a folder with config.json and weights, or a name on the hub."""
    output: Path | None = None
    """JSON file to write, with a picture beside it; neither must exist. Without it: eval.json in the folder."""

    def run_command(self) -> None:
        """Measure, print and write.

        Raises:
            RunError: see :func:`dilated_attention_pytorch.training.model_evaluation.evaluate_model`.
        """
        from dilated_attention_pytorch.training import preflight

        preflight.check_packages("training")
        from rich.console import Console

        from dilated_attention_pytorch.training.model_evaluation import evaluate_model

        names = [entry.name for entry in dataclasses.fields(EvalSettings)]
        settings = EvalSettings(**{name: getattr(self, name) for name in names})
        evaluate_model(self.model, settings, self.output, Console())
