"""The command ``dilated-attention extend``."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dilated_attention_pytorch.models.card import lines_to_load
from dilated_attention_pytorch.training import ExtensionOutcome, ExtensionSettings, RunError
from dilated_attention_pytorch.training.configuration import read_configuration, with_values

from .stopping import check_resume_alone, is_auto, leave_at_once, stopped, word_after

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(kw_only=True, slots=True)
class Extend(ExtensionSettings):
    """Extend the context length of a pretrained transformers model.

    Evaluates the model on held-out text at its own length and at the new one, replaces its attention, scales its rotary
    positions where needed, trains it on windows that grow to the new length, and evaluates it again. The run folder
    gets the model with its tokenizer, the results (training.json, context.png), metrics and checkpoints. Ctrl-C saves a
    checkpoint and stops; --resume continues.

        dilated-attention extend --model my/llama --context-length 32768 --data texts/ --output runs/long

    With less memory:

        dilated-attention extend --model my/llama --rotary ntk --gradient-checkpointing
    """

    model: str = ""
    """Model to begin with: a folder, or a name on the Hugging Face hub. A decoder with rotary positions (Llama,
    Mistral, Qwen, GPT-NeoX, Gemma ...), with config.json and weights. Without a tokenizer and with a vocabulary of 256,
    tokens are bytes. Required, except with --resume."""
    output: Path = Path("runs/extended")
    """Run folder to create. It must not exist, or be empty."""
    config: Path | None = None
    """TOML file of settings; flags override it. Settings have the flags' names with underscores for dashes. Every run
    writes its own as run.toml."""
    resume: Path | None = None
    """Continue the stopped run in this folder. It keeps its own settings; with a larger --steps it also continues a
    finished run. No other flags are allowed. "auto", with any flags: continue the run that the same command line
    started in --output, if there is one; for jobs that a scheduler restarts."""
    given: tuple[str, ...] = dataclasses.field(default=(), init=False)
    """Names of the settings given on the command line."""

    def __post_init__(self) -> None:
        if self.model:
            ExtensionSettings.__post_init__(self)

    def run_command(self) -> None:
        """Extend the model, or continue, and report.

        Raises:
            RunError, SystemExit: see :func:`main`.
        """
        from dilated_attention_pytorch.terminal import plain_console
        from dilated_attention_pytorch.training import extend, preflight, resume_extension

        preflight.check_packages("training")
        console = plain_console()
        if (self.resume is None or is_auto(self.resume)) and not self.model:
            raise RunError("extend needs --model FOLDER, the pretrained model to begin with (or --resume RUN)")
        try:
            if self.resume is None or is_auto(self.resume):
                outcome = extend(self._settings(), self.output, console, may_resume=self.resume is not None)
            else:
                steps = self.steps if "steps" in self.given else None
                outcome = resume_extension(self.resume, console, steps)
        except KeyboardInterrupt:
            leave_at_once("extend", self.output if self.resume is None or is_auto(self.resume) else self.resume)
        _report(outcome, console)
        if outcome.stopped_by is not None:
            raise SystemExit(128 + outcome.stopped_by)

    def _settings(self) -> ExtensionSettings:
        return ExtensionSettings(
            **{entry.name: getattr(self, entry.name) for entry in dataclasses.fields(ExtensionSettings)}
        )


def defaults_of_extend(argv: Sequence[str]) -> Extend:
    """The defaults of ``extend``, overridden by the file of ``--config`` in ``argv``, the arguments after ``extend``.

    Raises:
        RunError: the file does not exist or holds unknown settings, or other flags are used with ``--resume``.
    """
    check_resume_alone(argv, beside=["--steps"])
    file = word_after("--config", argv)
    return Extend() if file is None else with_values(Extend(), read_configuration(Path(file)), Path(file))


def _report(outcome: ExtensionOutcome, console: Console) -> None:
    from rich.table import Table

    from dilated_attention_pytorch.training.record import STATES

    run = shlex.quote(str(outcome.run))
    if outcome.stopped_by is not None:
        words = stopped("extend", outcome.run, outcome.step, outcome.stopped_by)
        console.print(words, highlight=False, soft_wrap=True)
        return
    table = Table("held-out bits per byte", title_justify="left")
    lengths = (outcome.own_length, outcome.length)
    for length in lengths:
        table.add_column(f"reading {length:,} tokens", justify="right")
    for state, words in STATES.items():
        bits = outcome.bits_per_byte[state]
        table.add_row(words, *(f"{bits[length]:.3f}" for length in lengths))
    console.print(table)
    console.print(
        f"in {run}: model.safetensors, config.json, README.md, training.json, run.toml, metrics.jsonl, context.png\n"
        "use it with:\n" + "\n".join(f"  {line}" for line in lines_to_load(str(outcome.run))),
        highlight=False,
        soft_wrap=True,
    )
