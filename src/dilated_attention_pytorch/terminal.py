"""Consoles that print text as it is."""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def plain_console(width: int | None = None, file: IO[str] | None = None) -> Console:
    """A console without markup, emoji names and highlighting, all of which change paths that have brackets or colons.

    Args:
        width: columns, where the output is not a terminal; None = 80.
        file: output; None = standard output.
    """
    from rich.console import Console

    is_terminal = (file or sys.stdout).isatty()
    return Console(file=file, width=None if is_terminal else width, markup=False, emoji=False, highlight=False)
