"""One partial by matrix products over blocks of queries: what no fused kernel does (dropout, gradients of the lse).

Takes the same views as the fused kernels; a block of scores is all that is ever materialised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

KeepFactors = Callable[[int, int], Tensor]
"""Dropout factors of the query rows ``[start, stop)`` of a view: ``[problems, problems, stop - start, keys]``."""

_BLOCK_SCORES = 1 << 21


def _blocks(
    query: Tensor, key: Tensor, bias: Tensor | None, *, is_causal: bool, scale: float
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Slices of query rows with the scaled queries and biased, masked scores of each, in the accumulation dtype."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    num_queries, num_keys = query.shape[2], key.shape[2]
    keys = key.to(dtype).mT
    rows_per_block = max(1, _BLOCK_SCORES // max(1, query.shape[0] * query.shape[1] * num_keys))
    for start in range(0, num_queries, rows_per_block):
        rows = slice(start, min(start + rows_per_block, num_queries))
        queries = query[:, :, rows].to(dtype) * scale
        scores = queries @ keys
        if bias is not None:
            scores += bias[:, :, rows]
        if is_causal:
            later = torch.arange(num_keys, device=query.device) > torch.arange(
                rows.start, rows.stop, device=query.device
            ).unsqueeze(-1)
            scores.masked_fill_(later, float("-inf"))
        yield rows, queries, scores


def blockwise_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one partial, in the accumulation dtype."""
    outs, lses = [], []
    for _, _, scores in _blocks(query, key, bias, is_causal=is_causal, scale=scale):
        lse = torch.logsumexp(scores, dim=-1)
        outs.append((scores - lse.unsqueeze(-1)).exp_() @ value.to(scores.dtype))
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def blockwise_dropped_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    keep_factors: KeepFactors,
    *,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """What one partial adds to the output after dropout of the merged probabilities ``exp(s - lse)``."""
    outs = []
    for rows, _, scores in _blocks(query, key, bias, is_causal=is_causal, scale=scale):
        probabilities = scores.sub_(lse[:, :, rows].unsqueeze(-1)).exp_()
        probabilities *= keep_factors(rows.start, rows.stop)
        outs.append(probabilities @ value.to(scores.dtype))
    return torch.cat(outs, dim=2)


def blockwise_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    delta: Tensor,
    bias: Tensor | None,
    keep_factors: KeepFactors | None,
    *,
    is_causal: bool,
    scale: float,
    product_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one partial under the merged ``lse``, in the accumulation dtype.

    ``dS = P * (keep * dP - delta)`` with ``delta = rowsum(dO * O) - dL``: the gradient of the log-sum-exp included.
    ``product_dtype`` is what P and dS are rounded to before they are multiplied, as fused kernels round them; the
    accumulation dtype without it.
    """
    grad_queries = []
    grad_key: Tensor | None = None
    grad_value: Tensor | None = None
    for rows, queries, scores in _blocks(query, key, bias, is_causal=is_causal, scale=scale):
        dtype = scores.dtype
        rounded = product_dtype or dtype
        grads = grad_out[:, :, rows].to(dtype)
        probabilities = scores.sub_(lse[:, :, rows].unsqueeze(-1)).exp_()
        grad_scores = grads @ value.to(dtype).mT
        dropped = probabilities
        if keep_factors is not None:
            factors = keep_factors(rows.start, rows.stop)
            grad_scores *= factors
            dropped = probabilities * factors
        value_part = (dropped.to(rounded).mT @ grads.to(rounded)).to(dtype)
        grad_scores -= delta[:, :, rows].unsqueeze(-1)
        grad_scores *= probabilities
        grad_scores = grad_scores.to(rounded)
        key_part = (grad_scores.mT @ queries.to(rounded)).to(dtype)
        grad_queries.append((grad_scores @ key.to(rounded)).to(dtype).mul_(scale))
        grad_key = key_part if grad_key is None else grad_key.add_(key_part)
        grad_value = value_part if grad_value is None else grad_value.add_(value_part)
    assert grad_key is not None
    assert grad_value is not None
    return torch.cat(grad_queries, dim=2), grad_key, grad_value
