"""A decorator for functions whose result torch.compile treats as a constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def constant_of_graph(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function to be called at trace time, with its result a constant of the graph.

    Equivalent to ``torch.compiler.assume_constant_result``, without importing the compiler.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function
