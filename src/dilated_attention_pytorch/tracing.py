"""What torch.compile takes for a constant, and what it checks when the graph runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def constant_of_graph(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function to be called at trace time, with its result a constant of the graph.

    Equivalent to ``torch.compiler.assume_constant_result``, without importing the compiler.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def require(holds: Tensor, error: type[Exception], message: str, details: Callable[[], str] = str) -> None:
    """Raise ``error`` unless a bool tensor is True: now, or as an assertion when the graph that is being traced runs.

    Args:
        holds: bool, without dimensions.
        error: class of the error.
        message: what the error says.
        details: the end of the message, of values that only the host can read; empty in a graph.
    """
    if torch.compiler.is_compiling() or holds.is_meta:
        torch._assert_async(holds, message)
    elif not bool(holds):
        raise error(message + details())
