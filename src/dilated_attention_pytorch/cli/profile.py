"""The command ``dilated-attention profile``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(kw_only=True, slots=True)
class ProfileRun:
    """Profile training steps of a run with torch.profiler.

    The steps are those of a new model with the run's settings, on a batch of its data, in one process. Prints the
    longest operators; the output folder gets that table (profile.txt) and trace.json, for https://ui.perfetto.dev or
    chrome://tracing.

        dilated-attention profile runs/mine
    """

    run: tyro.conf.Positional[Path]
    """Run folder of `train`, finished or not."""
    steps: int = 3
    """Profiled steps, after one to warm up."""
    output: Path = Path("runs/profile")
    """Folder to create. It must not exist, or be empty."""

    def run_command(self) -> None:
        """Profile the run and print the table.

        Raises:
            RunError: see :func:`dilated_attention_pytorch.training.profiled_step.profile_run`.
        """
        from dilated_attention_pytorch.training import preflight

        preflight.check_packages("training")
        from dilated_attention_pytorch.training.profiled_step import TABLE_NAME, TRACE_NAME, profile_run

        print(profile_run(self.run, self.output, steps=self.steps))
        print(f"written: {self.output / TRACE_NAME}, {self.output / TABLE_NAME}")
