"""``dilated-attention plan``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.training import TrainSettings

from .train import defaults_of, settings_of

if TYPE_CHECKING:
    from dilated_attention_pytorch.capacity import RunPlan
    from dilated_attention_pytorch.data_sheets import DataSheet

_PARTS = {
    "weights": "weights", "gradients": "gradients", "optimizer": "optimizer", "activations": "activations",
    "loss": "logits and loss", "temporaries": "temporaries", "attention": "attention itself",
    "exchange": "exchange",
}  # fmt: skip


@dataclass(kw_only=True, slots=True)
class Plan(TrainSettings):
    """Say what a training run takes, before anything of it is there.

    The flags are those of train. For one process: memory at the peak of a step, by part, counted from the step itself
    on tensors that hold nothing; operations; and the least time of a step at the rate of the device's data sheet.

    A preset on an H200: plan --preset gpu --hardware H200

    The longest text: plan --preset gpu --hardware H200 --longest
    """

    preset: str = "auto"
    """Which numbers to begin with, see train."""
    config: Path | None = None
    """TOML file with settings, see train."""
    hardware: str = "H100 SXM"
    """Name of the device. A name that is not known is answered with those that are."""
    processes: int = 1
    """Devices, each with a process."""
    longest: bool = False
    """Look for the longest --context-length that fits, too."""
    output: Path | None = None
    """JSON file to write. Without it: none."""

    def run_command(self) -> None:
        """Print the plan, write the file.

        Raises:
            RunError: no such device, settings that do not go with so many processes, or a file that cannot be written.
        """
        from dilated_attention_pytorch.capacity import longest_context, plan_run
        from dilated_attention_pytorch.data_sheets import sheet_of
        from dilated_attention_pytorch.output import check_new_file, write_text
        from dilated_attention_pytorch.training import preflight

        if self.output is not None:
            check_new_file(self.output)
        try:
            sheet = sheet_of(self.hardware)
        except ValueError as error:
            raise RunError(f"--hardware: {error}") from error
        preflight.check_packages("training")
        preflight.check_optimizer(self.optimizer)
        settings = settings_of(self)
        plan = plan_run(settings, self.processes, sheet)
        longest = longest_context(settings, self.processes, sheet.memory_bytes) if self.longest else None
        _print(plan, sheet, self.processes, longest)
        if self.output is not None:
            written = {
                "hardware": sheet.name, "processes": self.processes, "settings": settings.to_dict(),
                **dataclasses.asdict(plan), "total_bytes": plan.footprint.total, "longest_context_length": longest,
            }  # fmt: skip
            write_text(self.output, json.dumps(written, indent=1, default=str) + "\n")


def defaults_of_plan(argv: Sequence[str]) -> Plan:
    """The defaults of ``plan``: those of ``train`` for the same words."""
    train = defaults_of(argv)
    fields = {entry.name: getattr(train, entry.name) for entry in dataclasses.fields(TrainSettings)}
    return Plan(**fields, preset=train.preset)


def _print(plan: RunPlan, sheet: DataSheet, processes: int, longest: int | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from dilated_attention_pytorch.memory import in_bytes

    console = Console()
    devices = f"{processes} x {sheet.name}" if processes > 1 else sheet.name
    table = Table("memory of a process at the peak of a step", "", title=devices, title_justify="left")
    for name, words in _PARTS.items():
        table.add_row(words, in_bytes(getattr(plan.footprint, name)))
    table.add_section()
    table.add_row("all", in_bytes(plan.footprint.total))
    table.add_row("the device has", in_bytes(plan.memory_bytes))
    console.print(table)
    left = plan.memory_bytes - plan.footprint.total
    verdict = f"fits, with {in_bytes(left)} left" if plan.fits else f"does not fit: {in_bytes(-left)} are missing"
    console.print(
        f"{verdict}\n{plan.tokens:,} tokens a step, {plan.computed_flops:.4g} operations of matrix products, "
        f"{plan.model_flops:.4g} of them counted for model FLOP utilisation\nat the data sheet's rate a step takes "
        f"{plan.least_seconds:.3g} s; no step is faster, and real ones reach a part of that rate",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    if longest is not None:
        console.print(f"the longest text that fits: {longest:,} tokens", highlight=False)
