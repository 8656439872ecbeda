"""Capacity planning: memory, operations, traffic and time of a run, and the runs that would fit."""

from .changes import Change, changes_that_help
from .generation import Generation, generation_footprint
from .generation_here import GenerationHere, measure_generation_here
from .here import Here
from .run import Device, RunPlan, plan_run
from .solve import LargestModel, Mesh, fewest_processes, largest_model, longest_context, meshes
from .step_probe import measure_here

__all__ = [
    "Change",
    "Device",
    "Generation",
    "GenerationHere",
    "Here",
    "LargestModel",
    "Mesh",
    "RunPlan",
    "changes_that_help",
    "fewest_processes",
    "generation_footprint",
    "largest_model",
    "longest_context",
    "measure_generation_here",
    "measure_here",
    "meshes",
    "plan_run",
]
