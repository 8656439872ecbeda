"""Messages of the training commands about stopped runs and resumption."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from dilated_attention_pytorch.training import RunError
from dilated_attention_pytorch.training.checkpoint import checkpoint_step, latest_checkpoint

AUTO = "auto"
"""Value of ``--resume`` that continues a run if one was started."""


def is_auto(resume: Path) -> bool:
    """Whether ``--resume`` is "auto". A folder of that name is ``./auto``."""
    return str(resume) == AUTO


def flags_in(argv: Sequence[str]) -> list[str]:
    """The flags of a command line, without values."""
    return [word.partition("=")[0] for word in argv if word.startswith("--")]


def check_resume_alone(argv: Sequence[str], beside: Sequence[str] = ()) -> None:
    """Raise :class:`RunError` if flags other than ``beside`` are used with ``--resume RUN``."""
    flags = flags_in(argv)
    others = [flag for flag in flags if flag not in ("--resume", "--help", *beside)]
    if "--resume" in flags and others and word_after("--resume", argv) != AUTO:
        raise RunError(
            f"--resume continues with the run's own settings, so {', '.join(others)} cannot be used with it; "
            "leave that out, or start a new run without --resume"
        )


def word_after(flag: str, argv: Sequence[str]) -> str | None:
    """The value of ``flag`` in a command line; None if it is absent."""
    for index, word in enumerate(argv):
        if word == flag and index + 1 < len(argv):
            return argv[index + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def go_on_with(command: str, run: Path) -> str:
    """The command line that resumes a run on the same number of processes."""
    from dilated_attention_pytorch.training.process_group import num_processes

    several = f"torchrun --nproc-per-node {num_processes()} -m dilated_attention_pytorch"
    program = "dilated-attention" if num_processes() == 1 else several
    return f"{program} {command} --resume {shlex.quote(str(run))}"


def leave_at_once(command: str, run: Path) -> NoReturn:
    """Exit from a run that was stopped in the middle of a step, and report what can be resumed."""
    checkpoint = latest_checkpoint(run)
    if checkpoint is None:
        print("\ndilated-attention: stopped at once; there is no checkpoint to go on from", file=sys.stderr)
    else:
        print(
            f"\ndilated-attention: stopped at once; the checkpoint of step {checkpoint_step(checkpoint)} is kept. "
            f"Go on with:\n  {go_on_with(command, run)}",
            file=sys.stderr,
        )
    raise SystemExit(128 + signal.SIGINT)


def stopped(command: str, run: Path, step: int, number: int) -> str:
    """The message for a run that a signal stopped after a step."""
    return (
        f"stopped by {signal.Signals(number).name} after step {step}; a checkpoint is saved in "
        f"{shlex.quote(str(run))}. Go on with:\n  {go_on_with(command, run)}"
    )
