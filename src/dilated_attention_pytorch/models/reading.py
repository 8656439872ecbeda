"""Attention of new rows to the rows stored in a cache, merged with attention among themselves."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels.masks import ScoreTerms
from dilated_attention_pytorch.kernels.native import ROWS_OF_STREAM
from dilated_attention_pytorch.kernels.products import Result
from dilated_attention_pytorch.kernels.select import select
from dilated_attention_pytorch.ops import attend_with_lse
from dilated_attention_pytorch.ops.dense import Dense
from dilated_attention_pytorch.ops.implementations import IMPLEMENTATIONS
from dilated_attention_pytorch.ops.merge import merge_in_place
from dilated_attention_pytorch.ops.remote import Positions, RemoteKeys, merge_rows
from dilated_attention_pytorch.ops.scores import Scores
from dilated_attention_pytorch.patterns import Pattern, PatternSum
from dilated_attention_pytorch.patterns.blocks import BlockPattern

from .cache_index import CacheIndexStep
from .slots import KeyRange

Stored = tuple[Tensor, ...]
"""Keys and values of one layer, ``[sequences, slots, G, D]``; under a bias by distance their positions, too, int64
``[sequences, slots, G, 1]``."""


def merge_visible_keys(
    step: CacheIndexStep,
    query: Tensor,
    stored: Stored,
    out: Tensor,
    lse: Tensor,
    *,
    offset: int = 0,
    scores: Scores | None = None,
) -> None:
    """Merge attention of ``query``, a slab at position ``offset``, to the stored rows that a step sees.

    Results go into ``out`` and ``lse``; ``scores`` without sinks.

    Raises:
        NotImplementedError: ``"auto"`` stands for an implementation that computes whole calls only.
    """
    num_kv_heads, head_dim = stored[0].shape[2:]
    grouped = [tensor.unflatten(2, (num_kv_heads, -1)) for tensor in (query, out, lse)]
    flat = [tensor.flatten(1, 2) for tensor in stored]
    softcap = 0.0 if scores is None or scores.softcap is None else float(scores.softcap)
    is_by_distance = scores is not None and scores.is_by_distance
    scale = 1.0 / math.sqrt(head_dim)
    impl = IMPLEMENTATIONS[select("auto", query.device, query.dtype, head_dim)]
    if isinstance(impl, Dense):
        raise NotImplementedError(
            'impl="auto" stands for "reference" here, which computes whole calls, and stored rows are read by '
            '"native", "triton" or "aten": choose one of these for a cache, or call the model without a cache'
        )
    if step.is_token and not impl.is_in_place and not is_by_distance:
        # Heads become sequences: one gather and one call, where every launch counts.
        indices, is_absent = step.keys_by_head
        rows = [tensor.transpose(1, 2).flatten(0, 1).unsqueeze(2) for tensor in grouped]
        keys, values = (
            x.index_select(1, indices.view(-1)).unflatten(1, indices.shape).flatten(0, 1).unsqueeze(2) for x in flat[:2]
        )
        hidden = None
        if is_absent is not None:
            hidden = is_absent.repeat(query.shape[0], 1).unsqueeze(2)
            for tensor in (keys, values):
                tensor.masked_fill_(hidden.unsqueeze(3), 0.0)
        terms = ScoreTerms(softcap) if softcap else None
        merge_rows(rows[0], RemoteKeys(keys, values, hidden), rows[1], rows[2], scale=scale, impl=impl, terms=terms)
        return
    for visible in step.visible_keys:
        queries, out_of_keys, lse_of_keys = (tensor[:, visible.rows, visible.heads] for tensor in grouped)
        if impl.is_in_place and queries.shape[1] * queries.shape[3] <= ROWS_OF_STREAM and not is_by_distance:
            keys, values = (rows[:, :, visible.heads] for rows in stored)
            slots = (visible.indices // num_kv_heads).view(visible.num_keys, -1).T
            seen = RemoteKeys(keys, values, seen_rows=slots)
        else:
            keys, values, *places = (
                rows.index_select(1, visible.indices).unflatten(1, (visible.num_keys, -1)) for rows in flat
            )
            seen = RemoteKeys(keys, values)
        terms, positions = ScoreTerms(softcap) if softcap else None, None
        if scores is not None and is_by_distance:
            ratio = query.shape[2] // num_kv_heads
            kv_heads = torch.arange(num_kv_heads, device=query.device)[visible.heads].unsqueeze(1) * ratio
            serving = (kv_heads + torch.arange(ratio, device=query.device)).flatten()
            positions = Positions(offset + visible.rows.start, places[0].squeeze(-1), visible.rows.step or 1)
            bias_at = functools.partial(_bias_at, scores, serving, lse.dtype)
            terms = ScoreTerms(softcap, bias_at=bias_at)
        parts = (queries, seen, out_of_keys, lse_of_keys)
        merge_rows(*parts, scale=scale, impl=impl, positions=positions, terms=terms)


def _bias_at(scores: Scores, serving: Tensor, dtype: torch.dtype, heads: Tensor, distances: Tensor) -> Tensor:
    """The bias by distance of heads counted among ``serving``."""
    return scores.bias_at(serving[heads], distances, dtype)


def merge_key_ranges(
    key_ranges: list[KeyRange],
    pattern: Pattern,
    offset: int,
    query: Tensor,
    stored: Stored,
    out: Tensor,
    lse: Tensor,
    scores: Scores | None = None,
) -> None:
    """Merge attention of ``query``, a slab at position ``offset``, to stored rows under rules; without sinks."""
    num_kv_heads = stored[0].shape[2]
    rules = PatternSum(tuple(map(BlockPattern, pattern.rules)))
    grouped = [tensor.unflatten(2, (num_kv_heads, -1)) for tensor in (query, out, lse)]
    flat, ratio = [tensor.flatten(1, 2) for tensor in stored], query.shape[2] // num_kv_heads
    for key_range in key_ranges:
        heads = range(num_kv_heads)[key_range.heads]
        queries, part_of_out, part_of_lse = (tensor[:, key_range.rows, key_range.heads] for tensor in grouped)
        keys, values = (rows.index_select(1, key_range.indices).unflatten(1, (-1, len(heads))) for rows in flat[:2])
        is_absent = None if key_range.is_absent is None else key_range.is_absent.expand(keys.shape[0], -1)
        part = attend_with_lse(
            queries.flatten(2, 3),
            keys,
            values,
            rules.for_heads(heads, num_kv_heads),
            is_causal=True,
            query_offset=offset,
            key_offset=key_range.position,
            key_padding_mask=is_absent,
            scores=None
            if scores is None
            else scores.for_heads([head * ratio + i for head in heads for i in range(ratio)]),
            heads_first=False,
        )
        of_part = Result(part.out.view(part_of_out.shape), part.lse.view(part_of_lse.shape))
        merge_in_place(part_of_out, part_of_lse, None, of_part)
