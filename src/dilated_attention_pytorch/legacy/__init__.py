"""Modules and names of earlier packages: those with a counterpart import with a warning, others raise an error."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

from . import table
from .table import path_of


def look_up(module: str, name: str) -> Any:
    """The object that an old name stands for, with a DeprecationWarning that gives the current name.

    Args:
        module: module that the name is looked up in, within this package; empty for its top level.
        name: the old name.

    Raises:
        ImportError: the name has no counterpart here; the message says what to use.
        AttributeError: the table has no such name, or a module whose names work, which is imported then.
    """
    old = f"{path_of(module)}.{name}"
    is_special = name.startswith("__")  # tools look these up in every module
    answer = None if is_special else table.answer(module, name) or table.module(f"{module}.{name}".lstrip("."))
    if not answer:
        raise AttributeError(f"module {path_of(module)!r} has no attribute {name!r}")
    if isinstance(answer, str):
        # Not an AttributeError: an import statement would replace its words.
        raise ImportError(f"{old} is not here: {answer}", name=old)
    # The line that imports the old name: this function, the module's __getattr__, importlib's own frames.
    warnings.warn(f"{old} is the old name; {answer.instead}", DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(path_of(answer.home)), answer.name)


def install() -> None:
    """Make the modules of the table importable, by a finder that is used after all others."""
    finder = _Finder()
    sys.meta_path.append(finder)
    # Importing a submodule binds it in its package, where `dilated_attention` is a function: this one is there already.
    name = path_of("dilated_attention")
    sys.modules[name] = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, finder))


class _OldModule(ModuleType):
    """A module without a file: its names come from the table."""

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            raise ImportError(
                f"{self.__name__} is an old module: import its names one by one, not *", name=self.__name__
            )
        return look_up(self.__name__.partition(".")[2], name)


class _Finder(MetaPathFinder, Loader):
    """Finds and creates the modules of the table; importing one without a counterpart raises its message."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of an old module; None for all others."""
        module = fullname.partition(".")[2]
        if path_of(module) != fullname or table.module(module) is None:
            return None
        has_submodules = any(other.startswith(f"{module}.") for other in table.read()["modules"])
        return importlib.machinery.ModuleSpec(fullname, self, is_package=has_submodules)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """An empty module."""
        return _OldModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: names are looked up on access.

        Raises:
            ModuleNotFoundError: the module has no counterpart here; the message says why.
        """
        if sentence := table.module(module.__name__.partition(".")[2]):
            raise ModuleNotFoundError(f"{module.__name__} is not here: {sentence}", name=module.__name__)
