"""What code written for earlier packages imports, and how this package takes each import."""

from __future__ import annotations

import tomllib
import warnings
from pathlib import Path
from typing import Any, Literal, NamedTuple

PACKAGE = "dilated_attention_pytorch"
ROWS: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["import"]
IMPORTS: list[tuple[str, str]] = [(row["module"], name) for row in ROWS for name in row["names"]]


class Taken(NamedTuple):
    """How an import is taken: ``words`` are those of its warning or of its error, ``found`` the object."""

    kind: Literal["works", "answered", "neither"]
    words: str
    found: object


def path_of(module: str) -> str:
    """The whole path of a module of the package; empty is the package."""
    return ".".join(part for part in (PACKAGE, module) if part)


def take(module: str, name: str) -> Taken:
    """Run ``from module import name``."""
    path, scope = path_of(module), {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(f"from {path} import {name} as found", scope)
        except ImportError as error:
            is_answered = " is not here: " in str(error)
            return Taken("answered" if is_answered else "neither", str(error), None)
    words = {str(warning.message) for warning in caught if warning.category is DeprecationWarning}
    if len(words) > 1:
        return Taken("neither", " and ".join(sorted(words)), scope["found"])
    return Taken("works", next(iter(words), ""), scope["found"])
