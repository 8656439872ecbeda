"""The option ``--impl`` of the benchmarks, and the comparison of measured ratios with limits."""

from __future__ import annotations

import argparse
import importlib
from typing import Any, Literal

import torch

from dilated_attention_pytorch.kernels import select as selection

READERS = ("ops.attend", "ops.selected_blocks", "models.reading", "parallel.agreement")
"""Modules that choose an implementation with ``select``."""
LEAST_VECTORS = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
"""The first variable limits PyTorch's own kernels and ours, the others oneDNN's and MKL's products, which both use."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Verdict = Literal["holds", "short"]


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add ``--impl``: the implementation of attention wherever none is named."""
    parser.add_argument(
        "--impl", choices=("auto", "native", "aten"), default="auto", help='what impl="auto" stands for in this run'
    )


def take(impl: str) -> dict[str, str]:
    """Make ``"auto"`` stand for ``impl`` in this process, also within models, for calls that ``impl`` supports.

    Returns:
        For the record of the run: the requested implementation, and the one used for each dtype on a CPU.
    """
    if impl != "auto":
        original = selection.select

        def select(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, **facts: bool) -> str:
            is_open = name == "auto" and selection.refusal(impl, device, dtype, head_dim, **facts) is None
            return original(impl if is_open else name, device, dtype, head_dim, **facts)

        for reader in READERS:
            vars(importlib.import_module(f"dilated_attention_pytorch.{reader}"))["select"] = select
    return {"asked": impl, **{str(dtype).removeprefix("torch."): taken(dtype) for dtype in DTYPES}}


def taken(dtype: torch.dtype) -> str:
    """The implementation for heads of 64 in ``dtype`` on the CPU, after :func:`take`."""
    select = vars(importlib.import_module("dilated_attention_pytorch.ops.attend"))["select"]
    name: str = select("auto", torch.device("cpu"), dtype, 64)
    return name


def verdict(value: float, limit: float, *, is_least: bool = False) -> Verdict:
    """Whether ``value`` is at most the limit; with ``is_least``, at least. A miss is recorded, but no error."""
    return "holds" if (value >= limit if is_least else value <= limit) else "short"


def judged(value: float, limit: float, *, is_least: bool = False) -> dict[str, Any]:
    """The limit and the verdict, for the record."""
    return {"limit": round(limit, 4), "verdict": verdict(value, limit, is_least=is_least)}


def in_words(value: float, limit: float, *, is_least: bool = False) -> str:
    """The limit and the verdict, for a printed line."""
    return f"(limit {'>=' if is_least else '<='} {limit:.3g}: {verdict(value, limit, is_least=is_least)})"
