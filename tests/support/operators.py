"""The operators that really run in a call, inside operators of the package too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
_OF_ATEN = (FLASH, "aten::baddbmm", "aten::baddbmm_")


def count_operators(function: Callable[[], Any]) -> dict[str, int]:
    """Number of calls of each operator."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        function()
    return {event.key: event.count for event in seen.key_averages()}


def implementations_run(function: Callable[[], Any]) -> set[str]:
    """Which of "native" and "aten" computed attention."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        function()
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    found = set()
    # Names alone: the events of a long run, as the profiler shows them, take longer than the run.
    for name in {event.name() for event in seen.profiler.kineto_results.events()}:
        if name.startswith("dilated_attention_native::"):
            found.add("native")
        elif name.startswith(_OF_ATEN):
            found.add("aten")
    return found
