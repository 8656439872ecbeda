"""The option ``--impl`` of the benchmarks, and the comparison of measured ratios with limits."""

from __future__ import annotations

import argparse
from typing import Any, Literal

import torch

from dilated_attention_pytorch.kernels.select import removal, select

LEAST_VECTORS = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
"""The first variable limits PyTorch's own kernels and ours, the others oneDNN's and MKL's products, which both use."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Verdict = Literal["holds", "short"]


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add ``--impl``, for :func:`dilated_attention_pytorch.ops.implementation`."""
    parser.add_argument(
        "--impl",
        type=_known,
        choices=("auto", "native", "aten"),
        default="auto",
        help='what impl="auto" stands for in this run',
    )


def _known(impl: str) -> str:
    sentence = removal(impl)
    if sentence is not None:
        raise argparse.ArgumentTypeError(sentence)
    return impl


def chosen(impl: str) -> dict[str, str]:
    """For the record of a run with ``--impl``: that, and the implementation used for each dtype on a CPU now."""
    cpu = torch.device("cpu")
    return {"asked": impl, **{str(dtype).removeprefix("torch."): select("auto", cpu, dtype, 64) for dtype in DTYPES}}


def verdict(value: float, limit: float, *, is_least: bool = False) -> Verdict:
    """Whether ``value`` is at most the limit; with ``is_least``, at least. A miss is recorded, but no error."""
    return "holds" if (value >= limit if is_least else value <= limit) else "short"


def judged(value: float, limit: float, *, is_least: bool = False) -> dict[str, Any]:
    """The limit and the verdict, for the record."""
    return {"limit": round(limit, 4), "verdict": verdict(value, limit, is_least=is_least)}


def in_words(value: float, limit: float, *, is_least: bool = False) -> str:
    """The limit and the verdict, for a printed line."""
    return f"(limit {'>=' if is_least else '<='} {limit:.3g}: {verdict(value, limit, is_least=is_least)})"


if __name__ == "__main__":
    raise SystemExit("a part of another benchmark: python -m benchmarks.attention --help")
