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
    found = set()
    for name in count_operators(function):
        if name.startswith("dilated_attention_native::"):
            found.add("native")
        elif name.startswith(_OF_ATEN):
            found.add("aten")
    return found
