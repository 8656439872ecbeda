"""The gradients of keys and values: a kernel holds key rows and walks over the queries that see them.

Each row has one owner that adds in a fixed order, as in :mod:`query_gradients`: two runs give equal bits.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .counter import dropout_of, head_state, keep_factors, key_state, query_state
from .forward import LOG2_E
from .runs import is_active_in, is_in_band, load_band, load_run
from .terms import bias_of_head, biased_by_queries, scaled, terms_of_keys
from .tiles import (
    SIZES,
    head_of,
    lines_at,
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


@triton.jit
def _key_blocks(
    key,
    value,
    grad_key,
    grad_value,
    grad_key_bias,
    queries,
    run,
    from_block,
    to_block,
    clear_from,
    clear_to,
    low,
    high,
    position,
    is_active,
    dropout,
    state_of_head,
    key_states,
    terms,
    of_head,
    scale_log2,
    HAS_GRAD_KEY_BIAS: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Add the blocks ``[from_block, to_block)`` of a run of queries to the tile's gradients of keys and values.

    The blocks ``[clear_from, clear_to)`` see every key of the tile. This is a branch in one loop, where the other
    kernels have two loops: with two accumulators, no registers are left for the values that a second loop keeps alive.
    """
    first, rate, count = run.first, run.rate, run.count
    line = tl.arange(0, OPTIONS.BLOCK_RUN)
    first_row, wide_rate = first - queries.offset, rate.to(tl.int64)
    query_pointers, query_step = rows_of_run(queries.QUERY, first_row, rate, OPTIONS.BLOCK_RUN, OPTIONS.KEY_WIDTH)
    grad_pointers, grad_step = rows_of_run(queries.GRAD_OUT, first_row, rate, OPTIONS.BLOCK_RUN, OPTIONS.VALUE_WIDTH)
    line_pointers = first_row.to(tl.int64) * queries.num_heads + line * wide_rate * queries.num_heads
    line_step = queries.num_heads * wide_rate * OPTIONS.BLOCK_RUN
    for block in range(from_block, to_block):
        index = block * OPTIONS.BLOCK_RUN + line
        is_query = index < count
        query = load_block(query_pointers + block * query_step, is_query, True, OPTIONS.KEY_WIDTH)
        grad_out = load_block(grad_pointers + block * grad_step, is_query, True, OPTIONS.VALUE_WIDTH)
        lse = tl.load(queries.LSE + line_pointers + block * line_step, mask=is_query, other=float("-inf")) * LOG2_E
        delta = tl.load(queries.DELTA + line_pointers + block * line_step, mask=is_query, other=0.0)
        score = product(key, tl.trans(query))
        if OPTIONS.SOFTCAP or OPTIONS.DISTANCE_BIAS or OPTIONS.KEY_BIAS:
            score, share = scaled(score, terms, OPTIONS)
            score = biased_by_queries(score, terms, of_head, first_row + index * rate, is_query, OPTIONS)
        score *= scale_log2
        # A query that saw no key, or does not exist, has probability exp(-inf).
        probability = tl.exp2(score - tl.where(lse == float("-inf"), float("inf"), lse)[None, :])
        if (block < clear_from) | (block >= clear_to):
            is_seen = is_active[:, None]
            if OPTIONS.CAUSAL or OPTIONS.BANDED:
                query_position = (first + index * rate)[None, :]
                is_seen = is_seen & is_in_band(position[:, None], query_position, low, high, OPTIONS.BANDED)
            probability = tl.where(is_seen, probability, 0.0)
        grad_probability = product(value, tl.trans(grad_out))
        kept = probability
        if OPTIONS.DROPOUT:
            query_states = query_state(state_of_head, (first + index * rate).to(tl.int64))
            factor = keep_factors(query_states[None, :], key_states[:, None], dropout)
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
    QUERY,
    KEY,
    VALUE,
    GRAD_OUT,
    LSE,
    DELTA,
    GRAD_KEY,
    GRAD_VALUE,
    GRAD_KEY_BIAS,
    TILES,
    PADDING,
    DROPOUT,
    TERMS,
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
    ORDER, RUNS, RANGES = TILES
    D: tl.constexpr = OPTIONS.KEY_WIDTH.D
    DV: tl.constexpr = OPTIONS.VALUE_WIDTH.D
    BLOCK_ROWS: tl.constexpr = OPTIONS.BLOCK_ROWS
    BLOCK_RUN: tl.constexpr = OPTIONS.BLOCK_RUN
    scale, scale_log2 = scales
    batch, kv_head, _, window, tile = tile_of(
        tl.program_id(0),
        batch_size * num_kv_heads,
        num_kv_heads,
        num_spans,
        heads_per_span,
        windows_per_span,
        tiles_per_window,
        1,
        False,
    )
    slot = tl.arange(0, BLOCK_ROWS)
    row = rows_of(ORDER, kv_head, window, tile, num_keys, slot, BLOCK_ROWS, OPTIONS)
    is_row = row >= 0
    batch, wide_row, wide_head = batch.to(tl.int64), row.to(tl.int64), kv_head.to(tl.int64)
    key_lines = lines_at(KEY, batch, wide_row, wide_head)
    value_lines = lines_at(VALUE, batch, wide_row, wide_head)
    is_key = is_row
    if OPTIONS.PADDED:
        is_key = is_row & (tl.load(PADDING + batch * num_keys + row, mask=is_row, other=1) == 0)
    key = load_rows(key_lines, is_key, OPTIONS.KEY_WIDTH)
    value = load_rows(value_lines, is_key, OPTIONS.VALUE_WIDTH)
    position = row + key_offset
    dropout = dropout_of(DROPOUT, OPTIONS.DROPOUT)
    key_states = position
    if OPTIONS.DROPOUT:
        key_states = key_state(dropout.seed, position.to(tl.int64))
    terms, grad_key_bias = row, 0
    if TERMS is not None:
        terms = terms_of_keys(TERMS, batch, wide_head, row, query_offset - key_offset, num_queries, num_keys, OPTIONS)
    if GRAD_KEY_BIAS is not None:
        grad_key_bias = tl.zeros([BLOCK_ROWS], tl.float32)
    grad_key = tl.zeros([BLOCK_ROWS, OPTIONS.KEY_WIDTH.BLOCK_D], tl.float32)
    grad_value = tl.zeros([BLOCK_ROWS, OPTIONS.VALUE_WIDTH.BLOCK_D], tl.float32)
    num_heads = num_kv_heads * OPTIONS.RATIO
    line, num_runs = lines_of(RUNS, RANGES, kv_head, window, tile, num_keys, tiles_per_window, lines_per_head, OPTIONS)
    for _ in range(num_runs):
        run = load_run(line)
        low, high = load_band(line, OPTIONS.LINE, OPTIONS.BANDED)
        is_active = is_row & is_active_in(line, slot)
        num_blocks = (run.count + BLOCK_RUN - 1) // BLOCK_RUN
        clear_from = (run.extra + BLOCK_RUN - 1) // BLOCK_RUN
        clear_to = tl.maximum(clear_from, run.count // BLOCK_RUN)
        for member in range(OPTIONS.RATIO):
            head = wide_head * OPTIONS.RATIO + member
            of_query, of_grad = head_of(QUERY, batch, head), head_of(GRAD_OUT, batch, head)
            lines = batch * num_queries * num_heads + head
            queries = Queries(of_query, of_grad, LSE + lines, DELTA + lines, num_heads, query_offset)
            state_of_head = head_state(dropout.seed, batch, head) if OPTIONS.DROPOUT else head
            grad_key, grad_value, grad_key_bias = _key_blocks(
                key,
                value,
                grad_key,
                grad_value,
                grad_key_bias,
                queries,
                run,
                run.edge // BLOCK_RUN,
                num_blocks,
                clear_from,
                clear_to,
                low,
                high,
                position,
                is_active,
                dropout,
                state_of_head,
                key_states,
                terms,
                bias_of_head(TERMS, head, num_queries, num_keys, OPTIONS),
                scale_log2,
                GRAD_KEY_BIAS is not None,
                OPTIONS,
            )
        line += OPTIONS.LINE
    lines = (batch * num_keys + wide_row) * num_kv_heads + kv_head
    # Padded keys were walked over like the others: their gradients are dropped here.
    grad_key = tl.where(is_key[:, None], grad_key * scale, 0.0)
    store_lines(GRAD_KEY, lines * D, is_row, grad_key, OPTIONS.KEY_WIDTH)
    store_lines(GRAD_VALUE, lines * DV, is_row, tl.where(is_key[:, None], grad_value, 0.0), OPTIONS.VALUE_WIDTH)
    if GRAD_KEY_BIAS is not None:
        tl.store(GRAD_KEY_BIAS + lines, tl.where(is_key, grad_key_bias, 0.0), mask=is_row)
