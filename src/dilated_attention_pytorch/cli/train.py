"""``dilated-attention train``."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dilated_attention_pytorch.training import PRESETS, Outcome, RunError, TrainSettings

from .stopping import check_resume_alone, leave_at_once, stopped

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(kw_only=True, slots=True)
class Train(TrainSettings):
    """Train a LongNet language model on text.

    Without flags: the preset for this machine, on the source files of Python's standard library. The run folder gets
    config.json, training.json, metrics.jsonl, tensorboard/, loss.png, sample.txt, model.safetensors and the last
    checkpoints. Ctrl-C saves a checkpoint and ends; --resume goes on.
    """

    preset: str = "auto"
    """Which numbers to begin with: cpu (minutes on two cores), gpu (100 million parameters, 32,768 bytes of context),
    gpu-large (730 million, 65,536 bytes) or tiny (seconds). "auto": gpu if there is a CUDA device, else cpu. Every
    other flag changes one number of it; --help after --preset shows them."""
    output: Path = Path("runs/longnet")
    """Run folder to make. It must not exist, or be empty."""
    resume: Path | None = None
    """Go on with the stopped run in this folder, with all its own settings; no other flag goes with it."""

    def run_command(self) -> None:
        """Train or go on, and report.

        Raises:
            RunError, SystemExit: see :func:`main`.
        """
        from rich.console import Console

        from dilated_attention_pytorch.training import preflight, resume, train
        from dilated_attention_pytorch.training.together import is_first_process

        preflight.check_packages("training")
        from dilated_attention_pytorch.training.distribution import leaving_together

        console = Console()
        try:
            with leaving_together():
                if self.resume is not None:
                    outcome = resume(self.resume, console)
                else:
                    outcome = train(_settings(self), self.output, console)
        except KeyboardInterrupt:
            leave_at_once("train", self.output if self.resume is None else self.resume)
        if is_first_process():
            _report(outcome, console)
        if outcome.stopped_by is not None:
            raise SystemExit(128 + outcome.stopped_by)


def preset_of(argv: Sequence[str]) -> Train:
    """The defaults of ``train``: those of the preset that ``argv`` names, the words after ``train``.

    Raises:
        RunError: there is no such preset, or other flags beside ``--resume``.
    """
    name = "auto"
    for index, word in enumerate(argv):
        if word == "--preset" and index + 1 < len(argv):
            name = argv[index + 1]
        elif word.startswith("--preset="):
            name = word.partition("=")[2]
    check_resume_alone(argv)
    if name not in (*PRESETS, "auto"):
        raise RunError(f"--preset {name}: there is no such preset; choose one of auto, {', '.join(PRESETS)}")
    chosen = name
    if name == "auto":
        import torch

        chosen = "gpu" if torch.cuda.is_available() else "cpu"
    settings = PRESETS[chosen]()
    values = {entry.name: getattr(settings, entry.name) for entry in dataclasses.fields(settings)}
    return Train(**values, preset=name)


def _settings(command: Train) -> TrainSettings:
    return TrainSettings(**{entry.name: getattr(command, entry.name) for entry in dataclasses.fields(TrainSettings)})


def _report(outcome: Outcome, console: Console) -> None:
    from rich.markup import escape

    run = shlex.quote(str(outcome.run))
    if outcome.stopped_by is not None:
        words = stopped("train", outcome.run, outcome.step, outcome.stopped_by)
        console.print(words, highlight=False, soft_wrap=True)
        return
    console.rule("sample")
    console.print(escape(outcome.sample or ""), highlight=False, soft_wrap=True)
    console.rule("result")
    console.print(
        f"held-out: {outcome.bits_per_byte:.3f} bits per byte; xz -9e takes {outcome.xz_bits_per_byte:.3f} for the "
        "same bytes, which it sees as one text",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    console.print(_quarters_in_words(outcome), highlight=False, soft_wrap=True)
    console.print(
        f"in {run}: model.safetensors, config.json, training.json, metrics.jsonl, tensorboard/, loss.png, sample.txt\n"
        f"generate from it with:\n  dilated-attention generate {run} --prompt 'def main('",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def _quarters_in_words(outcome: Outcome) -> str:
    if outcome.quarters is None or outcome.last_quarter_alone is None:
        return "by quarter of the context: not measured, as no held-out file is as long as the context"
    quarters, alone = outcome.quarters, outcome.last_quarter_alone
    numbers = ", ".join(f"{bits:.3f}" for bits in quarters)
    fall = quarters[0] - quarters[-1]
    compared = f"the last is {fall:.3f} lower than the first" if fall > 0 else "the last is not lower than the first"
    return (
        f"held-out bits per byte by quarter of the context: {numbers}: {compared}\n"
        f"the last quarter without the three before it: {alone:.3f}; reading them is worth {alone - quarters[-1]:.3f}"
    )
