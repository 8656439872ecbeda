"""Capacity planning: memory, operations, traffic and time of a run, and the runs that would fit."""

from typing import Any

from dilated_attention_pytorch.legacy import look_up

from .changes import Change, changes_that_help
from .generation import Generation, generation_footprint
from .here import Here
from .run import Device, MemoryPlan, RunPlan, plan_generation, plan_run
from .solve import LargestModel, Mesh, fewest_processes, largest_model, longest_context, meshes
from .step_probe import measure_here

__all__ = [
    "Change",
    "Device",
    "Generation",
    "Here",
    "LargestModel",
    "MemoryPlan",
    "Mesh",
    "RunPlan",
    "changes_that_help",
    "fewest_processes",
    "generation_footprint",
    "largest_model",
    "longest_context",
    "measure_here",
    "meshes",
    "plan_generation",
    "plan_run",
]


def __getattr__(name: str) -> Any:
    if name in ("GenerationHere", "measure_generation_here"):
        return look_up("capacity", name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
