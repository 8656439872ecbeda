"""The table of old modules, names and keywords, read from `table.toml` on first use."""

from __future__ import annotations

import functools
import tomllib
from fnmatch import fnmatchcase
from importlib import resources
from typing import Any, NamedTuple

_PACKAGE = __name__.partition(".")[0]


class OldName(NamedTuple):
    """An old name that works: ``name`` of module ``home`` of this package; ``instead`` is advice for new code."""

    home: str
    name: str
    instead: str


@functools.cache
def read() -> dict[str, Any]:
    """The sections of `table.toml`."""
    return tomllib.loads(resources.files(__package__).joinpath("table.toml").read_text("utf-8"))


def path_of(module: str) -> str:
    """The full path of a module of this package; empty is the package."""
    return f"{_PACKAGE}.{module}" if module else _PACKAGE


def module(path: str) -> str | None:
    """Status of an old module: the reason why it is gone, empty if its names still work, None if it never existed.

    >>> from dilated_attention_pytorch.legacy import table
    >>> table.module("ring_dilated_attention_v3"), table.module("ring_dilated_attention_v99")
    ('', None)
    """
    key = read()["modules"].get(path)
    return read()["sentences"][key] if key else key


def answer(path: str, name: str) -> OldName | str | None:
    """Status of an old name: its location, the reason why it is gone, or None if it never existed.

    The first match wins: the name in this module, the name in any module, a family of names.

    >>> from dilated_attention_pytorch.legacy import table
    >>> table.answer("ring_dilated_attention_v3", "RingDilatedAttentionV3").home
    'parallel'
    >>> table.answer("core", "get_global_memory_pool")
    "PyTorch's allocator does what memory pools did; torch.profiler.profile shows the memory of a call"
    """
    names = read()["names"]
    families = (key for family, key in read()["families"].items() if fnmatchcase(name, family))
    key = names.get(f"{path}:{name}") or names.get(name) or next(families, None)
    if not key or ":" not in key:
        return read()["sentences"][key] if key else None
    found, _, today = key.partition("|")
    home, _, attribute = found.partition(":")
    parent, _, leaf = (today or found.replace(":", ".")).rpartition(".")
    kept = "it keeps its old arguments; in new code " if home.startswith("legacy") else ""
    result = "; it returns (out, None)" if "Multihead" in leaf else ""
    return OldName(home, attribute, f"{kept}write `from {path_of(parent)} import {leaf}`{result}")
