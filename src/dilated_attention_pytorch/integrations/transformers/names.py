"""Static inspection of the names that a class's code uses."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

from torch import nn


def methods_of(kind: type[nn.Module]) -> Iterator[types.FunctionType]:
    """The methods of a class and of its bases outside PyTorch."""
    names: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.startswith("torch."):
            break
        for name, value in vars(base).items():
            if name not in names and isinstance(value, types.FunctionType):
                names.add(name)
                yield value


def names_of(kind: type[nn.Module]) -> Iterator[tuple[str, Any]]:
    """The names, with their global values, used by a class's methods and by functions of its file that they call.

    Read from compiled code, which is always available, unlike the source.
    """
    return _names_from(list(methods_of(kind)), {})


def names_to_build(kind: type[nn.Module]) -> Iterator[tuple[str, Any]]:
    """The same for a class's constructors and the methods and functions of its file that they call."""
    bases = [base for base in kind.__mro__ if base.__module__ == kind.__module__]
    methods = {name: value for base in bases[::-1] for name, value in vars(base).items()}
    return _names_from([vars(base)["__init__"] for base in bases if "__init__" in vars(base)], methods)


def _names_from(todo: list[Any], methods: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The names used by functions, by functions of their file that they call, and by methods called by name."""
    done: set[types.FunctionType] = set()
    while todo:
        function = inspect.unwrap(todo.pop())
        if function in done:
            continue
        done.add(function)
        codes = [function.__code__]
        while codes:
            code = codes.pop()
            codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
            for name in code.co_names:
                value = function.__globals__.get(name)
                yield name, value
                # The interface's fallback is in the same file.
                for called in (value, methods.get(name)):
                    if isinstance(called, types.FunctionType) and called.__module__ == function.__module__:
                        todo.append(called)
