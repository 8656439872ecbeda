"""One dense partial whose keys come from another rank or from a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels.masks import Masks, ScoreTerms
from dilated_attention_pytorch.plan.geometry import Axis, Partial
from dilated_attention_pytorch.plan.shards import Block

from .call import Implementation
from .operands import Operand, Role, Rows
from .partials import TermGradients, Work, add_gradients, merge_partials


@dataclass(frozen=True, slots=True)
class RemoteKeys:
    """Keys that all queries of a block attend to."""

    key: Tensor
    """``[B, rows, heads, D]`` with the heads of the query block; any strides, except that the last one is 1."""
    value: Tensor
    hidden: Tensor | None = None
    """bool ``[B, rows, heads]``, True = padding; keys and values are zero there."""
    seen_rows: Tensor | None = None
    """int64 ``[heads, count]``: for every head, the rows that the queries see; None = all. For native kernels."""


@dataclass(frozen=True, slots=True)
class Dropout:
    """Dropout of pairs, determined by the seed and absolute positions."""

    seed: Tensor
    probability: float


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions of the queries and of remote keys, which dropout and a bias by distance depend on."""

    query_offset: int
    """Position of row 0 of the query tensor; row i has position ``query_offset + i``."""
    key_positions: Tensor
    """int64 ``[rows, heads]`` or ``[B, rows, heads]``"""
    query_step: int = 1
    """Positions from one query row to the next."""


def block_view(tensor: Tensor, block: Block) -> Tensor:
    """A block's rows ``[B, count, heads(, D)]`` of a tensor ``[B, rows, heads(, D)]``, without a copy."""
    of_batch, of_row, of_head = tensor.stride()[:3]
    size = (tensor.shape[0], block.count, block.num_heads, *tensor.shape[3:])
    stride = (of_batch, block.step * of_row, block.skew * of_row + of_head, *tensor.stride()[3:])
    return tensor.as_strided(size, stride, tensor.storage_offset() + block.row * of_row + block.head * of_head)


def positions_of(block: Block, offset: int) -> Tensor:
    """Positions ``[count, heads]`` of a block's rows, where row 0 of the tensor is at ``offset``."""
    rows = torch.arange(block.count) * block.step
    return offset + block.row + rows.unsqueeze(1) + torch.arange(block.num_heads) * block.skew


def work_of(
    query: Tensor,
    queries: Block,
    keys: RemoteKeys,
    *,
    ratio: int,
    scale: float,
    impl: Implementation,
    dropout: Dropout | None = None,
    positions: Positions | None = None,
    terms: ScoreTerms | None = None,
) -> Work:
    """Attention of a block's queries to remote keys.

    Args:
        query: ``[B, N, H, D]``, contains the block's rows.
        queries: the block, for the key/value heads of ``keys``.
        keys: keys and values to attend to.
        ratio: query heads per key/value head.
        scale: scale of the scores, positive.
        impl: not the dense one.
        dropout: None = no dropout.
        positions: None without dropout and without a bias by distance.
        terms: terms of the scores.
    """
    axes = (Axis(queries.num_heads, queries.skew, 1),) if queries.num_heads > 1 else ()
    num_keys = keys.key.shape[1]
    partial = Partial(queries.row, 0, queries.count, num_keys, queries.step, queries.head, axes=axes)
    masks = Masks(keys.hidden)
    if dropout is not None:
        masks = replace(masks, seed=dropout.seed, dropout_p=dropout.probability)
    if positions is not None:
        masks = replace(
            masks,
            query_offset=positions.query_offset,
            key_positions=positions.key_positions,
            query_step=positions.query_step,
        )
    tensors = query, keys.key, keys.value
    seen = keys.seen_rows
    return Work((partial,), *tensors, ratio, scale, impl, masks, is_remote=True, seen_rows=seen, terms=terms)


def merge_keys(work: Work, out: Tensor, lse: Tensor, rest: Tensor | None = None) -> None:
    """Merge into ``out [B, N, H, D]`` and ``lse [B, N, H]`` of all query rows, both in the accumulation dtype."""
    merge_partials(work, Operand(out, role=Role.MERGED_INTO), lse, rest)


def add_key_gradients(
    work: Work,
    grad_query: Tensor,
    grads: RemoteKeys,
    out: Tensor,
    lse: Tensor,
    rest: Tensor | None,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    of_terms: TermGradients | None = None,
) -> None:
    """Add gradients to ``grad_query [B, N, H, D]`` and to ``grads`` of the keys, all in the accumulation dtype."""
    of_query = Operand(grad_query, role=Role.ADDED_TO)
    of_key, of_value = (Operand(x, Rows.REMOTE, Role.ADDED_TO) for x in (grads.key, grads.value))
    add_gradients(work, (of_query, of_key, of_value), None, out, lse, rest, grad_out, grad_lse, of_terms)


def merge_rows(
    query: Tensor,
    keys: RemoteKeys,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    impl: Implementation,
    positions: Positions | None = None,
    terms: ScoreTerms | None = None,
) -> None:
    """Merge the attention of rows ``[B, N, G, H / G, D]`` to the keys ``[B, M, G, D]`` into ``out`` and ``lse``.

    Query heads are grouped by key/value head; the stride between groups is arbitrary. With a bias by distance,
    ``positions`` are given, and heads are counted among those of ``query``.
    """
    bias_at = None if terms is None else terms.bias_at
    tensors, (num_rows, heads, ratio) = (query, out, lse), query.shape[1:4]
    if num_rows == 1 and bias_at is None:
        # The query heads of a key/value head become rows, so that its keys are read once for all of them.
        parts = [[x[:, 0].transpose(1, 2) for x in tensors]]
    elif all(x.stride(2) == ratio * x.stride(3) for x in tensors):
        parts = [[x.flatten(2, 3) for x in tensors]]
    else:
        parts = [[x.select(3, index) for x in tensors] for index in range(ratio)]
    for index, (rows, into, log) in enumerate(parts):
        if terms is not None and bias_at is not None and len(parts) > 1:
            terms = replace(terms, bias_at=_of_every(bias_at, ratio, index))
        block = Block(0, rows.shape[1], 1, 0, heads, 0)
        of_rows = rows.shape[2] // heads
        work = work_of(rows, block, keys, ratio=of_rows, scale=scale, impl=impl, positions=positions, terms=terms)
        merge_keys(work, into, log)


def _of_every(
    bias_at: Callable[[Tensor, Tensor], Tensor], ratio: int, index: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """The bias where head g stands for head ``g * ratio + index``."""
    return lambda heads, distances: bias_at(heads * ratio + index, distances)
