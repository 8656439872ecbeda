"""The agreement of all ranks on a call, before any of them sends a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from dilated_attention_pytorch.estimate.parallel import ShardedShape, Strategy, cheapest
from dilated_attention_pytorch.kernels.select import Impl, default_of, select
from dilated_attention_pytorch.ops.validation import check_cu_seqlens, documents_of
from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.plan.heads import Heads
from dilated_attention_pytorch.plan.layout import Layout
from dilated_attention_pytorch.plan.shards import ShardedCall

from .sharding import Ranks, check_layout, num_rows_of

STRATEGIES: tuple[str, ...] = get_args(Strategy)


@dataclass(frozen=True, kw_only=True, slots=True)
class Keywords:
    """The keywords of :func:`parallel.attend`, except the mesh."""

    strategy: Strategy
    layout: Layout
    sequence_length: int | None
    key_sequence_length: int | None
    is_causal: bool
    scale: float | None
    query_offset: int
    key_offset: int
    cu_seqlens: Tensor | None
    key_padding_mask: Tensor | None
    dropout_p: float
    impl: Impl


@dataclass(frozen=True, slots=True)
class Agreed:
    """Values that all ranks agreed on."""

    strategy: Strategy
    num_queries: int
    num_keys: int
    documents: tuple[int, ...] | None
    impl: str
    """The implementation that computes on this rank."""
    number: int
    """Tag of the messages along the row axis."""
    heads_number: int
    """Tag of the messages along the head axis."""


def check_strategy(strategy: str) -> None:
    """Raise :class:`ValueError` unless ``strategy`` is valid."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(map(repr, STRATEGIES))}, got {strategy!r}")


def agree(
    ranks: Ranks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    keywords: Keywords,
    *,
    is_lse_wanted: bool,
) -> Agreed:
    """Check this rank's sharding and, once per distinct call, that all ranks make the same call."""
    is_causal, offset, key_offset, mask = (
        keywords.is_causal,
        keywords.query_offset,
        keywords.key_offset,
        keywords.key_padding_mask,
    )
    layout = check_layout(keywords.layout)
    check_strategy(keywords.strategy)
    length = keywords.sequence_length
    if keywords.cu_seqlens is not None:
        check_cu_seqlens(keywords.cu_seqlens, query)
        length = int(keywords.cu_seqlens[-1]) if length is None else length
    num_queries = num_rows_of(query.shape[1], length, ranks, layout, "query")
    # Use only values that all ranks share: on some ranks, query and key can have equal numbers of rows by coincidence.
    num_keys = num_queries if keywords.key_sequence_length is None else keywords.key_sequence_length
    num_rows_of(key.shape[1], num_keys, ranks, layout, "key")
    for rule in pattern.rules:
        rule.check(max(offset + num_queries, key_offset + num_keys), key.shape[2])
    documents = documents_of(keywords.cu_seqlens, num_queries)
    is_one_sequence = num_keys == num_queries and key_offset == offset
    if documents is not None and not (is_one_sequence and offset == 0):
        raise ValueError(
            "cu_seqlens packs documents of self-attention, so query and key must cover the same rows starting at "
            f"position 0: got {num_queries} query rows at {offset} and {num_keys} key rows at {key_offset}"
        )
    asked = default_of(keywords.impl)
    impl = select(asked, query.device, query.dtype, query.shape[-1])
    strategy = keywords.strategy
    if strategy == "auto":
        call = ShardedCall(pattern, key.shape[2], is_causal, offset, documents)
        size = ShardedShape(
            call,
            query.shape[0],
            num_queries,
            query.shape[2],
            query.shape[3],
            query.dtype,
            mask is not None,
            tuple(communicator.size for communicator in (ranks.rows, ranks.heads) if communicator is not None),
        )
        needs_whole = ranks.heads is None and not (is_one_sequence and asked != "reference")
        strategy = "heads" if needs_whole else cheapest(size, layout)
    _check_strategy(ranks, strategy, query, key, pattern, asked, is_one_sequence=is_one_sequence)
    numbers = ranks.agree(
        {
            "strategy": strategy,
            "layout": layout,
            "query": [query.shape[0], num_queries, *query.shape[2:]],
            "key": [key.shape[0], num_keys, *key.shape[2:]],
            "dtype": str(query.dtype),
            "pattern": pattern.spec,
            "is_causal": is_causal,
            "scale": keywords.scale,
            "query_offset": offset,
            "key_offset": key_offset,
            "cu_seqlens": documents,
            "key_padding_mask": "none" if mask is None else "a mask",
            "dropout_p": keywords.dropout_p,
            "impl": asked,
            "lse": is_lse_wanted,
            "gradient": torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)),
        }
    )
    return Agreed(strategy, num_queries, num_keys, documents, impl, *numbers)


def _check_strategy(
    ranks: Ranks, strategy: Strategy, query: Tensor, key: Tensor, pattern: Pattern, impl: str, *, is_one_sequence: bool
) -> None:
    """Raise if the strategy does not support the call."""
    axis = ranks.heads or (ranks.rows if strategy == "heads" else None)
    if axis is not None:
        Heads.split(query.shape[2], key.shape[2], axis.size)
    if strategy == "heads":
        if ranks.heads is not None:
            raise ValueError(
                'strategy="heads" takes a 1-D mesh: on a 2-D mesh the heads are split along the second axis, and the '
                'strategy says what the first does; pass "ring" or "gather"'
            )
        return
    remedy = 'use strategy="heads" on a 1-D mesh'
    if not is_one_sequence:
        raise NotImplementedError(
            f"strategy={strategy!r} is for self-attention, with equal rows and offsets of query and key: got "
            f"{query.shape[1]} and {key.shape[1]} rows of this rank; {remedy}"
        )
    if strategy == "gather" and pattern.rules:
        raise NotImplementedError(
            "strategy='gather' gathers whole segments, so it is for dilated patterns: for windows, blocks and "
            'global tokens use strategy="ring", or strategy="heads" on a 1-D mesh'
        )
    if any(group.boundaries is not None for group in pattern.groups):
        raise NotImplementedError(
            f"strategy={strategy!r} needs segments of one length, and a SegmentedPattern has ragged ones; {remedy}"
        )
    if any(group.tail == "zero_padded" for group in pattern.groups):
        raise NotImplementedError(
            f'tail="zero_padded" needs whole segments, which no rank has under strategy={strategy!r}; {remedy}, '
            'or tail="ragged"'
        )
    if impl == "reference":
        raise NotImplementedError(
            f'impl="reference" needs whole sequences, which no rank has under strategy={strategy!r}; {remedy}, or '
            'impl="aten"'
        )
