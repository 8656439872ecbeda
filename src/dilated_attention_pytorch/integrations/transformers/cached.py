"""Causal attention of new tokens to cached ones, with padding or in a static cache."""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention_pytorch.ops import Scores, attend
from dilated_attention_pytorch.patterns import Pattern, pattern_from_spec

from .documents import UNWRITTEN, is_unread


def attend_cached(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    pattern: Pattern,
    scale: float | None,
    dropout_p: float,
    scores: Scores | None,
) -> Tensor:
    """Each row's attention as if its padding were not there: positions count its real tokens.

    Within a graph it is one operator without a gradient, since positions follow from the values of ``documents``.

    Args:
        query: ``[B, N, H, D]``, the last N of the written columns.
        key, value: ``[B, columns, G, D]``, ``[B, columns, G, Dv]``.
        documents: int32 ``[B or 1, columns]``: 0 for a real token, or padding, or unwritten.
        pattern, scale, dropout_p: see :func:`attend`.
        scores: cap, sinks and biases by distance, see :class:`Scores`.

    Returns:
        ``[B, N, H, Dv]``, 0 at padding.
    """
    if is_unread(documents):
        terms = scores or Scores()
        return _attend_cached(
            query,
            key,
            value,
            documents,
            pattern.spec,
            scale,
            dropout_p,
            terms.softcap,
            terms.sinks,
            terms.slopes,
            terms.distance_bias,
        )
    num_written = int((documents[0] != UNWRITTEN).sum())
    first = num_written - query.shape[1]
    kinds, kind_of_row = (documents[:, :num_written] >= 0).unique(dim=0, return_inverse=True)
    out = query.new_zeros(*query.shape[:3], value.shape[3])
    for kind, real in enumerate(kinds):
        columns = real.nonzero().squeeze(1)
        new = columns[columns >= first] - first
        if not new.numel():
            continue
        rows = slice(None) if len(kinds) == 1 else (kind_of_row == kind).nonzero().squeeze(1)
        seen, at = _as_slice(columns), _as_slice(new)
        queries = query[rows]
        part = out.new_zeros(len(queries), *out.shape[1:])
        part[:, at] = attend(
            queries[:, at],
            key[rows][:, seen],
            value[rows][:, seen],
            pattern,
            is_causal=True,
            scale=scale,
            query_offset=len(columns) - len(new),
            dropout_p=dropout_p,
            scores=scores,
            heads_first=False,
        )
        out[rows] = part
    return out


def _as_slice(columns: Tensor) -> Tensor | slice:
    """Adjacent columns as a slice, which copies nothing."""
    first, last = int(columns[0]), int(columns[-1])
    return slice(first, last + 1) if last - first + 1 == len(columns) else columns


@torch.library.custom_op("dilated_attention_pytorch::attend_cached", mutates_args=())
def _attend_cached(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    pattern: str,
    scale: float | None,
    dropout_p: float,
    softcap: float | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    distance_bias: Tensor | None,
) -> Tensor:
    scores = Scores(softcap=softcap, sinks=sinks, slopes=slopes, distance_bias=distance_bias)
    return attend_cached(query, key, value, documents, pattern_from_spec(pattern), scale, dropout_p, scores)


@_attend_cached.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])
