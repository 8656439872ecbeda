"""What the forward and the gradient of the queries share: both hold a tile of query rows and walk over keys."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .counter import DropoutArguments, dropout_of, head_state, query_state
from .terms import TileTerms, biased, scaled, terms_of_queries
from .tiles import load_rows, product, rows_of


class QueryTile(NamedTuple):
    """The query rows of a tile, with the query head of each."""

    slot: tl.tensor
    """``[rows]``: number of the row in the tile; the heads that share a tile have the same numbers."""
    row: tl.tensor
    """-1 in slots without one."""
    head: tl.tensor
    position: tl.tensor
    query: tl.tensor
    """``[rows, BLOCK_D]``."""
    dropout: DropoutArguments
    states: tl.tensor
    """Random states of the rows; never read without dropout."""
    terms: TileTerms
    """Never read without terms."""


@triton.jit
def query_rows(ORDER, tile, num_queries, OPTIONS: tl.constexpr):
    """The row of each query of a tile; -1 in slots without one."""
    slot = tl.arange(0, OPTIONS.BLOCK_ROWS) // OPTIONS.PACK
    return rows_of(ORDER, tile, num_queries, slot, OPTIONS.BLOCK_ROWS // OPTIONS.PACK, OPTIONS)


@triton.jit
def queries_of(OPERANDS, ORDER, tile, slabs, OPTIONS: tl.constexpr):
    """The :class:`QueryTile` of a tile."""
    row = query_rows(ORDER, tile, slabs.num_queries, OPTIONS)
    slot = tl.arange(0, OPTIONS.BLOCK_ROWS) // OPTIONS.PACK
    of_pack = tl.arange(0, OPTIONS.BLOCK_ROWS) % OPTIONS.PACK
    head = tile.kv_head * OPTIONS.RATIO + tile.head_block * OPTIONS.PACK + of_pack
    query = load_rows(OPERANDS.QUERY, tile, row, head, row >= 0, OPTIONS.KEY_WIDTH)
    position = row + slabs.query_offset
    dropout = dropout_of(OPERANDS.DROPOUT, OPTIONS.DROPOUT)
    states, terms = position, position
    if OPTIONS.DROPOUT:
        states = query_state(head_state(dropout.seed, tile.batch, head.to(tl.int64)), position.to(tl.int64))
    if OPTIONS.TERMS:
        terms = terms_of_queries(OPERANDS.TERMS, tile, head, row, slabs, OPTIONS)
    return QueryTile(slot, row, head, position, query, dropout, states, terms)


@triton.jit
def scores_of(queries, key, key_row, is_key, MASKED: tl.constexpr, OPTIONS: tl.constexpr):
    """The scores of a block of keys before the factor ``scale_log2``, and the hyperbolic tangents of a cap."""
    score = product(queries.query, tl.trans(key))
    share = score
    if OPTIONS.TERMS:
        score, share = scaled(score, queries.terms, OPTIONS)
        score = biased(score, queries.terms, key_row, is_key, MASKED or OPTIONS.PADDED, OPTIONS)
    return score, share


@triton.jit
def visible(values, other, first, column, is_key, seen, MASKED: tl.constexpr, OPTIONS: tl.constexpr):
    """The values of a block's pairs, ``[queries, keys]``; ``other`` where the query does not see the key.

    ``first`` is the index of the block's first key in its run, ``column`` that of each key in the block. Blocks that
    are not ``MASKED`` hide nothing but padding. A thread of a matrix product has the columns ``8 j + c`` and
    ``8 j + c + 1`` of its lines, with its own c. The terms that depend on c are compared with ``8 j``, which is part of
    an instruction: columns in registers would be too many for the loops.
    """
    if OPTIONS.PADDED or (MASKED and not (OPTIONS.CAUSAL or OPTIONS.BANDED)):
        values = tl.where(is_key[None, :], values, other)
    if MASKED and (OPTIONS.CAUSAL or OPTIONS.BANDED):
        eights, rest = (column // 8 * 8)[None, :], (first + column % 8)[None, :]
        values = tl.where(eights < seen.stop[:, None] - rest, values, other)
        if OPTIONS.BANDED:
            values = tl.where(eights < seen.start[:, None] - rest, other, values)
    return values
