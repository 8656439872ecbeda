"""What the commands that train say of a run that was stopped, and of taking it up."""

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
"""What ``--resume`` says of a run that may have begun."""


def is_auto(resume: Path) -> bool:
    """Whether a command line goes on with what it began itself. A folder of that name is ``./auto``."""
    return str(resume) == AUTO


def flags_in(argv: Sequence[str]) -> list[str]:
    """The flags of a command line, without their values."""
    return [word.partition("=")[0] for word in argv if word.startswith("--")]


def check_resume_alone(argv: Sequence[str], beside: Sequence[str] = ()) -> None:
    """Raise :class:`RunError` for other flags beside ``--resume RUN`` than those ``beside`` it."""
    flags = flags_in(argv)
    others = [flag for flag in flags if flag not in ("--resume", "--help", *beside)]
    if "--resume" in flags and others and word_after("--resume", argv) != AUTO:
        raise RunError(
            f"--resume goes on with the run's own settings, so {', '.join(others)} cannot go with it; "
            "leave that out, or begin anew without --resume"
        )


def word_after(flag: str, argv: Sequence[str]) -> str | None:
    """What a command line gives for ``flag``; None where it does not."""
    for index, word in enumerate(argv):
        if word == flag and index + 1 < len(argv):
            return argv[index + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def go_on_with(command: str, run: Path) -> str:
    """The command line that takes a run up, on as many processes as there are."""
    from dilated_attention_pytorch.training.together import num_processes

    several = f"torchrun --nproc-per-node {num_processes()} -m dilated_attention_pytorch"
    program = "dilated-attention" if num_processes() == 1 else several
    return f"{program} {command} --resume {shlex.quote(str(run))}"


def leave_at_once(command: str, run: Path) -> NoReturn:
    """End the process of a run that was stopped in the middle of a step, and say what is left of it."""
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
    """What is said of a run that a signal stopped after a step."""
    return (
        f"stopped by {signal.Signals(number).name} after step {step}; a checkpoint is saved in "
        f"{shlex.quote(str(run))}. Go on with:\n  {go_on_with(command, run)}"
    )
