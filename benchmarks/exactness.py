"""The correctness gate: sampled rows and columns of a large call against the definition, one row at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor


def row_counts(groups: list[tuple[int, int]], num_rows: int, position: int, head: int) -> np.ndarray:
    """``c[head, position, t]`` for every t, without a causal mask; symmetric in position and t."""
    t = np.arange(num_rows)
    counts = np.zeros(num_rows)
    for w, r in groups:
        o = head % r
        if position % w % r == o:
            counts += (t // w == position // w) & (t % w % r == o)
    return counts


def largest_errors(
    groups: list[tuple[int, int]], tensors: dict[str, Tensor], *, is_causal: bool, samples: int = 24
) -> dict[str, float]:
    """Largest absolute errors of ``out``, ``lse`` and the three gradients on sampled (row, head), in float64.

    ``tensors`` holds query, key, value, grad_out, out, lse and grad_query, grad_key, grad_value, ``[1, N, H, D]``. The
    gradients of keys and values take ``out`` and ``lse`` of all rows as computed: those are what is sampled beside.
    """
    x = {name: tensor[0].detach().double() for name, tensor in tensors.items()}
    num_rows, num_heads, head_dim = x["query"].shape
    scale = 1 / math.sqrt(head_dim)
    generator = np.random.default_rng(0)
    rows = [0, num_rows - 1, *generator.integers(0, num_rows, samples)]
    worst = dict.fromkeys(("out", "lse", "grad_query", "grad_key", "grad_value"), 0.0)
    for row in map(int, rows):
        head = int(generator.integers(0, num_heads))
        counts = torch.from_numpy(row_counts(groups, num_rows, row, head))
        later = torch.arange(num_rows) > row
        seen = counts.masked_fill(later, 0) if is_causal else counts
        q, k, v, g = (x[name][:, head] for name in ("query", "key", "value", "grad_out"))
        scores = scale * (k @ q[row]) + seen.log()
        lse = scores.logsumexp(0)
        p = (scores - lse).exp()
        out = p @ v
        errors = {"out": out - x["out"][row, head], "lse": lse - x["lse"][row, head]}
        d_scores = p * (v @ g[row] - g[row] @ out)
        errors["grad_query"] = scale * d_scores @ k - x["grad_query"][row, head]
        # The column of this position as a key: who sees it.
        seeing = counts.masked_fill(~later & (torch.arange(num_rows) != row), 0) if is_causal else counts
        column = seeing * (scale * (q @ k[row]) - x["lse"][:, head]).exp()
        column = torch.where(seeing > 0, column, 0.0)
        errors["grad_value"] = column @ g - x["grad_value"][row, head]
        delta = (g * x["out"][:, head]).sum(-1)
        errors["grad_key"] = scale * (column * (g @ v[row] - delta)) @ q - x["grad_key"][row, head]
        for name, error in errors.items():
            worst[name] = max(worst[name], float(error.abs().max()))
    return worst


def passes(errors: dict[str, float], dtype: torch.dtype) -> bool:
    """Within rounding of the dtype on normal inputs: 1e-10 in float64, its own spacing times 64 elsewhere."""
    allowed: dict[Any, float] = {torch.float64: 1e-10}
    return max(errors.values()) <= allowed.get(dtype, 64 * torch.finfo(dtype).eps)
