"""A progress bar of tiles."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_LINE_SECONDS = 5.0
"""Between two lines where the output is no terminal."""


@contextmanager
def tile_bar(console: Console) -> Iterator[Callable[[str, float, int], None]]:
    """Show progress within the context: a bar on a terminal, else a line every five seconds.

    Yields:
        a function of what is done, its tiles that are done, and all its tiles. When the tiles that are done become
        fewer, the clock starts again.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} tiles", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar, last, before = bars.add_task("", total=0, visible=False), time.monotonic(), 0.0

        def show(what: str, tiles: float, total: int) -> None:
            nonlocal last, before
            if tiles < before:
                bars.reset(bar, total=total)
            before = tiles
            bars.update(bar, completed=tiles, total=total, description=what, visible=True)
            if not console.is_terminal and time.monotonic() - last >= _LINE_SECONDS:
                last = time.monotonic()
                console.print(f"{what}, {tiles:,.0f} of {total:,} tiles", soft_wrap=True)

        yield show
