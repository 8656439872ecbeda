"""What a call or a run takes: memory, operations, bytes sent and seconds; which run fits, and which change helps."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .generation import Generation, generation_footprint
    from .measure import Here, measure_here
    from .memory import Footprint, evaluation_footprint, footprint
    from .run import Device, MemoryPlan, RunPlan, plan_generation, plan_run
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
]

_ON_FIRST_USE = {
    "generation": ("Generation", "generation_footprint"),
    "measure": ("Here", "measure_here"),
    "memory": ("Footprint", "evaluation_footprint", "footprint"),
    "run": ("Device", "MemoryPlan", "RunPlan", "plan_generation", "plan_run"),
    "solve": (
        "Change",
        "LargestModel",
        "Mesh",
        "changes_that_help",
        "fewest_processes",
        "largest_model",
        "longest_context",
        "meshes",
    ),
}
"""Names by module. Selection and attention over ranks need the estimates of a call alone, and no settings of runs."""


def __getattr__(name: str) -> Any:
    for module, names in _ON_FIRST_USE.items():
        if name in names:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
