"""The command ``dilated-attention report``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(kw_only=True, slots=True)
class Report:
    """Compare runs on one HTML page: charts, results, and settings.

    Takes runs of `train` and of `extend`, finished or not. The page shows the settings that differ, and needs no
    network access.

        dilated-attention report runs/window runs/longnet --output-file compared.html
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders."""
    output_file: Path = Path("report.html")
    """HTML page to write. It must not exist."""

    def run_command(self) -> None:
        """Write the page.

        Raises:
            RunError: see :func:`dilated_attention_pytorch.training.report.write_report`.
        """
        from dilated_attention_pytorch.training import preflight

        preflight.check_packages("training")
        from dilated_attention_pytorch.terminal import plain_console
        from dilated_attention_pytorch.training.report import write_report

        runs = write_report(self.runs, self.output_file)
        console = plain_console()
        for run in runs:
            console.print(
                f"{run.name}: {run.figures['state']}, {run.figures['steps']} steps", highlight=False, soft_wrap=True
            )
        console.print(f"written: {self.output_file}", highlight=False, soft_wrap=True)
