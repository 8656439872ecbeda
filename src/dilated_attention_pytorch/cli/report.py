"""``dilated-attention report``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(kw_only=True, slots=True)
class Report:
    """Runs side by side as one page for the browser: charts, figures, and the settings that differ.

    Runs of `train` and of `extend`, also those that are not finished. The page needs no network.

        dilated-attention report runs/window runs/longnet --output compared.html
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders."""
    output: Path = Path("report.html")
    """Page to write. It must not exist."""

    def run_command(self) -> None:
        """Write the page.

        Raises:
            RunError: see :func:`dilated_attention_pytorch.training.report.write_report`.
        """
        from dilated_attention_pytorch.training import preflight

        preflight.check_packages("training")
        from rich.console import Console

        from dilated_attention_pytorch.training.report import write_report

        runs = write_report(self.runs, self.output)
        console = Console()
        for run in runs:
            console.print(
                f"{run.name}: {run.figures['state']}, {run.figures['steps']} steps", highlight=False, soft_wrap=True
            )
        console.print(f"written: {self.output}", highlight=False, soft_wrap=True)
