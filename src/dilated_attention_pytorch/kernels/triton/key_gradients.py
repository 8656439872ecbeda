"""The gradients of keys and values: a kernel holds key rows and walks over the queries that see them.

Each row has one owner that adds in a fixed order, as in :mod:`query_gradients`: two runs give equal bits.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .counter import DropoutArguments, dropout_of, head_state, keep_factors, key_state, query_state
from .forward import LOG2_E
from .runs import is_active_in, is_in_band, load_run
from .terms import TileTerms, bias_of_head, biased_by_queries, scaled, terms_of_keys
from .tiles import (
    SIZES,
    CallRows,
    Layout,
    head_of,
    lines_of,
    load_block,
    load_rows,
    product,
    rounded,
    rows_of,
    rows_of_run,
    store_lines,
    tile_of,
)


class KeyTile(NamedTuple):
    """The key rows of a tile."""

    position: tl.tensor
    key: tl.tensor
    """``[rows, BLOCK_D]``."""
    value: tl.tensor
    dropout: DropoutArguments
    states: tl.tensor
    """Random states of the rows; never read without dropout."""
    terms: TileTerms
    """Never read without terms."""


class Queries(NamedTuple):
    """Queries of one head, with the gradients of their outputs, their log-sum-exps and deltas."""

    QUERY: tl.tuple
    """Pointer to the first row, and the stride of rows."""
    GRAD_OUT: tl.tuple
    LSE: tl.tensor
    DELTA: tl.tensor
    num_heads: tl.tensor
    """Stride of the rows of ``LSE`` and ``DELTA``."""
    offset: tl.tensor
    """Position of the first row."""
    state: tl.tensor
    """Random state of the head; never read without dropout."""
    bias: tl.tensor
    """From :func:`.bias_of_head`."""


@triton.jit
def _key_blocks(
    keys,
    grad_key,
    grad_value,
    grad_key_bias,
    queries,
    run,
    is_active,
    scale_log2,
    HAS_GRAD_KEY_BIAS: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Add a run of queries to the tile's gradients of keys and values.

    Blocks from ``clear_from`` to ``clear_to`` see every key of the tile. This is a branch in one loop, where the other
    kernels have two loops: with two accumulators, no registers are left for the values that a second loop keeps alive.
    """
    first, rate, count = run.first, run.rate, run.count
    line = tl.arange(0, OPTIONS.BLOCK_RUN)
    first_row, wide_rate = first - queries.offset, rate.to(tl.int64)
    query_pointers, query_step = rows_of_run(queries.QUERY, first_row, rate, OPTIONS.BLOCK_RUN, OPTIONS.KEY_WIDTH)
    grad_pointers, grad_step = rows_of_run(queries.GRAD_OUT, first_row, rate, OPTIONS.BLOCK_RUN, OPTIONS.VALUE_WIDTH)
    line_pointers = first_row.to(tl.int64) * queries.num_heads + line * wide_rate * queries.num_heads
    line_step = queries.num_heads * wide_rate * OPTIONS.BLOCK_RUN
    clear_from = (run.extra + OPTIONS.BLOCK_RUN - 1) // OPTIONS.BLOCK_RUN
    clear_to = tl.maximum(clear_from, count // OPTIONS.BLOCK_RUN)
    for block in range(run.edge // OPTIONS.BLOCK_RUN, (count + OPTIONS.BLOCK_RUN - 1) // OPTIONS.BLOCK_RUN):
        index = block * OPTIONS.BLOCK_RUN + line
        is_query = index < count
        query = load_block(query_pointers + block * query_step, is_query, True, OPTIONS.KEY_WIDTH)
        grad_out = load_block(grad_pointers + block * grad_step, is_query, True, OPTIONS.VALUE_WIDTH)
        lse = tl.load(queries.LSE + line_pointers + block * line_step, mask=is_query, other=float("-inf")) * LOG2_E
        delta = tl.load(queries.DELTA + line_pointers + block * line_step, mask=is_query, other=0.0)
        score = product(keys.key, tl.trans(query))
        if OPTIONS.TERMS:
            score, share = scaled(score, keys.terms, OPTIONS)
            score = biased_by_queries(score, keys.terms, queries.bias, first_row + index * rate, is_query, OPTIONS)
        score *= scale_log2
        # A query that saw no key, or does not exist, has probability exp(-inf).
        probability = tl.exp2(score - tl.where(lse == float("-inf"), float("inf"), lse)[None, :])
        if (block < clear_from) | (block >= clear_to):
            is_seen = is_active[:, None]
            if OPTIONS.CAUSAL or OPTIONS.BANDED:
                query_position = (first + index * rate)[None, :]
                is_seen = is_seen & is_in_band(keys.position[:, None], query_position, run, OPTIONS)
            probability = tl.where(is_seen, probability, 0.0)
        grad_probability = product(keys.value, tl.trans(grad_out))
        kept = probability
        if OPTIONS.DROPOUT:
            query_states = query_state(queries.state, (first + index * rate).to(tl.int64))
            factor = keep_factors(query_states[None, :], keys.states[:, None], keys.dropout)
            kept = probability * factor
            grad_probability *= factor
        grad_value = product(rounded(kept, grad_out.dtype), grad_out, grad_value)
        grad_score = probability * (grad_probability - delta[None, :])
        if HAS_GRAD_KEY_BIAS:
            grad_key_bias += tl.sum(grad_score, 1)
        if OPTIONS.SOFTCAP:
            grad_score *= 1.0 - share * share
        grad_key = product(rounded(grad_score, query.dtype), query, grad_key)
    return grad_key, grad_value, grad_key_bias


@triton.jit(do_not_specialize=SIZES)
def key_gradient_kernel(
    OPERANDS,
    OUTPUTS,
    GRAD_KEY,
    GRAD_VALUE,
    GRAD_KEY_BIAS,
    TILES,
    batch_size,
    num_queries,
    num_keys,
    num_kv_heads,
    query_offset,
    key_offset,
    num_spans,
    heads_per_span,
    windows_per_span,
    tiles_per_window,
    lines_per_head,
    scales,
    OPTIONS: tl.constexpr,
):
    """``GRAD_KEY[B, M, G, D]`` and ``GRAD_VALUE[B, M, G, Dv]``: tiles hold key rows and walk over their heads' queries.

    Arguments are those of :func:`.query_gradient_kernel`, with ``GRAD_KEY_BIAS[B, M, G]`` or None.
    """
    BLOCK_ROWS: tl.constexpr = OPTIONS.BLOCK_ROWS
    scale, scale_log2 = scales
    slabs = CallRows(batch_size, num_queries, num_keys, num_kv_heads, query_offset, key_offset)
    layout = Layout(num_spans, heads_per_span, windows_per_span, tiles_per_window, lines_per_head)
    tile = tile_of(tl.program_id(0), slabs, layout, 1, LAST_FIRST=False)
    slot = tl.arange(0, BLOCK_ROWS)
    row = rows_of(TILES.ORDER, tile, num_keys, slot, BLOCK_ROWS, OPTIONS)
    is_row = row >= 0
    lines = tile.batch * num_keys + row
    is_key = is_row
    if OPTIONS.PADDED:
        is_key = is_row & (tl.load(OPERANDS.PADDING + lines, mask=is_row, other=1) == 0)
    key = load_rows(OPERANDS.KEY, tile, row, tile.kv_head, is_key, OPTIONS.KEY_WIDTH)
    value = load_rows(OPERANDS.VALUE, tile, row, tile.kv_head, is_key, OPTIONS.VALUE_WIDTH)
    position = row + key_offset
    dropout = dropout_of(OPERANDS.DROPOUT, OPTIONS.DROPOUT)
    states, terms, grad_key_bias = position, position, 0
    if OPTIONS.DROPOUT:
        states = key_state(dropout.seed, position.to(tl.int64))
    if OPTIONS.TERMS:
        terms = terms_of_keys(OPERANDS.TERMS, tile, row, slabs, OPTIONS)
    if GRAD_KEY_BIAS is not None:
        grad_key_bias = tl.zeros([BLOCK_ROWS], tl.float32)
    keys = KeyTile(position, key, value, dropout, states, terms)
    grad_key = tl.full([BLOCK_ROWS, OPTIONS.KEY_WIDTH.BLOCK_D], 0.0, tl.float32)
    grad_value = tl.full([BLOCK_ROWS, OPTIONS.VALUE_WIDTH.BLOCK_D], 0.0, tl.float32)
    num_heads = num_kv_heads * OPTIONS.RATIO
    # Within a loop, Triton 3.6 loses a stride of 1 of a tuple in a tuple.
    QUERY, GRAD_OUT = OPERANDS.QUERY, OUTPUTS.GRAD_OUT
    line, num_runs = lines_of(TILES, tile, num_keys, layout, OPTIONS)
    for _ in range(num_runs):
        run = load_run(line, OPTIONS)
        is_active = is_row & is_active_in(line, slot)
        for member in range(OPTIONS.RATIO):
            head = tile.kv_head.to(tl.int64) * OPTIONS.RATIO + member
            first_line = tile.batch * num_queries * num_heads + head
            queries = Queries(
                head_of(QUERY, tile.batch, head),
                head_of(GRAD_OUT, tile.batch, head),
                OUTPUTS.LSE + first_line,
                OUTPUTS.DELTA + first_line,
                num_heads,
                query_offset,
                head_state(dropout.seed, tile.batch, head) if OPTIONS.DROPOUT else head,
                bias_of_head(OPERANDS.TERMS, head, slabs, OPTIONS),
            )
            grad_key, grad_value, grad_key_bias = _key_blocks(
                keys,
                grad_key,
                grad_value,
                grad_key_bias,
                queries,
                run,
                is_active,
                scale_log2,
                GRAD_KEY_BIAS is not None,
                OPTIONS,
            )
        line += OPTIONS.LINE
    lines = lines * num_kv_heads + tile.kv_head
    # Padded keys were walked over like the others: their gradients are dropped here.
    grad_key = tl.where(is_key[:, None], grad_key * scale, 0.0)
    store_lines(GRAD_KEY, lines * OPTIONS.KEY_WIDTH.D, is_row, grad_key, OPTIONS.KEY_WIDTH)
    grad_value = tl.where(is_key[:, None], grad_value, 0.0)
    store_lines(GRAD_VALUE, lines * OPTIONS.VALUE_WIDTH.D, is_row, grad_value, OPTIONS.VALUE_WIDTH)
    if GRAD_KEY_BIAS is not None:
        tl.store(GRAD_KEY_BIAS + lines, tl.where(is_key, grad_key_bias, 0.0), mask=is_row)
