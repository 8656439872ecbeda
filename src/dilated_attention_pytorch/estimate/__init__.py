"""What a call or a run takes: memory, operations, bytes sent and seconds; which run fits, and which change helps."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .generation import Generation, generation_footprint
    from .measure import Here, measure_here
    from .memory import Footprint, evaluation_footprint, footprint
    from .run import Device, MemoryPlan, RunPlan, plan_generation, plan_run, seconds_of_steps
    from .solve import (
        Change,
        LargestModel,
        Mesh,
        changes_that_help,
        fewest_processes,
        largest_model,
        longest_context,
        meshes,
    )

__all__ = [
    "Change",
    "Device",
    "Footprint",
    "Generation",
    "Here",
    "LargestModel",
    "MemoryPlan",
    "Mesh",
    "RunPlan",
    "changes_that_help",
    "evaluation_footprint",
    "fewest_processes",
    "footprint",
    "generation_footprint",
    "largest_model",
    "longest_context",
    "measure_here",
    "meshes",
    "plan_generation",
    "plan_run",
    "seconds_of_steps",
]

_MODULES = ("memory", "generation", "measure", "run", "solve")
"""Imported on first use: selection and attention over ranks need the estimates of a call alone, no settings of runs."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            values = vars(importlib.import_module(f".{module}", __name__))
            if name in values:
                return values[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
