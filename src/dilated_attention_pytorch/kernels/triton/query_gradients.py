"""The gradient of the queries from the merged output and log-sum-exp: ``P = c exp(s - L)``, ``delta = rowsum(dO * O)``.

The kernel holds query rows and walks over keys, as the forward does; :mod:`key_gradients` holds key rows. Each row of a
gradient has one owner that adds in a fixed order: two runs give equal bits.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .counter import keep_factors, key_state
from .forward import LOG2_E
from .query_tiles import queries_of, query_rows, scores_of, visible
from .runs import is_active_in, keys_seen, load_run
from .terms import add_to_diagonals, distances_to
from .tiles import (
    SIZES,
    CallRows,
    Layout,
    is_seen_key,
    keys_of,
    lines_of,
    load_block,
    load_lines,
    load_rows,
    product,
    rounded,
    rows_of_run,
    store_lines,
    tile_of,
)


class Outputs(NamedTuple):
    """The outputs of a tile's queries."""

    grad_out: tl.tensor
    lse: tl.tensor
    """In base 2; infinite for a row that saw no key."""
    delta: tl.tensor


@triton.jit
def _query_blocks(
    queries,
    outputs,
    grad_query,
    grad_bias,
    keys,
    run,
    seen,
    from_block,
    to_block,
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
    reference = tl.where(seen.is_active, outputs.lse, float("inf"))[:, None]
    for block in range(from_block, to_block):
        index = block * OPTIONS.BLOCK_RUN + line
        is_key = is_seen_key(index, count, first_row, rate, keys.PADDING, OPTIONS.PADDED)
        key = load_block(key_pointers + block * key_step, is_key, MASKED or OPTIONS.PADDED, OPTIONS.KEY_WIDTH)
        value = load_block(value_pointers + block * value_step, is_key, MASKED or OPTIONS.PADDED, OPTIONS.VALUE_WIDTH)
        score, share = scores_of(queries, key, first_row + index * rate, is_key, MASKED, OPTIONS)
        probability = tl.exp2(score * scale_log2 - reference)
        probability = visible(probability, 0.0, block * OPTIONS.BLOCK_RUN, line, is_key, seen, MASKED, OPTIONS)
        grad_probability = product(outputs.grad_out, tl.trans(value))
        if OPTIONS.DROPOUT:
            key_states = key_state(queries.dropout.seed, (first + index * rate).to(tl.int64))
            grad_probability *= keep_factors(queries.states[:, None], key_states[None, :], queries.dropout)
        grad_score = probability * (grad_probability - outputs.delta[:, None])
        if GRAD_DISTANCE_BIAS is not None and OPTIONS.COORDINATES:
            distances = distances_to(first_row + index * rate, is_key, queries.terms.coordinates)
            grad_bias += tl.sum(grad_score * distances, 1)
        elif GRAD_DISTANCE_BIAS is not None:
            is_pair = seen.is_active[:, None] & (index < count)[None, :]
            add_to_diagonals(GRAD_DISTANCE_BIAS, grad_score, queries.terms.diagonal, first_row + index * rate, is_pair)
        if OPTIONS.SOFTCAP:
            grad_score *= 1.0 - share * share
        grad_query = product(rounded(grad_score, key.dtype), key, grad_query)
    return grad_query, grad_bias


@triton.jit(do_not_specialize=SIZES)
def query_gradient_kernel(
    OPERANDS,
    OUTPUTS,
    GRAD_LSE,
    GRAD_QUERY,
    GRAD_DISTANCE_BIAS,
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
    """``GRAD_QUERY[B, N, H, D]``: tiles hold query rows, as in the forward, and walk over keys.

    It also stores ``DELTA[B, N, H] = rowsum(dO * O) - dL`` of the ``OUTPUTS``, which the gradient of a row's scores
    subtracts, for the other kernel. ``GRAD_DISTANCE_BIAS[H, N + M - 1]``, which begins with zeros, gets the sum over
    each diagonal by atomic additions; with coordinates, it is ``[B, N, H]`` and gets each row's part of the sum.
    ``OUTPUTS`` are :class:`.CallOutputs`; ``GRAD_LSE`` and ``GRAD_DISTANCE_BIAS`` may be None; for other arguments see
    :func:`.forward_kernel`.
    """
    BLOCK_ROWS: tl.constexpr = OPTIONS.BLOCK_ROWS
    BLOCK_RUN: tl.constexpr = OPTIONS.BLOCK_RUN
    scale, scale_log2 = scales
    slabs = CallRows(batch_size, num_queries, num_keys, num_kv_heads, query_offset, key_offset)
    layout = Layout(num_spans, heads_per_span, windows_per_span, tiles_per_window, lines_per_head)
    tile = tile_of(tl.program_id(0), slabs, layout, OPTIONS.RATIO // OPTIONS.PACK, LAST_FIRST=OPTIONS.CAUSAL)
    queries = queries_of(OPERANDS, TILES.ORDER, tile, slabs, OPTIONS)
    is_row = queries.row >= 0
    grad_out = load_rows(OUTPUTS.GRAD_OUT, tile, queries.row, queries.head, is_row, OPTIONS.VALUE_WIDTH)
    lines = (tile.batch * num_queries + queries.row) * (num_kv_heads * OPTIONS.RATIO) + queries.head
    lse = tl.load(OUTPUTS.LSE + lines, mask=is_row, other=float("-inf")) * LOG2_E
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    out = load_lines(OUTPUTS.OUT, lines * OPTIONS.VALUE_WIDTH.D, is_row, OPTIONS.VALUE_WIDTH)
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)
    if GRAD_LSE is not None:
        delta -= tl.load(GRAD_LSE + lines, mask=is_row, other=0.0)
    tl.store(OUTPUTS.DELTA + lines, delta, mask=is_row)
    outputs = Outputs(grad_out, lse, delta)
    grad_query = tl.full([BLOCK_ROWS, OPTIONS.KEY_WIDTH.BLOCK_D], 0.0, tl.float32)
    grad_bias = 0
    if GRAD_DISTANCE_BIAS is not None and OPTIONS.COORDINATES:
        grad_bias = tl.zeros([BLOCK_ROWS], tl.float32)
    keys = keys_of(OPERANDS, tile, slabs)
    line, num_runs = lines_of(TILES, tile, num_queries, layout, OPTIONS)
    for _ in range(num_runs):
        run = load_run(line, OPTIONS)
        seen = keys_seen(run, queries.position, is_row & is_active_in(line, queries.slot), OPTIONS)
        num_full, num_blocks = run.edge // BLOCK_RUN, (run.count + BLOCK_RUN - 1) // BLOCK_RUN
        # Blocks that every row sees whole, then those that need a mask.
        for MASKED in tl.static_range(2):
            grad_query, grad_bias = _query_blocks(
                queries,
                outputs,
                grad_query,
                grad_bias,
                keys,
                run,
                seen,
                num_full if MASKED else 0,
                num_blocks if MASKED else num_full,
                GRAD_DISTANCE_BIAS,
                scale_log2,
                MASKED,
                OPTIONS,
            )
        line += OPTIONS.LINE
    # Loaded again: keeping the rows through the loops takes registers that the loops need.
    row = query_rows(TILES.ORDER, tile, num_queries, OPTIONS)
    lines = (tile.batch * num_queries + row) * (num_kv_heads * OPTIONS.RATIO) + queries.head
    store_lines(GRAD_QUERY, lines * OPTIONS.KEY_WIDTH.D, row >= 0, grad_query * scale, OPTIONS.KEY_WIDTH)
    if GRAD_DISTANCE_BIAS is not None and OPTIONS.COORDINATES:
        tl.store(GRAD_DISTANCE_BIAS + lines, grad_bias, mask=row >= 0)
