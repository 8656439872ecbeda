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
    scale_log2,
    OPTIONS: tl.constexpr,
):
    """Add the blocks ``[from_block, to_block)`` of a run of queries to the tile's gradients of keys and values.

    The blocks ``[clear_from, clear_to)`` see every key of the tile. This is a branch in one loop, where the other
    kernels have two loops: with two accumulators, no registers are left for the values that a second loop keeps alive.
    """
    first, rate, count = run.first, run.rate, run.count
    line = tl.arange(0, OPTIONS.BLOCK_RUN)
    first_row, wide_rate = first - queries.offset, rate.to(tl.int64)
    query_pointers, query_step = rows_of_run(queries.QUERY, first_row, rate, OPTIONS)
    grad_pointers, grad_step = rows_of_run(queries.GRAD_OUT, first_row, rate, OPTIONS)
    line_pointers = first_row.to(tl.int64) * queries.num_heads + line * wide_rate * queries.num_heads
    line_step = queries.num_heads * wide_rate * OPTIONS.BLOCK_RUN
    for block in range(from_block, to_block):
        index = block * OPTIONS.BLOCK_RUN + line
        is_query = index < count
        query = load_block(query_pointers + block * query_step, is_query, True, OPTIONS)
        grad_out = load_block(grad_pointers + block * grad_step, is_query, True, OPTIONS)
        lse = tl.load(queries.LSE + line_pointers + block * line_step, mask=is_query, other=float("-inf")) * LOG2_E
        delta = tl.load(queries.DELTA + line_pointers + block * line_step, mask=is_query, other=0.0)
        score = product(key, tl.trans(query)) * scale_log2
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
        grad_score = rounded(probability * (grad_probability - delta[None, :]), query.dtype)
        grad_key = product(grad_score, query, grad_key)
    return grad_key, grad_value


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
    TILES,
    PADDING,
    DROPOUT,
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
    """``GRAD_KEY`` and ``GRAD_VALUE`` ``[B, M, G, D]``: tiles hold key rows and walk over their heads' queries.

    Arguments are those of :func:`.query_gradient_kernel`.
    """
    ORDER, RUNS, RANGES = TILES
    D: tl.constexpr = OPTIONS.D
    BLOCK_D: tl.constexpr = OPTIONS.BLOCK_D
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
    key = load_rows(key_lines, is_key, OPTIONS)
    value = load_rows(value_lines, is_key, OPTIONS)
    position = row + key_offset
    dropout = dropout_of(DROPOUT, OPTIONS.DROPOUT)
    key_states = position
    if OPTIONS.DROPOUT:
        key_states = key_state(dropout.seed, position.to(tl.int64))
    grad_key = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    grad_value = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
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
            grad_key, grad_value = _key_blocks(
                key,
                value,
                grad_key,
                grad_value,
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
                scale_log2,
                OPTIONS,
            )
        line += OPTIONS.LINE
    lines = ((batch * num_keys + wide_row) * num_kv_heads + kv_head) * D
    # Padded keys were walked over like the others: their gradients are dropped here.
    store_lines(GRAD_KEY, lines, is_row, tl.where(is_key[:, None], grad_key * scale, 0.0), D, BLOCK_D)
    store_lines(GRAD_VALUE, lines, is_row, tl.where(is_key[:, None], grad_value, 0.0), D, BLOCK_D)
