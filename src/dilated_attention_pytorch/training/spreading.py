"""Resuming a run on another number of processes, with the same steps on the same windows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from dilated_attention_pytorch.errors import RunError

from .settings import TrainSettings

SPREADING = (
    "context_parallel",
    "heads_parallel",
    "strategy",
    "layout",
    "data_parallel",
    "offload",
    "offload_folder",
    "tensor_parallel",
    "batch_size",
    "timeout",
    "workers",
    "cache",
)
"""Settings of the distribution over processes; they affect the result only by rounding."""
ON_FAULTS = ("on_nan", "spike_deviations", "spike_window")
"""Settings for bad batches; a run that one has ended may be resumed with other values."""


def respread(settings: TrainSettings, began_with: int, processes: int, changes: Mapping[str, Any]) -> TrainSettings:
    """The settings of a run for another number of processes: every step uses the same windows.

    Settings not in ``changes`` are kept where possible: the numbers of processes that share a sequence or the matrices
    are reduced if they do not divide the total. The batch size per process is the old one, or the
    next smaller divisor of its share of a step, with gradient accumulation for the rest.

    Args:
        settings: original settings of the run.
        began_with: original number of processes.
        processes: current number of processes.
        changes: new values of :data:`SPREADING` settings, and of settings unrelated to processes.

    Raises:
        RunError: the windows of a step cannot be divided evenly, or not into batches of the requested size.
        ValueError: a setting is out of range.
    """
    if processes == began_with and not changes:
        return settings
    context, tensor = settings.context_parallel, settings.tensor_parallel
    windows = settings.batch_size * settings.gradient_accumulation * (began_with // (context * tensor))
    values = dict(changes)
    tensor = values.setdefault("tensor_parallel", math.gcd(tensor, processes))
    context = values.setdefault("context_parallel", math.gcd(context, max(1, processes // tensor)))
    values.setdefault("heads_parallel", math.gcd(settings.heads_parallel, context))
    if context == 1:
        values.setdefault("strategy", "auto")
        values.setdefault("layout", "auto")
    if processes == 1 and began_with > 1:
        values.setdefault("data_parallel", "ddp")
    if not values.get("data_parallel", settings.data_parallel).startswith("zero"):
        values.setdefault("offload", "none")
    if values.get("offload", settings.offload) != "nvme":
        values.setdefault("offload_folder", None)
    sequences = max(1, processes // (context * tensor))
    share, rest = divmod(windows, sequences)
    if rest:
        fitting = [str(number * context * tensor) for number in range(1, windows + 1) if windows % number == 0]
        raise RunError(
            f"a step of this run takes {windows} windows, which {sequences} groups of processes cannot share evenly; "
            f"go on with {', '.join(fitting[:-1])}{' or ' * (len(fitting) > 1)}{fitting[-1]} processes"
        )
    if "batch_size" in values and share % values["batch_size"]:
        dividing = [str(size) for size in range(1, share + 1) if share % size == 0]
        raise RunError(
            f"--batch-size {values['batch_size']} must divide the {share} windows that a group of processes takes in a "
            f"step of this run; take {', '.join(dividing[:-1])}{' or ' * (share > 1)}{dividing[-1]}"
        )
    most = min(values.get("batch_size", settings.batch_size), share)
    batch_size = next(size for size in range(most, 0, -1) if share % size == 0)
    values |= {"batch_size": batch_size, "gradient_accumulation": share // batch_size}
    return dataclasses.replace(settings, **values)
