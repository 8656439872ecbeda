"""Ctrl-C while the command starts or imports packages.

A ``KeyboardInterrupt`` raised during an import is not reliable: extension modules turn it into an ``ImportError``, and
nothing catches it before the command itself is imported. The package calls this module before all others, so it imports
little.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

MESSAGE = "\ndilated-attention: stopped\n"
_PACKAGE = __name__.partition(".")[0]
_SHOW_CURSOR = "\x1b[?25h"


def leave_on_interrupt(command: Sequence[str]) -> None:
    """Have Ctrl-C end an import at once, if ``command`` is this package's own command; elsewhere it raises
    ``KeyboardInterrupt`` as before.

    Args:
        command: arguments that started the interpreter.
    """
    if is_own_command(command) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def is_own_command(command: Sequence[str]) -> bool:
    """Whether ``command``, the arguments of the interpreter, starts a program of this package."""
    program = _program(command)
    return program == "dilated-attention" or program.partition(".")[0] == _PACKAGE


def is_command_line(command: Sequence[str]) -> bool:
    """Whether ``command``, the arguments of the interpreter, is a line for ``dilated-attention``."""
    return _program(command) in ("dilated-attention", _PACKAGE)


def _program(command: Sequence[str]) -> str:
    """The module or script that the interpreter runs, without its folder and ending; empty for other calls."""
    words = iter(command[1:])
    for word in words:
        if word == "-m":
            return next(words, "")
        if word in ("-W", "-X"):  # Python options with an argument
            next(words, "")
        elif not word.startswith("-"):
            return os.path.splitext(os.path.basename(word))[0]
    return ""


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _leave()
        frame = frame.f_back
    raise KeyboardInterrupt


def _leave() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()
    cursor = _SHOW_CURSOR if os.isatty(2) else ""  # a progress bar may have hidden it
    os.write(2, (cursor + MESSAGE).encode())
    os._exit(128 + signal.SIGINT)
