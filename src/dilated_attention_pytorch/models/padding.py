"""Padded batches: each row's run of real tokens, and the rows that share one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Run = tuple[int, int]
"""First column of a row's real tokens, and one past the last; equal for a row without any."""


def real_runs(attention_mask: Tensor) -> list[Run]:
    """The run of ones of every row of ``attention_mask [B, N]`` (1 = real).

    Raises:
        NotImplementedError: the ones of a row are not one run.
    """
    real = attention_mask.bool()
    counts = real.sum(dim=1)
    rises = real[:, :1].sum(dim=1) + (real[:, 1:] & ~real[:, :-1]).sum(dim=1)
    starts, counts, rises = torch.stack([real.int().argmax(dim=1), counts, rises]).tolist()
    if any(rise > 1 for rise in rises):
        row = next(index for index, rise in enumerate(rises) if rise > 1)
        raise NotImplementedError(
            "every row of attention_mask must hold one run of ones, with padding before or after it only: got "
            f"{rises[row]} runs in row {row}; put each row's real tokens next to each other, or pack documents with "
            "cu_seqlens"
        )
    return [(start, start + count) for start, count in zip(starts, counts, strict=True)]


def group_rows(keys: Sequence[Run]) -> dict[Run, list[int]]:
    """The rows of each run that occurs, in order of first appearance."""
    rows: dict[Run, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return rows


def positions_of(runs: Sequence[Run], num_columns: int, seen: Sequence[int], device: torch.device) -> Tensor:
    """Absolute positions ``[B, N]``: a row's first real token is its ``seen``-th; 0 in the padding before it."""
    firsts = torch.tensor([done - start for done, (start, _) in zip(seen, runs, strict=True)], device=device)
    return (torch.arange(num_columns, device=device) + firsts.unsqueeze(-1)).clamp_(min=0)
