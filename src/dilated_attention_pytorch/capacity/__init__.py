"""Before a run: what a step has alive and computes, and the longest text that fits, on a device of a data sheet."""

from .run import RunPlan, computed_flops, longest_context, plan_run

__all__ = ["RunPlan", "computed_flops", "longest_context", "plan_run"]
