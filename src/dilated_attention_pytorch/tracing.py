"""What torch.compile takes for a constant while it traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def constant_of_graph(function: Callable[P, R]) -> Callable[P, R]:
    """A function that is called while tracing, and whose result is a constant of the graph.

    What ``torch.compiler.assume_constant_result`` marks, which would import the compiler along with this package.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function
