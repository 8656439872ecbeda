"""Registration with transformers as soon as its models are imported, so that a saved model loads without a call.

transformers has no entry point for attention functions and architectures, and importing it takes seconds that calls of
:func:`attend` do not need. A finder therefore waits for the module of its Auto classes, which every model imports.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_AUTO_CLASSES = "transformers.models.auto.modeling_auto"


def register_with_models() -> None:
    """Call :func:`register` once transformers' models are imported; at once if they are already."""
    if _AUTO_CLASSES in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AutoClassesFinder())


class _AutoClassesFinder(MetaPathFinder):
    """Lets the other finders find the module, and registers after its execution."""

    _is_asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _AUTO_CLASSES or self._is_asking:
            return None
        # A spec may be found without being executed, so every one that is found registers.
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register() -> None:
    from .integrations import register

    try:
        register()
    except ImportError:
        return  # a transformers that is too old must import as without this package; set_pattern says what it lacks
