"""Attention of new rows to the rows stored in a cache, merged with attention among themselves."""

from __future__ import annotations

import math

from torch import Tensor

from dilated_attention_pytorch.kernels.native import ROWS_OF_STREAM
from dilated_attention_pytorch.kernels.products import Result
from dilated_attention_pytorch.kernels.select import select
from dilated_attention_pytorch.ops import attend_with_lse
from dilated_attention_pytorch.ops.dense import Dense
from dilated_attention_pytorch.ops.implementations import IMPLEMENTATIONS
from dilated_attention_pytorch.ops.merge import merge_in_place
from dilated_attention_pytorch.ops.remote import RemoteKeys, merge_rows
from dilated_attention_pytorch.patterns import Pattern, PatternSum
from dilated_attention_pytorch.patterns.blocks import BlockPattern

from .cache_index import CacheIndexStep
from .slots import KeyRange

Stored = tuple[Tensor, Tensor]
"""Keys and values of one layer, ``[sequences, slots, G, D]``."""


def merge_visible_keys(step: CacheIndexStep, query: Tensor, stored: Stored, out: Tensor, lse: Tensor) -> None:
    """Merge attention of ``query`` to the stored rows that a step sees into ``out`` and ``lse``.

    Raises:
        NotImplementedError: ``"auto"`` stands for an implementation that computes whole calls only.
    """
    num_kv_heads, head_dim = stored[0].shape[2:]
    grouped = [tensor.unflatten(2, (num_kv_heads, -1)) for tensor in (query, out, lse)]
    flat = [tensor.flatten(1, 2) for tensor in stored]
    scale = 1.0 / math.sqrt(head_dim)
    impl = IMPLEMENTATIONS[select("auto", query.device, query.dtype, head_dim)]
    if isinstance(impl, Dense):
        raise NotImplementedError(
            'impl="auto" stands for "reference" here, which computes whole calls, and stored rows are read by '
            '"native", "triton" or "aten": choose one of these for a cache, or call the model without a cache'
        )
    if step.is_token and not impl.is_in_place:
        # Heads become sequences: one gather and one call, where every launch counts.
        indices, is_absent = step.keys_by_head
        rows = [tensor.transpose(1, 2).flatten(0, 1).unsqueeze(2) for tensor in grouped]
        keys, values = (
            x.index_select(1, indices.view(-1)).unflatten(1, indices.shape).flatten(0, 1).unsqueeze(2) for x in flat
        )
        hidden = None
        if is_absent is not None:
            hidden = is_absent.repeat(query.shape[0], 1).unsqueeze(2)
            for tensor in (keys, values):
                tensor.masked_fill_(hidden.unsqueeze(3), 0.0)
        merge_rows(rows[0], RemoteKeys(keys, values, hidden), rows[1], rows[2], scale=scale, impl=impl)
        return
    for visible in step.visible_keys:
        queries, out_of_keys, lse_of_keys = (tensor[:, visible.rows, visible.heads] for tensor in grouped)
        if impl.is_in_place and queries.shape[1] * queries.shape[3] <= ROWS_OF_STREAM:
            keys, values = (rows[:, :, visible.heads] for rows in stored)
            slots = (visible.indices // num_kv_heads).view(visible.num_keys, -1).T
            seen = RemoteKeys(keys, values, seen_rows=slots)
        else:
            keys, values = (rows.index_select(1, visible.indices).unflatten(1, (visible.num_keys, -1)) for rows in flat)
            seen = RemoteKeys(keys, values)
        merge_rows(queries, seen, out_of_keys, lse_of_keys, scale=scale, impl=impl)


def merge_key_ranges(
    key_ranges: list[KeyRange], pattern: Pattern, offset: int, query: Tensor, stored: Stored, out: Tensor, lse: Tensor
) -> None:
    """Merge attention of ``query``, a slab at position ``offset``, to stored rows under rules."""
    num_kv_heads = stored[0].shape[2]
    rules = PatternSum(tuple(map(BlockPattern, pattern.rules)))
    grouped = [tensor.unflatten(2, (num_kv_heads, -1)) for tensor in (query, out, lse)]
    flat = [tensor.flatten(1, 2) for tensor in stored]
    for key_range in key_ranges:
        heads = range(num_kv_heads)[key_range.heads]
        queries, part_of_out, part_of_lse = (tensor[:, key_range.rows, key_range.heads] for tensor in grouped)
        keys, values = (rows.index_select(1, key_range.indices).unflatten(1, (-1, len(heads))) for rows in flat)
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
            heads_first=False,
        )
        of_part = Result(part.out.view(part_of_out.shape), part.lse.view(part_of_lse.shape))
        merge_in_place(part_of_out, part_of_lse, None, of_part)
