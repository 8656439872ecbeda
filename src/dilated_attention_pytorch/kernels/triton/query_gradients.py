"""The gradient of the queries from the merged output and log-sum-exp: ``P = c exp(s - L)``, ``delta = rowsum(dO * O)``.

The kernel holds query rows and walks over keys, as the forward does; :mod:`key_gradients` holds key rows. Each row of a
gradient has one owner that adds in a fixed order: two runs give equal bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .counter import dropout_of, head_state, keep_factors, key_state, query_state
from .forward import LOG2_E
from .runs import is_active_in, keys_seen, load_run
from .terms import add_to_diagonals, biased, distances_to, scaled, terms_of_queries
from .tiles import (
    SIZES,
    is_seen_key,
    kept_within,
    keys_of,
    lines_at,
    lines_of,
    load_block,
    load_lines,
    load_rows,
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
    grad_bias,
    keys,
    run,
    from_block,
    to_block,
    start,
    stop,
    is_active,
    dropout,
    query_states,
    terms,
    GRAD_DISTANCE_BIAS,
    scale_log2,
    MASKED: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Add the blocks ``[from_block, to_block)`` of a run of keys to the tile's gradient of the queries.

    With coordinates, ``grad_bias [rows]`` are the rows' parts of the gradient of the bias by distance.
    """
    first, rate, count = run.first, run.rate, run.count
    line = tl.arange(0, OPTIONS.BLOCK_RUN)
    first_row = first - keys.offset
    key_pointers, key_step = rows_of_run(keys.KEY, first_row, rate, OPTIONS.BLOCK_RUN, OPTIONS.KEY_WIDTH)
    value_pointers, value_step = rows_of_run(keys.VALUE, first_row, rate, OPTIONS.BLOCK_RUN, OPTIONS.VALUE_WIDTH)
    # A row that takes no part here, like one that saw no key at all, has probability exp(-inf).
    reference = tl.where(is_active, lse, float("inf"))[:, None]
    for block in range(from_block, to_block):
        index = block * OPTIONS.BLOCK_RUN + line
        is_key = is_seen_key(index, count, first_row, rate, keys.PADDING, OPTIONS.PADDED)
        key = load_block(key_pointers + block * key_step, is_key, MASKED or OPTIONS.PADDED, OPTIONS.KEY_WIDTH)
        value = load_block(value_pointers + block * value_step, is_key, MASKED or OPTIONS.PADDED, OPTIONS.VALUE_WIDTH)
        score = product(query, tl.trans(key))
        if OPTIONS.SOFTCAP or OPTIONS.DISTANCE_BIAS or OPTIONS.KEY_BIAS:
            score, share = scaled(score, terms, OPTIONS)
            score = biased(score, terms, first_row + index * rate, is_key, MASKED or OPTIONS.PADDED, OPTIONS)
        probability = tl.exp2(score * scale_log2 - reference)
        if OPTIONS.PADDED or (MASKED and not (OPTIONS.CAUSAL or OPTIONS.BANDED)):
            probability = tl.where(is_key[None, :], probability, 0.0)
        if MASKED and (OPTIONS.CAUSAL or OPTIONS.BANDED):
            probability = kept_within(probability, 0.0, block * OPTIONS.BLOCK_RUN, line, start, stop, OPTIONS.BANDED)
        grad_probability = product(grad_out, tl.trans(value))
        if OPTIONS.DROPOUT:
            key_states = key_state(dropout.seed, (first + index * rate).to(tl.int64))
            grad_probability *= keep_factors(query_states[:, None], key_states[None, :], dropout)
        grad_score = probability * (grad_probability - delta[:, None])
        if GRAD_DISTANCE_BIAS is not None and OPTIONS.COORDINATES:
            distances = distances_to(first_row + index * rate, is_key, terms.coordinates)
            grad_bias += tl.sum(grad_score * distances, 1)
        elif GRAD_DISTANCE_BIAS is not None:
            is_pair = is_active[:, None] & (index < count)[None, :]
            add_to_diagonals(GRAD_DISTANCE_BIAS, grad_score, terms.diagonal, first_row + index * rate, is_pair)
        if OPTIONS.SOFTCAP:
            grad_score *= 1.0 - share * share
        grad_query = product(rounded(grad_score, key.dtype), key, grad_query)
    return grad_query, grad_bias


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
    GRAD_DISTANCE_BIAS,
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
    """``GRAD_QUERY[B, N, H, D]``: tiles hold query rows, as in the forward, and walk over keys.

    It also stores ``DELTA[B, N, H] = rowsum(dO * O) - dL``, which the gradient of a row's scores subtracts, for the
    other kernel. ``GRAD_DISTANCE_BIAS[H, N + M - 1]``, which begins with zeros, gets the sum over each diagonal by
    atomic additions; with coordinates, it is ``[B, N, H]`` and gets each row's part of the sum. ``GRAD_OUT`` is a
    pointer with strides; ``GRAD_LSE`` and ``GRAD_DISTANCE_BIAS`` may be None; for other arguments see
    :func:`.forward_kernel`.
    """
    ORDER, RUNS, RANGES = TILES
    D: tl.constexpr = OPTIONS.KEY_WIDTH.D
    DV: tl.constexpr = OPTIONS.VALUE_WIDTH.D
    BLOCK_ROWS: tl.constexpr = OPTIONS.BLOCK_ROWS
    BLOCK_RUN: tl.constexpr = OPTIONS.BLOCK_RUN
    scale, scale_log2 = scales
    batch, kv_head, head_block, window, tile = tile_of(
        tl.program_id(0),
        batch_size * num_kv_heads,
        num_kv_heads,
        num_spans,
        heads_per_span,
        windows_per_span,
        tiles_per_window,
        OPTIONS.RATIO // OPTIONS.PACK,
        OPTIONS.CAUSAL,
    )
    slot = tl.arange(0, BLOCK_ROWS) // OPTIONS.PACK
    row = rows_of(ORDER, kv_head, window, tile, num_queries, slot, BLOCK_ROWS // OPTIONS.PACK, OPTIONS)
    is_row = row >= 0
    head = kv_head * OPTIONS.RATIO + head_block * OPTIONS.PACK + tl.arange(0, BLOCK_ROWS) % OPTIONS.PACK
    batch, wide_row, wide_head = batch.to(tl.int64), row.to(tl.int64), head.to(tl.int64)
    grad_out = load_rows(lines_at(GRAD_OUT, batch, wide_row, wide_head), is_row, OPTIONS.VALUE_WIDTH)
    lines = (batch * num_queries + row) * (num_kv_heads * OPTIONS.RATIO) + head
    lse = tl.load(LSE + lines, mask=is_row, other=float("-inf")) * LOG2_E
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    out = load_lines(OUT, lines * DV, is_row, OPTIONS.VALUE_WIDTH)
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)
    if GRAD_LSE is not None:
        delta -= tl.load(GRAD_LSE + lines, mask=is_row, other=0.0)
    tl.store(DELTA + lines, delta, mask=is_row)
    query = load_rows(lines_at(QUERY, batch, wide_row, wide_head), is_row, OPTIONS.KEY_WIDTH)
    position = row + query_offset
    dropout = dropout_of(DROPOUT, OPTIONS.DROPOUT)
    query_states = position
    if OPTIONS.DROPOUT:
        query_states = query_state(head_state(dropout.seed, batch, wide_head), position.to(tl.int64))
    terms = row
    if TERMS is not None:
        terms = terms_of_queries(
            TERMS, batch, kv_head, head, row, query_offset - key_offset, num_queries, num_keys, OPTIONS
        )
    grad_query = tl.zeros([BLOCK_ROWS, OPTIONS.KEY_WIDTH.BLOCK_D], tl.float32)
    grad_bias = 0
    if GRAD_DISTANCE_BIAS is not None and OPTIONS.COORDINATES:
        grad_bias = tl.zeros([BLOCK_ROWS], tl.float32)
    keys = keys_of(KEY, VALUE, PADDING, batch, kv_head, num_keys, key_offset)
    line, num_runs = lines_of(
        RUNS, RANGES, kv_head, window, tile, num_queries, tiles_per_window, lines_per_head, OPTIONS
    )
    for _ in range(num_runs):
        run = load_run(line)
        is_active = is_row & is_active_in(line, slot)
        start, stop = keys_seen(line, position, is_active, OPTIONS.LINE, OPTIONS.CAUSAL, OPTIONS.BANDED)
        num_full, num_blocks = run.edge // BLOCK_RUN, (run.count + BLOCK_RUN - 1) // BLOCK_RUN
        # Blocks that every row sees whole, then those that need a mask.
        for MASKED in tl.static_range(2):
            grad_query, grad_bias = _query_blocks(
                query,
                grad_out,
                lse,
                delta,
                grad_query,
                grad_bias,
                keys,
                run,
                num_full if MASKED else 0,
                num_blocks if MASKED else num_full,
                start,
                stop,
                is_active,
                dropout,
                query_states,
                terms,
                GRAD_DISTANCE_BIAS,
                scale_log2,
                MASKED,
                OPTIONS,
            )
        line += OPTIONS.LINE
    # Loaded again: keeping the rows through the loops takes registers that the loops need.
    row = rows_of(ORDER, kv_head, window, tile, num_queries, slot, BLOCK_ROWS // OPTIONS.PACK, OPTIONS)
    lines = (batch * num_queries + row) * (num_kv_heads * OPTIONS.RATIO) + head
    store_lines(GRAD_QUERY, lines * D, row >= 0, grad_query * scale, OPTIONS.KEY_WIDTH)
    if GRAD_DISTANCE_BIAS is not None and OPTIONS.COORDINATES:
        tl.store(GRAD_DISTANCE_BIAS + lines, grad_bias, mask=row >= 0)
