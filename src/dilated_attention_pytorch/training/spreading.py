"""A run that goes on over other processes than it began with: the same steps on the same windows, spread anew."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from dilated_attention_pytorch.errors import RunError

from .settings import TrainSettings

SPREADING = (
    "context_parallel", "heads_parallel", "strategy", "layout", "data_parallel", "offload", "tensor_parallel",
    "batch_size", "timeout", "workers", "cache",
)  # fmt: skip
"""Settings that say how a run is spread over processes; what it computes does not depend on them but in rounding."""
ON_FAULTS = ("on_nan", "spike_deviations", "spike_window")
"""Settings that say what to do about a batch that breaks the run; one that it has ended may go on with others."""


def spread_anew(settings: TrainSettings, began_with: int, processes: int, changes: Mapping[str, Any]) -> TrainSettings:
    """The settings of a run for another number of processes: every step takes the windows that it would have taken.

    What ``changes`` leave open stays as it is where that goes: processes that share a sequence, or the matrices, become
    fewer where their number does not divide that of all. A process takes as many windows at once as before, or the
    next smaller number that divides its share of a step, and accumulates the rest.

    Args:
        settings: what the run began with.
        began_with: how many processes it began with.
        processes: how many there are now.
        changes: of the :data:`SPREADING` settings, and of those that do not concern processes.

    Raises:
        RunError: the windows of a step cannot be dealt out evenly, or not in batches of the size that is told.
        ValueError: a setting out of range.
    """
    if processes == began_with and not changes:
        return settings
    context, tensor = settings.context_parallel, settings.tensor_parallel
    windows = settings.batch_size * settings.gradient_accumulation * (began_with // (context * tensor))
    told = dict(changes)
    tensor = told.setdefault("tensor_parallel", math.gcd(tensor, processes))
    context = told.setdefault("context_parallel", math.gcd(context, max(1, processes // tensor)))
    told.setdefault("heads_parallel", math.gcd(settings.heads_parallel, context))
    if context == 1:
        told.setdefault("strategy", "auto")
        told.setdefault("layout", "auto")
    if processes == 1 and began_with > 1:
        told.setdefault("data_parallel", "ddp")
    if not told.get("data_parallel", settings.data_parallel).startswith("zero"):
        told.setdefault("offload", "none")
    sequences = max(1, processes // (context * tensor))
    share, rest = divmod(windows, sequences)
    if rest:
        fitting = [str(number * context * tensor) for number in range(1, windows + 1) if windows % number == 0]
        raise RunError(
            f"a step of this run takes {windows} windows, which {sequences} groups of processes cannot share evenly; "
            f"go on with {', '.join(fitting[:-1])}{' or ' * (len(fitting) > 1)}{fitting[-1]} processes"
        )
    if "batch_size" in told and share % told["batch_size"]:
        dividing = [str(size) for size in range(1, share + 1) if share % size == 0]
        raise RunError(
            f"--batch-size {told['batch_size']} must divide the {share} windows that a group of processes takes in a "
            f"step of this run; take {', '.join(dividing[:-1])}{' or ' * (share > 1)}{dividing[-1]}"
        )
    most = min(told.get("batch_size", settings.batch_size), share)
    batch_size = next(size for size in range(most, 0, -1) if share % size == 0)
    told |= {"batch_size": batch_size, "gradient_accumulation": share // batch_size}
    return dataclasses.replace(settings, **told)
