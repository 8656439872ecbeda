"""``--parallel auto``: one choice for all processes of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dilated_attention_pytorch.estimate.memory import check_training_memory
from dilated_attention_pytorch.estimate.parallel_choice import choose_parallel

from .settings import TrainSettings
from .together import all_or_none, from_first, is_first_process, num_processes

if TYPE_CHECKING:
    from rich.console import Console


def choose_together(settings: TrainSettings, device: str, console: Console) -> TrainSettings:
    """:func:`choose_parallel` for all processes of a run with ``--parallel auto``; prints the reason once.

    Raises:
        RunError: the choice needs more memory than there is.
    """
    if settings.parallel == "manual":
        return settings
    # The first process decides: free memory differs between hosts.
    chosen, reason = from_first(lambda: choose_parallel(settings, device, num_processes()))
    if is_first_process():
        console.print(reason, highlight=False, markup=False, soft_wrap=True)
    all_or_none(lambda: check_training_memory(chosen, device, num_processes()))
    return chosen
