"""Triton's interpreter without the work that has no effect, which is more than half of its time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import pytest


@contextmanager
def patched_once_per_launch() -> Iterator[None]:
    """Have the interpreter patch Triton's language once per launch and module, not at every call of a function.

    Every call of a device function would look through the language for what is not patched yet, and only the first of
    its module finds anything. The check for overflow is left out as well: the assertion that it feeds is off
    (``InterpreterOptions.debug``).
    """
    from triton.runtime import interpreter

    patch_language, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    assert not options.debug
    modules: set[int] = set()

    def patch_once(function: FunctionType) -> Any:
        if id(function.__globals__) in modules:
            return None
        modules.add(id(function.__globals__))
        return patch_language(function)

    def launch_unpatched(*args: Any, **kwargs: Any) -> Any:
        modules.clear()
        try:
            return launch(*args, **kwargs)
        finally:
            modules.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.GridExecutor, "__call__", launch_unpatched)
        patch.setattr(interpreter.interpreter_builder, "options", options)
        yield
