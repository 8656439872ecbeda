"""Attention with keys and values shifted per head, so that more pairs of residues meet in dilated segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch import Pattern, attend


def lagged_attend(
    lags: Sequence[int], query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, **options: Any
) -> Tensor:
    """:func:`attend` with the keys and values of head h shifted ``lags[h]`` rows later, if the pattern has segments.

    A query of residue o then meets tokens of residue ``o - lags[h]``. Rows before the first are 0.
    """
    if pattern.groups:
        key, value = (
            torch.stack([later(rows[:, :, head], lag) for head, lag in enumerate(lags)], 2) for rows in (key, value)
        )
    return attend(query, key, value, pattern, **options)


def later(rows: Tensor, lag: int) -> Tensor:
    """Rows ``[B, N, D]`` shifted ``lag`` rows later, with zeros before the first."""
    return torch.cat([torch.zeros_like(rows[:, :lag]), rows[:, : rows.shape[1] - lag]], 1)


if __name__ == "__main__":
    raise SystemExit("a part of another benchmark: python -m benchmarks.far_text --help")
