"""The command ``dilated-attention diagnose``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(kw_only=True, slots=True)
class Diagnose:
    """Say what the log of a run shows: time, memory, slow ranks, faults.

    Takes runs of `train` and of `extend`, finished or not. Says too which error ended a run.

        dilated-attention diagnose runs/mine
    """

    run: tyro.conf.Positional[Path]
    """Run folder."""

    def run_command(self) -> None:
        """Print the sentences.

        Raises:
            RunError: see :func:`dilated_attention_pytorch.training.diagnosis.diagnose`.
        """
        from dilated_attention_pytorch.training import preflight

        preflight.check_packages("training")
        from dilated_attention_pytorch.training.diagnosis import diagnose

        for sentence in diagnose(self.run):
            print(sentence)
