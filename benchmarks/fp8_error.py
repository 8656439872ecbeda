"""Errors of `impl="triton-fp8"` and of `impl="triton"` in bfloat16 against the definition: the paper's pattern, causal.

    TRITON_INTERPRET=1 python -m benchmarks.fp8_error

Covers the last 128 of 4,096 rows of two heads. Needs no GPU: Triton's interpreter computes what a device would, except
for the precision in which products are accumulated. Query, key and value are normal, or two columns of keys and values
are 20 times as large, as in models with outliers; all are bfloat16. Errors are those of output and log-sum-exp against
float64 on the same operands.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dilated_attention_pytorch import attend, attend_with_lse
from dilated_attention_pytorch.benchmarks.results import module_command, origin, write_json
from dilated_attention_pytorch.benchmarks.shapes import SHAPES
from dilated_attention_pytorch.kernels.select import Impl

ROWS, QUERIES, HEADS = 4096, 128, 2
OUTLIERS, TIMES = 2, 20.0
IMPLS: tuple[Impl, ...] = ("triton", "triton-fp8")


def operands(head_dim: int, *, has_outliers: bool, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The last queries, and all keys and values."""
    query, key, value = (torch.randn(1, rows, HEADS, head_dim, generator=generator) for rows in (QUERIES, ROWS, ROWS))
    if has_outliers:
        key[..., :OUTLIERS] *= TIMES
        value[..., :OUTLIERS] *= TIMES
    return query.bfloat16(), key.bfloat16(), value.bfloat16()


def errors(head_dim: int, *, has_outliers: bool) -> dict[str, Any]:
    """Errors of one call, for each implementation."""
    generator = torch.Generator().manual_seed(head_dim)
    query, key, value = operands(head_dim, has_outliers=has_outliers, generator=generator)
    pattern = SHAPES["paper"].case(rows=ROWS).pattern
    options: dict[str, Any] = {"is_causal": True, "query_offset": ROWS - QUERIES}
    exact = query.double(), key.double(), value.double()
    want = attend_with_lse(*exact, pattern, impl="reference", **options)
    spread = attend(*exact[:2], exact[2].abs(), pattern, impl="reference", **options)
    record: dict[str, Any] = {"head_dim": head_dim, "has_outliers": has_outliers}
    for impl in IMPLS:
        out, lse = attend_with_lse(query, key, value, pattern, impl=impl, **options)
        off = (out.double() - want.out).abs()
        record[impl] = {
            "out": float(off.norm() / want.out.norm()),
            "worst_element_of_its_terms": float((off / spread).max()),
            "lse": float((lse.double() - want.lse).abs().max()),
        }
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/fp8_error.json"))
    words = parser.parse_args()
    records = [errors(head_dim, has_outliers=has_outliers) for head_dim in (64, 128) for has_outliers in (False, True)]
    table = Table("D", "outliers", *(f"{impl}: out, element, lse" for impl in IMPLS))
    for record in records:
        cells = [", ".join(f"{number:.2e}" for number in record[impl].values()) for impl in IMPLS]
        table.add_row(str(record["head_dim"]), str(record["has_outliers"]), *cells)
    Console(width=140).print(table)
    write_json(
        words.output,
        {
            "machine": origin(module_command()),
            "rows": ROWS,
            "queries": QUERIES,
            "heads": HEADS,
            "shape": "paper",
            "records": records,
        },
    )


if __name__ == "__main__":
    main()
