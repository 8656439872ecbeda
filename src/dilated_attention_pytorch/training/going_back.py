"""Going back to the newest checkpoint within the same processes, where a batch broke the run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from .together import is_first_process

if TYPE_CHECKING:
    from rich.console import Console

_Outcome = TypeVar("_Outcome")


class GoBack(Exception):
    """The run is to go on from its newest checkpoint; the message says why. Raised in all of its processes alike."""


def going_back(begin: Callable[[], _Outcome], go_on: Callable[[], _Outcome], console: Console) -> _Outcome:
    """What ``begin`` returns, or ``go_on`` once the run has gone back, as often as it does.

    Going on is what ``--resume`` does, from reading the record to verifying the checkpoint: nothing of the broken run
    is left in memory.
    """
    attempt = begin
    while True:
        try:
            return attempt()
        except GoBack as error:
            reason = str(error)
        gc.collect()  # model and trainer refer to each other
        if is_first_process():
            console.print(reason, highlight=False, markup=False, soft_wrap=True)
        attempt = go_on
