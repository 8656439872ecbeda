"""The gradients of keys and values: a kernel holds key rows and walks over the queries that see them.

Each row has one owner that adds in a fixed order, as in :mod:`query_gradients`: two runs give equal bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .counter import head_state, keep_factors, key_state, query_state
from .forward import LOG2_E
from .runs import is_active_in, is_in_band, load_band, load_run
from .tiles import (
    SIZES,
    lines_of,
    load_block,
    load_lines,
    product,
    rounded,
    rows_of,
    rows_of_run,
    store_lines,
    tile_of,
)


@triton.jit
def _key_blocks(
    key,
    value,
    grad_key,
    grad_value,
    QUERY,
    GRAD_OUT,
    LSE,
    DELTA,
    query_stride,
    grad_stride,
    line_stride,
    first,
    rate,
    count,
    from_block,
    to_block,
    clear_from,
    clear_to,
    low,
    high,
    position,
    is_active,
    query_offset,
    state_of_head,
    key_states,
    threshold,
    keep_scale,
    scale_log2,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_RUN: tl.constexpr,
    CAUSAL: tl.constexpr,
    BANDED: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Add the blocks ``[from_block, to_block)`` of a run of queries to the tile's gradients of keys and values.

    The blocks ``[clear_from, clear_to)`` see every key of the tile. This is a branch in one loop, where the other
    kernels have two loops: with two accumulators, no registers are left for the values that a second loop keeps alive.
    """
    line = tl.arange(0, BLOCK_RUN)
    first_row, wide_rate = first - query_offset, rate.to(tl.int64)
    query_pointers, query_step = rows_of_run(QUERY, query_stride, first_row, rate, BLOCK_RUN, BLOCK_D)
    grad_pointers, grad_step = rows_of_run(GRAD_OUT, grad_stride, first_row, rate, BLOCK_RUN, BLOCK_D)
    line_pointers = first_row.to(tl.int64) * line_stride + line * wide_rate * line_stride
    line_step = line_stride * wide_rate * BLOCK_RUN
    for block in range(from_block, to_block):
        index = block * BLOCK_RUN + line
        is_query = index < count
        query = load_block(query_pointers + block * query_step, is_query, True, D, BLOCK_D)
        grad_out = load_block(grad_pointers + block * grad_step, is_query, True, D, BLOCK_D)
        lse = tl.load(LSE + line_pointers + block * line_step, mask=is_query, other=float("-inf")) * LOG2_E
        delta = tl.load(DELTA + line_pointers + block * line_step, mask=is_query, other=0.0)
        score = product(key, tl.trans(query)) * scale_log2
        # A query that saw no key, or does not exist, has probability exp(-inf).
        probability = tl.exp2(score - tl.where(lse == float("-inf"), float("inf"), lse)[None, :])
        if (block < clear_from) | (block >= clear_to):
            is_seen = is_active[:, None]
            if CAUSAL or BANDED:
                query_position = (first + index * rate)[None, :]
                is_seen = is_seen & is_in_band(position[:, None], query_position, low, high, BANDED)
            probability = tl.where(is_seen, probability, 0.0)
        grad_probability = product(value, tl.trans(grad_out))
        kept = probability
        if DROPOUT:
            query_states = query_state(state_of_head, (first + index * rate).to(tl.int64))
            factor = keep_factors(query_states[None, :], key_states[:, None], threshold, keep_scale)
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
    ORDER,
    RUNS,
    RANGES,
    PADDING,
    SEED,
    query_stride_b,
    query_stride_n,
    query_stride_h,
    key_stride_b,
    key_stride_n,
    key_stride_h,
    value_stride_b,
    value_stride_n,
    value_stride_h,
    grad_stride_b,
    grad_stride_n,
    grad_stride_h,
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
    scale,
    scale_log2,
    threshold,
    keep_scale,
    RATIO: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RUN: tl.constexpr,
    LINE: tl.constexpr,
    WINDOW: tl.constexpr,
    ORDERED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BANDED: tl.constexpr,
    PADDED: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """``GRAD_KEY`` and ``GRAD_VALUE`` ``[B, M, G, D]``: tiles hold key rows and walk over their heads' queries."""
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
    row = rows_of(ORDER, kv_head, window, tile, num_keys, slot, BLOCK_ROWS, WINDOW, ORDERED)
    is_row = row >= 0
    batch, wide_row, wide_head = batch.to(tl.int64), row.to(tl.int64), kv_head.to(tl.int64)
    key_lines = batch * key_stride_b + wide_row * key_stride_n + wide_head * key_stride_h
    value_lines = batch * value_stride_b + wide_row * value_stride_n + wide_head * value_stride_h
    is_key = is_row
    if PADDED:
        is_key = is_row & (tl.load(PADDING + batch * num_keys + row, mask=is_row, other=1) == 0)
    key = load_lines(KEY, key_lines, is_key, D, BLOCK_D)
    value = load_lines(VALUE, value_lines, is_key, D, BLOCK_D)
    position = row + key_offset
    seed = tl.load(SEED) if DROPOUT else 0
    key_states = position
    if DROPOUT:
        key_states = key_state(seed, position.to(tl.int64))
    grad_key = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    grad_value = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    num_heads = num_kv_heads * RATIO
    line, num_runs = lines_of(
        RUNS, RANGES, kv_head, window, tile, num_keys, tiles_per_window, lines_per_head, WINDOW, LINE
    )
    for _ in range(num_runs):
        first, rate, count, unseeing, clear = load_run(line)
        low, high = load_band(line, LINE, BANDED)
        is_active = is_row & is_active_in(line, slot)
        num_blocks = (count + BLOCK_RUN - 1) // BLOCK_RUN
        clear_from = (clear + BLOCK_RUN - 1) // BLOCK_RUN
        clear_to = tl.maximum(clear_from, count // BLOCK_RUN)
        for member in range(RATIO):
            head = wide_head * RATIO + member
            queries = QUERY + batch * query_stride_b + head * query_stride_h
            grads = GRAD_OUT + batch * grad_stride_b + head * grad_stride_h
            lines = batch * num_queries * num_heads + head
            state_of_head = head_state(seed, batch, head) if DROPOUT else head
            grad_key, grad_value = _key_blocks(
                key,
                value,
                grad_key,
                grad_value,
                queries,
                grads,
                LSE + lines,
                DELTA + lines,
                query_stride_n,
                grad_stride_n,
                num_heads,
                first,
                rate,
                count,
                unseeing // BLOCK_RUN,
                num_blocks,
                clear_from,
                clear_to,
                low,
                high,
                position,
                is_active,
                query_offset,
                state_of_head,
                key_states,
                threshold,
                keep_scale,
                scale_log2,
                D,
                BLOCK_D,
                BLOCK_RUN,
                CAUSAL,
                BANDED,
                DROPOUT,
            )
        line += LINE
    lines = ((batch * num_keys + wide_row) * num_kv_heads + kv_head) * D
    # Padded keys were walked over like the others: their gradients are dropped here.
    store_lines(GRAD_KEY, lines, is_row, tl.where(is_key[:, None], grad_key * scale, 0.0), D, BLOCK_D)
    store_lines(GRAD_VALUE, lines, is_row, tl.where(is_key[:, None], grad_value, 0.0), D, BLOCK_D)
