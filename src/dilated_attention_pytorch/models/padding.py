"""Padded batches: the range of real tokens of each row, and groups of rows with equal ranges."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Run = tuple[int, int]
"""Start and stop column of a row's real tokens; equal for a row without any."""
Key = TypeVar("Key", bound=Hashable)


def real_runs(attention_mask: Tensor) -> list[Run]:
    """The column range of ones of every row of ``attention_mask [B, N]`` (1 = real).

    Raises:
        ValueError: the mask holds other numbers than 0 and 1, such as those of an additive mask.
        NotImplementedError: the ones of a row are not contiguous, or the model is being exported.
    """
    if torch.compiler.is_exporting():
        raise NotImplementedError(
            "attention_mask says by its values which rows are computed together, and torch.export fixes the program "
            "without them: export with rows of one length, without attention_mask"
        )
    num_rows, num_columns = attention_mask.shape
    if num_columns == 0:
        return [(0, 0)] * num_rows
    real = attention_mask.bool()
    counts = real.sum(dim=1)
    rises = real[:, :1].sum(dim=1) + (real[:, 1:] & ~real[:, :-1]).sum(dim=1)
    others = ((attention_mask != 0) & (attention_mask != 1)).sum(dim=1)
    starts, counts, rises, others = torch.stack([real.int().argmax(dim=1), counts, rises, others]).tolist()
    if any(others):
        row = next(index for index, number in enumerate(others) if number)
        raise ValueError(
            f"attention_mask must hold only 1 (real) and 0 (padding), got {others[row]} other numbers in row {row}; of "
            "an additive mask (0 and -inf) pass mask == 0, and boundaries of documents as cu_seqlens"
        )
    if any(rise > 1 for rise in rises):
        row = next(index for index, rise in enumerate(rises) if rise > 1)
        raise NotImplementedError(
            "every row of attention_mask must hold one run of ones, with padding before or after it only: got "
            f"{rises[row]} runs in row {row}; make each row's real tokens contiguous, or pack documents with "
            "cu_seqlens"
        )
    return [(start, start + count) for start, count in zip(starts, counts, strict=True)]


def check_rows_are_real(runs: Sequence[Run], name: str = "attention_mask") -> None:
    """Raise ValueError, naming the mask, if a row has no real tokens."""
    for row, (start, stop) in enumerate(runs):
        if start == stop:
            raise ValueError(f"{name} must mark at least one real token in every row, got none in row {row}")


def attend_runs(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_runs: Sequence[Run] | None,
    key_runs: Sequence[Run] | None,
) -> Tensor:
    """Attention among each row's real tokens only, as ``attend`` computes it for them alone; 0 at padding.

    Rows with the same column range share one call. None = all tokens of the queries, or of the keys, are real.
    """
    if query_runs is None and key_runs is None:
        return attend(query, key, value)
    query_runs = query_runs or [(0, query.shape[1])] * query.shape[0]
    key_runs = key_runs or [(0, key.shape[1])] * key.shape[0]
    out = torch.zeros_like(query)
    for (of_queries, of_keys), members in group_rows(list(zip(query_runs, key_runs, strict=True))).items():
        rows = torch.tensor(members, device=query.device)
        queries, keys = slice(*of_queries), slice(*of_keys)
        out[rows, queries] = attend(query[rows, queries], key[rows, keys], value[rows, keys])
    return out


def group_rows(keys: Sequence[Key]) -> dict[Key, list[int]]:
    """Row indices by column range (or pair of ranges), in order of first appearance."""
    rows: dict[Key, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return rows


def positions_of(runs: Sequence[Run], num_columns: int, seen: Sequence[int], device: torch.device) -> Tensor:
    """Absolute positions ``[B, N]``: a row's first real token has position ``seen``; 0 in padding before it."""
    firsts = torch.tensor([done - start for done, (start, _) in zip(seen, runs, strict=True)], device=device)
    return (torch.arange(num_columns, device=device) + firsts.unsqueeze(-1)).clamp_(min=0)
