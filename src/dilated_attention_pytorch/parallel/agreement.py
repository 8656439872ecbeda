"""The agreement of all ranks on a call, before any of them sends a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from dilated_attention_pytorch.estimate.parallel import ShardedShape, Strategy, cheapest
from dilated_attention_pytorch.kernels.select import default_of, select
from dilated_attention_pytorch.ops.call import Call
from dilated_attention_pytorch.ops.scores import Scores
from dilated_attention_pytorch.ops.validation import check_cu_seqlens, documents_of
from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.plan.heads import Heads
from dilated_attention_pytorch.plan.layout import Layout
from dilated_attention_pytorch.plan.shards import ShardedCall

from .sharding import Ranks, check_layout, num_rows_of

STRATEGIES: tuple[str, ...] = get_args(Strategy)


@dataclass(frozen=True, slots=True)
class Sharding:
    """The arguments of :func:`parallel.attend` that :func:`attend` does not have, except the mesh."""

    strategy: Strategy
    layout: Layout
    sequence_length: int | None
    key_sequence_length: int | None


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


def agree(ranks: Ranks, call: Call, scores: Scores, sharding: Sharding, *, is_lse_wanted: bool) -> Agreed:
    """Check this rank's sharding and, once per distinct call, that all ranks make the same call.

    Args:
        ranks: the ranks that share the sequence.
        call: query, key and value are this rank's rows, boundaries of documents those of the whole sequence.
        scores: terms of the scores.
        sharding: how the rows are sharded.
        is_lse_wanted: whether the log-sum-exp is returned.
    """
    query, key, pattern, offset, key_offset = call.query, call.key, call.pattern, call.first_query, call.key_offset
    assert pattern is not None
    layout = check_layout(sharding.layout)
    check_strategy(sharding.strategy)
    length = sharding.sequence_length
    if call.cu_seqlens is not None:
        check_cu_seqlens(call.cu_seqlens, query)
        length = int(call.cu_seqlens[-1]) if length is None else length
    num_queries = num_rows_of(query.shape[1], length, ranks, layout, "query")
    # Use only values that all ranks share: on some ranks, query and key can have equal numbers of rows by coincidence.
    num_keys = num_queries if sharding.key_sequence_length is None else sharding.key_sequence_length
    num_rows_of(key.shape[1], num_keys, ranks, layout, "key")
    for rule in pattern.rules:
        rule.check(max(offset + num_queries, key_offset + num_keys), key.shape[2])
    documents = documents_of(call.cu_seqlens, num_queries)
    is_one_sequence = num_keys == num_queries and key_offset == offset
    if documents is not None and not (is_one_sequence and offset == 0):
        raise ValueError(
            "cu_seqlens packs documents of self-attention, so query and key must cover the same rows starting at "
            f"position 0: got {num_queries} query rows at {offset} and {num_keys} key rows at {key_offset}"
        )
    asked = default_of(call.impl)
    is_fused = call.dropout_p == 0.0 and all(x is None for x in (scores.softcap, *scores.tensors))
    head_dim = max(query.shape[-1], call.value.shape[-1])
    impl = select(asked, query.device, query.dtype, head_dim, is_fused=is_fused)
    strategy = sharding.strategy
    if strategy == "auto":
        sharded = ShardedCall(pattern, key.shape[2], call.is_causal, offset, documents)
        size = ShardedShape(
            sharded,
            query.shape[0],
            num_queries,
            query.shape[2],
            query.shape[3],
            query.dtype,
            call.key_padding_mask is not None,
            tuple(communicator.size for communicator in (ranks.rows, ranks.heads) if communicator is not None),
        )
        is_for_heads = ranks.heads is None and not (is_one_sequence and asked != "reference")
        strategy = "heads" if is_for_heads else cheapest(size, layout)
    _check_strategy(ranks, strategy, query, key, pattern, asked, is_one_sequence=is_one_sequence)
    if scores.coordinates is not None:
        raise NotImplementedError("coordinates of scores do not travel between ranks: call attend on one rank")
    if scores.key_bias is not None and (strategy != "heads" or ranks.heads is not None):
        raise NotImplementedError(
            f'key_bias of scores does not travel with the rows of strategy={strategy!r}: use strategy="heads" on a 1-D '
            "mesh"
        )
    numbers = ranks.agree(
        {
            "strategy": strategy,
            "layout": layout,
            "query": [query.shape[0], num_queries, *query.shape[2:]],
            "key": [key.shape[0], num_keys, *key.shape[2:]],
            "dtype": str(query.dtype),
            "pattern": pattern.spec,
            "is_causal": call.is_causal,
            "scale": call.scale,
            "query_offset": offset,
            "key_offset": key_offset,
            "cu_seqlens": documents,
            "key_padding_mask": "none" if call.key_padding_mask is None else "a mask",
            "value": call.value.shape[3],
            "dropout_p": call.dropout_p,
            "scores": [scores.softcap, *(None if x is None else list(x.shape[1:]) for x in scores.tensors[:3])],
            "key_bias": "none" if scores.key_bias is None else "a bias",
            "impl": asked,
            "lse": is_lse_wanted,
            "gradient": torch.is_grad_enabled()
            and any(
                tensor is not None and tensor.requires_grad for tensor in (query, key, call.value, *scores.tensors)
            ),
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
