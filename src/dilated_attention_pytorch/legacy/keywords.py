"""Keywords of the earlier packages' modules: renamed, ignored or rejected with advice, as the table says."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec

import torch

from . import table

_P = ParamSpec("_P")

OFF: dict[str, tuple[object, ...]] = {"False or None": (False, None), "None": (None,), "True": (True,)}
"""The values that ask for nothing, by their words in the table."""


def answers_old_keywords(init: Callable[_P, None]) -> Callable[_P, None]:
    """Decorate a module's ``__init__`` to accept old keywords with a DeprecationWarning, or to reject them with advice.

    Keywords that belong to a parent's ``__init__`` are passed on to it.

    Raises:
        TypeError: an old keyword together with its current name, or one for a feature that this module does not have.
        ValueError: an old keyword with a value that requests a feature that does not exist here.
    """
    parameters = inspect.signature(init).parameters
    hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    @functools.wraps(init)
    def answering(*args: _P.args, **options: _P.kwargs) -> None:
        given: dict[str, Any] = dict(options)
        for name in [name for name in options if name not in parameters]:
            module, today = type(args[0]).__name__, table.read()["renamed"].get(name)
            if today in parameters or (today and not hands_on):
                _rename(given, name, today, today in parameters, module)
            elif not hands_on:
                _drop(given, name, module)
        init(*args, **given)  # unknown keywords raise Python's own TypeError

    return answering


def instead_of_speed(name: str) -> str | None:
    """What to say of a keyword that chose how a result is computed and not which; None for other names."""
    return next((row["instead"] for row in table.read()["of_speed"] if name in row["keywords"]), None)


def is_old(name: str) -> bool:
    """Whether a keyword is one of earlier packages, which the table answers."""
    unneeded = (row["keywords"] for row in table.read()["unneeded"])
    return name in table.read()["renamed"] or instead_of_speed(name) is not None or any(name in row for row in unneeded)


def set_tf32(use_tf32: bool | None) -> None:
    """Enable (True) or disable (False) TF32 for float32 matrix products of this process; None = unchanged."""
    if use_tf32 is not None:
        torch.set_float32_matmul_precision("high" if use_tf32 else "highest")


def _rename(given: dict[str, Any], name: str, today: str, is_there: bool, module: str) -> None:
    if not is_there:
        raise TypeError(
            f"{name} is {today} today, a keyword of modules with projections such as MultiheadDilatedAttention; "
            f"{module} has none: leave it out, got {name}={given[name]!r}"
        )
    if today in given:
        raise TypeError(f"{name} is the old name of {today}: pass {today} alone, got both")
    given[today] = given.pop(name)
    _warn(f"{name} is the old name; write {today}={given[today]!r}")


def _drop(given: dict[str, Any], name: str, module: str) -> None:
    if instead := instead_of_speed(name):
        _warn(f"{name}={given.pop(name)!r} of {module} changes nothing here: {instead}; leave it out")
        return
    for row in table.read()["unneeded"]:
        if name in row["keywords"]:
            value = given.pop(name)
            if not any(value is nothing for nothing in OFF[row["off"]]):
                instead = row["instead"].format(name=name, value=value)
                raise ValueError(f"{name} of {module} must be {row['off']} or left out, got {value!r}: {instead}")
            _warn(f"{name}={value!r} is an old keyword that asks for nothing; leave it out")


def _warn(message: str) -> None:
    """Attribute the warning to the first caller outside the package."""
    level, package = 1, __name__.partition(".")[0]
    while sys._getframe(level).f_globals.get("__name__", "").partition(".")[0] == package:
        level += 1
    warnings.warn(message, DeprecationWarning, stacklevel=level + 1)
