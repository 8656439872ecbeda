"""Kernels for one partial, and selection of a call's implementation."""

from typing import Any

from dilated_attention_pytorch.legacy import look_up


def __getattr__(name: str) -> Any:
    if name.lower().startswith(
        ("hilbert", "cache_", "config_", "dilated_")
    ):  # of earlier packages; the table is not read for names of our own modules
        return look_up("kernels", name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
