"""Small benchmark cases, and the oracle's results for them."""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention_pytorch.benchmarks.shapes import Case, DtypeName, Mode
from support.oracle import Groups, dense_attention, dense_counts


def small_case(
    *,
    rows: int = 101,
    heads: int = 6,
    kv_heads: int = 6,
    head_dim: int = 8,
    segment_lengths: tuple[int, ...] = (16, 34, 80),
    dilation_rates: tuple[int, ...] = (1, 2, 5),
    offset_rule: str = "modulo",
    causal: bool = False,
    dtype: DtypeName = "float64",
    mode: Mode = "forward_backward",
    batch: int = 1,
) -> Case:
    return Case(
        shape="small",
        mode=mode,
        rows=rows,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        segment_lengths=segment_lengths,
        dilation_rates=dilation_rates,
        offset_rule="modulo" if offset_rule == "modulo" else "block",
        causal=causal,
        dtype=dtype,
    )


def counts_of(case: Case) -> tuple[Tensor, Tensor]:
    groups = Groups(case.segment_lengths, case.dilation_rates, case.offset_rule)
    return dense_counts(
        groups,
        case.num_queries,
        case.rows,
        case.kv_heads,
        query_offset=case.query_offset,
        is_causal=case.causal,
        batch=case.batch,
    )


def oracle(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The definition, in the dtype of the operands."""
    return dense_attention(query, key, value, *counts_of(case), case.head_dim**-0.5)[0]


def operands_of(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    return case.operands(torch.device("cpu"))
