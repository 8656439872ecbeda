"""The gradient of the queries from the merged output and log-sum-exp: ``P = c exp(s - L)``, ``delta = rowsum(dO * O)``.

The kernel holds query rows and walks over keys, as the forward does; :mod:`key_gradients` holds key rows. Each row of a
gradient has one owner that adds in a fixed order: two runs give equal bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .counter import head_state, keep_factors, key_state, query_state
from .forward import LOG2_E
from .runs import is_active_in, keys_seen, load_run
from .tiles import (
    SIZES,
    is_seen_key,
    kept_within,
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
def _query_blocks(
    query,
    grad_out,
    lse,
    delta,
    grad_query,
    KEY,
    VALUE,
    key_stride,
    value_stride,
    first,
    rate,
    count,
    from_block,
    to_block,
    start,
    stop,
    is_active,
    key_offset,
    PADDING,
    seed,
    query_states,
    threshold,
    keep_scale,
    scale_log2,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_RUN: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BANDED: tl.constexpr,
    PADDED: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Add the blocks ``[from_block, to_block)`` of a run of keys to the tile's gradient of the queries."""
    line = tl.arange(0, BLOCK_RUN)
    first_row = first - key_offset
    key_pointers, key_step = rows_of_run(KEY, key_stride, first_row, rate, BLOCK_RUN, BLOCK_D)
    value_pointers, value_step = rows_of_run(VALUE, value_stride, first_row, rate, BLOCK_RUN, BLOCK_D)
    # A row that takes no part here, like one that saw no key at all, has probability exp(-inf).
    reference = tl.where(is_active, lse, float("inf"))[:, None]
    for block in range(from_block, to_block):
        index = block * BLOCK_RUN + line
        is_key = is_seen_key(index, count, first_row, rate, PADDING, PADDED)
        key = load_block(key_pointers + block * key_step, is_key, MASKED or PADDED, D, BLOCK_D)
        value = load_block(value_pointers + block * value_step, is_key, MASKED or PADDED, D, BLOCK_D)
        score = product(query, tl.trans(key)) * scale_log2
        probability = tl.exp2(score - reference)
        if PADDED or (MASKED and not (CAUSAL or BANDED)):
            probability = tl.where(is_key[None, :], probability, 0.0)
        if MASKED and (CAUSAL or BANDED):
            probability = kept_within(probability, 0.0, block * BLOCK_RUN, line, start, stop, BANDED)
        grad_probability = product(grad_out, tl.trans(value))
        if DROPOUT:
            key_states = key_state(seed, (first + index * rate).to(tl.int64))
            grad_probability *= keep_factors(query_states[:, None], key_states[None, :], threshold, keep_scale)
        grad_score = probability * (grad_probability - delta[:, None])
        grad_query = product(rounded(grad_score, key.dtype), key, grad_query)
    return grad_query


@triton.jit(do_not_specialize=SIZES)
def query_gradient_kernel(
    QUERY,
    KEY,
    VALUE,
    OUT,
    GRAD_OUT,
    LSE,
    GRAD_LSE,
    DELTA,
    GRAD_QUERY,
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
    PACK: tl.constexpr,
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
    HAS_GRAD_LSE: tl.constexpr,
):
    """``GRAD_QUERY[B, N, H, D]``: tiles hold query rows, as in the forward, and walk over keys.

    It also stores ``DELTA[B, N, H] = rowsum(dO * O) - dL``, which the gradient of a row's scores subtracts, for the
    other kernel.
    """
    batch, kv_head, head_block, window, tile = tile_of(
        tl.program_id(0),
        batch_size * num_kv_heads,
        num_kv_heads,
        num_spans,
        heads_per_span,
        windows_per_span,
        tiles_per_window,
        RATIO // PACK,
        CAUSAL,
    )
    slot = tl.arange(0, BLOCK_ROWS) // PACK
    row = rows_of(ORDER, kv_head, window, tile, num_queries, slot, BLOCK_ROWS // PACK, WINDOW, ORDERED)
    is_row = row >= 0
    head = kv_head * RATIO + head_block * PACK + tl.arange(0, BLOCK_ROWS) % PACK
    batch, wide_row, wide_head = batch.to(tl.int64), row.to(tl.int64), head.to(tl.int64)
    grad_out = load_lines(
        GRAD_OUT, batch * grad_stride_b + wide_row * grad_stride_n + wide_head * grad_stride_h, is_row, D, BLOCK_D
    )
    lines = (batch * num_queries + row) * (num_kv_heads * RATIO) + head
    lse = tl.load(LSE + lines, mask=is_row, other=float("-inf")) * LOG2_E
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    out = load_lines(OUT, lines * D, is_row, D, BLOCK_D)
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)
    if HAS_GRAD_LSE:
        delta -= tl.load(GRAD_LSE + lines, mask=is_row, other=0.0)
    tl.store(DELTA + lines, delta, mask=is_row)
    query = load_lines(
        QUERY, batch * query_stride_b + wide_row * query_stride_n + wide_head * query_stride_h, is_row, D, BLOCK_D
    )
    position = row + query_offset
    seed = tl.load(SEED) if DROPOUT else 0
    query_states = position
    if DROPOUT:
        query_states = query_state(head_state(seed, batch, wide_head), position.to(tl.int64))
    grad_query = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    keys = KEY + batch * key_stride_b + kv_head.to(tl.int64) * key_stride_h
    values = VALUE + batch * value_stride_b + kv_head.to(tl.int64) * value_stride_h
    padding = PADDING + batch * num_keys
    line, num_runs = lines_of(
        RUNS, RANGES, kv_head, window, tile, num_queries, tiles_per_window, lines_per_head, WINDOW, LINE
    )
    for _ in range(num_runs):
        first, rate, count, full, _zero_pad_keys = load_run(line)
        is_active = is_row & is_active_in(line, slot)
        start, stop = keys_seen(line, position, is_active, LINE, CAUSAL, BANDED)
        num_full, num_blocks = full // BLOCK_RUN, (count + BLOCK_RUN - 1) // BLOCK_RUN
        # Blocks that every row sees whole, then those that need a mask.
        for MASKED in tl.static_range(2):
            grad_query = _query_blocks(
                query,
                grad_out,
                lse,
                delta,
                grad_query,
                keys,
                values,
                key_stride_n,
                value_stride_n,
                first,
                rate,
                count,
                num_full if MASKED else 0,
                num_blocks if MASKED else num_full,
                start,
                stop,
                is_active,
                key_offset,
                padding,
                seed,
                query_states,
                threshold,
                keep_scale,
                scale_log2,
                D,
                BLOCK_D,
                BLOCK_RUN,
                MASKED,
                CAUSAL,
                BANDED,
                PADDED,
                DROPOUT,
            )
        line += LINE
    # Loaded again: keeping the rows through the loops takes registers that the loops need.
    row = rows_of(ORDER, kv_head, window, tile, num_queries, slot, BLOCK_ROWS // PACK, WINDOW, ORDERED)
    lines = (batch * num_queries + row) * (num_kv_heads * RATIO) + head
    store_lines(GRAD_QUERY, lines * D, row >= 0, grad_query * scale, D, BLOCK_D)
