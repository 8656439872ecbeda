"""Progress of what takes time: a bar or a spinner on a terminal, else a line every few seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

Show: TypeAlias = Callable[[str, float, float], None]
"""Shows what is done, how much of it is done, and how much there is. When less is done, the clock starts again."""

LINE_SECONDS = 10.0
"""Least time between two lines where the output is no terminal; what ends sooner prints none."""
_PART = 1 / 50
"""Least part of the time so far between two lines: those of a long run do not fill its log."""
_Item = TypeVar("_Item")


class Pace:
    """When the next line of progress is due."""

    def __init__(self) -> None:
        self._begun = self._last = time.monotonic()

    def is_due(self) -> bool:
        """Whether a line is due now; if so, the next one is due later."""
        now = time.monotonic()
        if now - self._last < max(LINE_SECONDS, _PART * (now - self._begun)):
            return False
        self._last = now
        return True


@contextmanager
def progress_bar(console: Console, unit: str) -> Iterator[Show]:
    """Show progress on ``console`` within the context, counted in ``unit``."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn(f"{{task.completed:,.0f}} of {{task.total:,.0f}} {unit}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar, pace, before = bars.add_task("", total=0, visible=False), Pace(), 0.0

        def show(what: str, done: float, total: float) -> None:
            nonlocal before
            if done < before:
                bars.reset(bar, total=total)
            before = done
            bars.update(bar, completed=done, total=total, description=what, visible=True)
            if not console.is_terminal and pace.is_due():
                console.print(f"{what}, {done:,.0f} of {total:,.0f} {unit}", highlight=False, soft_wrap=True)

        yield show


def counted(items: Sequence[_Item], what: str, unit: str, console: Console) -> Iterator[_Item]:
    """The items, with progress of the loop over them."""
    with progress_bar(console, unit) as show:
        for number, item in enumerate(items):
            show(what, number, len(items))
            yield item


@contextmanager
def spinner(what: str, console: Console) -> Iterator[None]:
    """Show on ``console`` that ``what`` goes on within the context, of which nothing can be counted."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    is_over, begun = threading.Event(), time.monotonic()

    def print_lines() -> None:
        while not is_over.wait(LINE_SECONDS):
            console.print(f"{what}, {time.monotonic() - begun:.0f} s so far", highlight=False, soft_wrap=True)

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        shown.add_task(what, total=None)
        if console.is_terminal:
            yield
            return
        lines = threading.Thread(target=print_lines, daemon=True)
        lines.start()
        try:
            yield
        finally:
            is_over.set()
            lines.join()
