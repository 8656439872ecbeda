"""The table of old modules and names, read from `table.toml` on first use."""

from __future__ import annotations

import functools
import tomllib
from fnmatch import fnmatchcase
from importlib import resources
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """An old name that works: ``name`` of module ``home`` of this package; ``instead`` is advice for new code."""

    home: str
    name: str
    instead: str


def module(path: str) -> str | None:
    """Status of an old module: the reason why it is gone, empty if its names still work, None if it never existed.

    >>> from dilated_attention_pytorch.legacy import table
    >>> table.module("ring_dilated_attention_v3"), table.module("ring_dilated_attention_v99")
    ('', None)
    """
    read = _read()
    if path not in read["modules"]:
        return None
    key = read["modules"][path]
    return read["sentences"][key] if key else ""


def has_submodules(path: str) -> bool:
    """Whether an old module has submodules."""
    return any(other.startswith(path + ".") for other in _read()["modules"])


def modules() -> tuple[str, ...]:
    """Every old module, by its path within this package."""
    return tuple(_read()["modules"])


def answer(path: str, name: str) -> Answer | str | None:
    """Status of an old name: its location, the reason why it is gone, or None if it never existed.

    The first match wins: the name in this module, the name in any module, a family of names.

    >>> from dilated_attention_pytorch.legacy import table
    >>> table.answer("ring_dilated_attention_v3", "RingDilatedAttentionV3").home
    'parallel'
    >>> table.answer("core", "get_global_memory_pool")
    "PyTorch's allocator does what memory pools did; torch.profiler.profile shows the memory of a call"
    """
    read = _read()
    for key in (f"{path}:{name}", name):
        if key in read["names"]:
            return _resolved(read, read["names"][key])
    for family, key in read["families"].items():
        if fnmatchcase(name, family):
            return _resolved(read, key)
    return None


def _resolved(read: dict[str, Any], key: str) -> Answer | str:
    """Resolve a key: of a message, or `home:name` of an object, with `|` before the current name to recommend."""
    if ":" not in key:
        return str(read["sentences"][key])
    found, _, today = key.partition("|")
    home, _, attribute = found.partition(":")
    parent, _, leaf = (today or found.replace(":", ".")).rpartition(".")
    package = __name__.partition(".")[0]
    source = ".".join(part for part in (package, parent) if part)
    kept = "it keeps its old arguments; in new code " if home.startswith("legacy") else ""
    return Answer(home, attribute, f"{kept}write `from {source} import {leaf}`")


@functools.cache
def _read() -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("table.toml").read_text("utf-8"))
