"""Rewinding a run to its newest checkpoint within the same processes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from .together import is_first_process

if TYPE_CHECKING:
    from rich.console import Console

_Outcome = TypeVar("_Outcome")


class RewindRequested(Exception):
    """Raised in all processes alike to resume from the newest checkpoint; the message gives the reason."""


def with_rewind(begin: Callable[[], _Outcome], resume: Callable[[], _Outcome], console: Console) -> _Outcome:
    """The result of ``begin``, or of ``resume`` after every :class:`RewindRequested`.

    ``resume`` does the same as ``--resume``, from reading the record to verifying the checkpoint; no state of the
    failed attempt is kept in memory.
    """
    attempt = begin
    while True:
        try:
            return attempt()
        except RewindRequested as error:
            reason = str(error)
        gc.collect()  # model and trainer form reference cycles
        if is_first_process():
            console.print(reason, highlight=False, markup=False, soft_wrap=True)
        attempt = resume
