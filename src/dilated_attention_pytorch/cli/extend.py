"""``dilated-attention extend``."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dilated_attention_pytorch.training import ExtensionOutcome, ExtensionSettings, RunError
from dilated_attention_pytorch.training.configuration import read_configuration, with_values

from .stopping import check_resume_alone, is_auto, leave_at_once, stopped, word_after

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(kw_only=True, slots=True)
class Extend(ExtensionSettings):
    """Take a pretrained model of transformers to longer texts.

    Measures the model on held-out text at its own length and at the new one, scales its rotary positions, gives it
    dilated attention, measures it again, trains it on windows that grow to the new length, and measures it again.
    The run folder gets training.json with the figures, metrics.jsonl, tensorboard/, context.png (bits per byte by
    position), the last checkpoints, and at the end config.json, model.safetensors and the tokenizer. Ctrl-C saves a
    checkpoint and ends; --resume goes on.

        dilated-attention extend --model my/llama --length 32768 --data texts/ --output runs/long
    """

    model: str = ""
    """A decoder with rotary positions (Llama, Mistral, Qwen, GPT-NeoX, Gemma ...): a folder with config.json and
    weights, or a name on the Hugging Face hub. Without a tokenizer, and with 256 tokens, its tokens are bytes. To be
    given, except beside --resume."""
    output: Path = Path("runs/extended")
    """Run folder to make. It must not exist, or be empty."""
    config: Path | None = None
    """TOML file with settings by their names, underscores for dashes; flags change it. Every run leaves its own as
    run.toml."""
    resume: Path | None = None
    """Go on with the stopped run in this folder, with all its own settings; no other flag goes with it. "auto", beside
    any flags: go on with the run that the same command line began in --output, if there is one, for jobs that a
    scheduler starts again."""

    def __post_init__(self) -> None:
        if self.model:
            ExtensionSettings.__post_init__(self)

    def run_command(self) -> None:
        """Extend or go on, and report.

        Raises:
            RunError, SystemExit: see :func:`main`.
        """
        from rich.console import Console

        from dilated_attention_pytorch.training import extend, preflight, resume_extension

        preflight.check_packages("training")
        console = Console()
        if (self.resume is None or is_auto(self.resume)) and not self.model:
            raise RunError("extend needs --model FOLDER, the pretrained model to begin with (or --resume RUN)")
        try:
            if self.resume is None or is_auto(self.resume):
                outcome = extend(self._settings(), self.output, console, may_resume=self.resume is not None)
            else:
                outcome = resume_extension(self.resume, console)
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
    """The defaults of ``extend``, changed by the file of ``--config`` in ``argv``, the words after ``extend``.

    Raises:
        RunError: there is no such file, it holds what is no setting, or other flags stand beside ``--resume``.
    """
    check_resume_alone(argv)
    file = word_after("--config", argv)
    return Extend() if file is None else with_values(Extend(), read_configuration(Path(file)), Path(file))


def _report(outcome: ExtensionOutcome, console: Console) -> None:
    from rich.table import Table

    run = shlex.quote(str(outcome.run))
    if outcome.stopped_by is not None:
        words = stopped("extend", outcome.run, outcome.step, outcome.stopped_by)
        console.print(words, highlight=False, soft_wrap=True)
        return
    table = Table("held-out bits per byte", title_justify="left")
    lengths = (outcome.own_length, outcome.length)
    for length in lengths:
        table.add_column(f"reading {length:,} tokens", justify="right")
    for state, words in (("before", "before"), ("replaced", "after replacement"), ("trained", "after training on")):
        bits = outcome.bits_per_byte[state]
        table.add_row(words, *(f"{bits[length]:.3f}" for length in lengths))
    console.print(table)
    console.print(
        f"in {run}: model.safetensors, config.json, training.json, run.toml, metrics.jsonl, context.png\n"
        "use it with:\n"
        "  from transformers import AutoModelForCausalLM\n"
        "  from dilated_attention_pytorch.integrations import register\n"
        "  register()\n"
        f'  model = AutoModelForCausalLM.from_pretrained("{outcome.run}", attn_implementation="dilated")',
        highlight=False, soft_wrap=True,
    )  # fmt: skip
