"""Old import paths and names, as one table: each still imports, with a warning that names today's."""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

from .core import set_tf32
from .nn import DilatedAttention, MultiheadDilatedAttention

_PACKAGE = __name__.rpartition(".")[0]


class ImprovedDilatedAttention(DilatedAttention):
    """:class:`DilatedAttention` with the old keyword ``use_tf32``, see :func:`create_dilated_attention`."""

    def __init__(self, *args: Any, use_tf32: bool | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        set_tf32(use_tf32)


class ImprovedMultiheadDilatedAttention(MultiheadDilatedAttention):
    """:class:`MultiheadDilatedAttention` with the old keyword ``use_tf32``, see :func:`create_dilated_attention`."""

    def __init__(self, *args: Any, use_tf32: bool | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        set_tf32(use_tf32)


# old module, old name, module that has it, its name there, what to write today
TABLE: tuple[tuple[str, str, str, str, str], ...] = (
    ("dilated_attention", "DilatedAttention", "nn", "DilatedAttention", "DilatedAttention"),
    ("multihead_dilated_attention", "MultiheadDilatedAttention", "nn", "MultiheadDilatedAttention",
     "MultiheadDilatedAttention"),
    ("improved_dilated_attention", "ImprovedDilatedAttention", "legacy", "ImprovedDilatedAttention",
     "DilatedAttention"),
    ("improved_multihead_dilated_attention", "ImprovedMultiheadDilatedAttention", "legacy",
     "ImprovedMultiheadDilatedAttention", "MultiheadDilatedAttention"),
    ("", "ImprovedDilatedAttention", "legacy", "ImprovedDilatedAttention", "DilatedAttention"),
    ("", "ImprovedMultiheadDilatedAttention", "legacy", "ImprovedMultiheadDilatedAttention",
     "MultiheadDilatedAttention"),
    ("core.factory", "create_dilated_attention", "core", "create_dilated_attention", "core.create_dilated_attention"),
    ("core.factory", "create_multihead_dilated_attention", "core", "create_multihead_dilated_attention",
     "core.create_multihead_dilated_attention"),
    ("utils.dynamic_segment_selector", "DynamicSegmentSelector", "selection", "DynamicSegmentSelector",
     "DynamicSegmentSelector"),
    ("utils.dynamic_segment_selector", "SegmentSelectionConfig", "selection", "SegmentSelectionConfig",
     "SegmentSelectionConfig"),
    ("dynamic_dilated_attention", "DynamicDilatedAttention", "nn", "DynamicDilatedAttention",
     "DynamicDilatedAttention"),
    ("dynamic_dilated_attention", "DynamicMultiheadDilatedAttention", "nn", "DynamicMultiheadDilatedAttention",
     "DynamicMultiheadDilatedAttention"),
    *(
        (module, name, home, today, f"parallel.{today}")
        for modules, name, home, today in (
            (("ring_dilated_attention", ""), "RingDilatedAttention", "parallel", "RingDilatedAttention"),
            (("ring_multihead_dilated_attention", ""), "RingMultiheadDilatedAttention", "parallel",
             "RingMultiheadDilatedAttention"),
            (("ring_dilated_attention_hybrid", ""), "RingDilatedAttentionHybrid", "parallel",
             "HybridRingDilatedAttention"),
            (("head_parallel_dilated_attention", ""), "HeadParallelDilatedAttention", "legacy",
             "HeadParallelDilatedAttention"),
            (("improved_distributed_dilated_attention", ""), "DistributedImprovedDilatedAttention", "parallel",
             "DistributedDilatedAttention"),
        )
        for module in modules
    ),
)  # fmt: skip


def __getattr__(name: str) -> Any:
    # Made when it is asked for: importing the package does not import what talks to other ranks.
    if name != "HeadParallelDilatedAttention":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .parallel import HeadParallelDilatedAttention

    class OldHeadParallelDilatedAttention(HeadParallelDilatedAttention):
        """:class:`HeadParallelDilatedAttention` with the old keywords that chose a backend, which can only be off."""

        def __init__(
            self, *args: Any, use_xformers: bool | None = None, use_flex_attention: bool | None = None, **options: Any
        ) -> None:
            for name, is_asked in (("use_xformers", use_xformers), ("use_flex_attention", use_flex_attention)):
                if is_asked:
                    raise ValueError(
                        f"{name} must be False or left out, got {is_asked!r}: neither backend is used here; impl= "
                        "picks the kernels, and no choice changes the result"
                    )
            super().__init__(*args, **options)

    return OldHeadParallelDilatedAttention


def look_up(module: str, name: str) -> Any:
    """The object that an old name stands for, with the warning.

    Raises:
        AttributeError: the table has no such name.
    """
    for old_module, old_name, home, attribute, today in TABLE:
        if (old_module, old_name) == (module, name):
            old = ".".join(part for part in (_PACKAGE, module, name) if part)
            parent, _, leaf = today.rpartition(".")
            new_module = ".".join(part for part in (_PACKAGE, parent) if part)
            # The line that imports the old name: this function, the module's __getattr__, importlib's own frames.
            warnings.warn(
                f"{old} is the old name; write `from {new_module} import {leaf}`", DeprecationWarning, stacklevel=3
            )
            return getattr(importlib.import_module(f"{_PACKAGE}.{home}"), attribute)
    raise AttributeError(f"module {'.'.join(p for p in (_PACKAGE, module) if p)!r} has no attribute {name!r}")


class _OldModule(ModuleType):
    """A module that no longer exists as a file: its names come from the table."""

    def __getattr__(self, name: str) -> Any:
        return look_up(self.__name__.removeprefix(_PACKAGE + "."), name)


def install() -> None:
    """Make the old module paths importable. They go into ``sys.modules`` and not onto the package, where
    ``dilated_attention`` is today's function."""
    modules = {entry[0] for entry in TABLE} - {""}
    # Python imports the parent of a module first, where nothing of the package was imported before.
    for module in modules | {name.rpartition(".")[0] for name in modules if "." in name}:
        sys.modules.setdefault(f"{_PACKAGE}.{module}", _OldModule(f"{_PACKAGE}.{module}"))
