"""Kernels for one partial, and selection of a call's implementation."""

from typing import Any

from dilated_attention_pytorch.legacy import look_up

_OLD = ("hilbert", "cache_", "config_", "dilated_")
"""What names of earlier packages begin with; the table is not read for those of our own modules."""


def __getattr__(name: str) -> Any:
    if name.lower().startswith(_OLD):
        return look_up("kernels", name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
