"""The forward kernel: a tile of query rows, one online softmax over every group's keys, the output written once.

Keys come in runs, rows at a constant distance, and are read in place. A row of the tile that takes no part in a run is
excluded from the maximum and gets probability 0 through the exponent, so mixed tiles need no mask over the scores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .counter import keep_factors, key_state
from .query_tiles import queries_of, query_rows, scores_of, visible
from .runs import is_active_in, keys_seen, load_run
from .segments import first_position
from .tiles import (
    SIZES,
    CallRows,
    Layout,
    is_seen_key,
    keys_of,
    lines_of,
    load_block,
    load_lines,
    product,
    rounded,
    rows_of_run,
    store_lines,
    tile_of,
)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def probabilities_of(score, maximum, total, is_active, scale_log2):
    """One block of the online softmax, in base 2 (Milakov and Gimelshein 2018, arXiv 1805.02867).

    ``score`` is ``q.k``, or with terms the score itself; -inf where a key is not visible. ``scale_log2`` is positive,
    so that the largest product is the largest score and -inf stays -inf. A row's maximum is scaled; its scores are
    scaled only in the exponent, by the fused multiply-add that subtracts the maximum. Returns the maximum, the sum, the
    factor of the output so far, and the probabilities, all relative to the exponential of the maximum.
    """
    highest = tl.maximum(maximum, tl.where(is_active, tl.max(score, 1) * scale_log2, float("-inf")))
    reference = tl.where(highest == float("-inf"), 0.0, highest)
    # An infinite reference makes every probability of a row that takes no part 0.
    probability = tl.exp2(score * scale_log2 - tl.where(is_active, reference, float("inf"))[:, None])
    decay = tl.exp2(maximum - reference)
    return highest, total * decay + tl.sum(probability, 1), decay, probability


@triton.jit
def _attend_blocks(
    queries,
    maximum,
    total,
    out,
    keys,
    run,
    seen,
    from_block,
    to_block,
    scale_log2,
    MASKED: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Attend to the blocks ``[from_block, to_block)`` of a run of keys."""
    first, rate, count = run.first, run.rate, run.count
    line = tl.arange(0, OPTIONS.BLOCK_RUN)
    first_row = first - keys.offset
    key_pointers, key_step = rows_of_run(keys.KEY, first_row, rate, OPTIONS.BLOCK_RUN, OPTIONS.KEY_WIDTH)
    value_pointers, value_step = rows_of_run(keys.VALUE, first_row, rate, OPTIONS.BLOCK_RUN, OPTIONS.VALUE_WIDTH)
    for block in range(from_block, to_block):
        index = block * OPTIONS.BLOCK_RUN + line
        is_key = is_seen_key(index, count, first_row, rate, keys.PADDING, OPTIONS.PADDED)
        key = load_block(key_pointers + block * key_step, is_key, MASKED or OPTIONS.PADDED, OPTIONS.KEY_WIDTH)
        score, _ = scores_of(queries, key, first_row + index * rate, is_key, MASKED, OPTIONS)
        score = visible(score, float("-inf"), block * OPTIONS.BLOCK_RUN, line, is_key, seen, MASKED, OPTIONS)
        value = load_block(value_pointers + block * value_step, is_key, MASKED or OPTIONS.PADDED, OPTIONS.VALUE_WIDTH)
        maximum, total, decay, probability = probabilities_of(score, maximum, total, seen.is_active, scale_log2)
        if OPTIONS.DROPOUT:
            key_states = key_state(queries.dropout.seed, (first + index * rate).to(tl.int64))
            probability *= keep_factors(queries.states[:, None], key_states[None, :], queries.dropout)
        out = product(rounded(probability, value.dtype), value, out * decay[:, None])
    return maximum, total, out


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    OPERANDS,
    OUT,
    LSE,
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
    num_splits,
    scale_log2,
    OPTIONS: tl.constexpr,
):
    """``OUT[splits, B, N, H, Dv]`` and ``LSE[splits, B, N, H]``; each split computes its share of every run's keys.

    A run of few blocks has no share for most splits: with ``ROTATED``, the shares move on by one split with every run.
    ``query_offset`` is the position of the first query, or a pointer to it. ``OPERANDS`` are :class:`.CallOperands`,
    ``TILES`` :class:`.TileRuns`, ``OPTIONS`` :class:`.ComputingOptions`.
    """
    BLOCK_D: tl.constexpr = OPTIONS.VALUE_WIDTH.BLOCK_D
    BLOCK_ROWS: tl.constexpr = OPTIONS.BLOCK_ROWS
    BLOCK_RUN: tl.constexpr = OPTIONS.BLOCK_RUN
    first_query = first_position(query_offset, key_offset + num_keys - num_queries)
    slabs = CallRows(batch_size, num_queries, num_keys, num_kv_heads, first_query, key_offset)
    layout = Layout(num_spans, heads_per_span, windows_per_span, tiles_per_window, lines_per_head)
    split = tl.program_id(0) % num_splits
    tile = tile_of(
        tl.program_id(0) // num_splits, slabs, layout, OPTIONS.RATIO // OPTIONS.PACK, LAST_FIRST=OPTIONS.CAUSAL
    )
    queries = queries_of(OPERANDS, TILES.ORDER, tile, slabs, OPTIONS)
    keys = keys_of(OPERANDS, tile, slabs)
    maximum = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    out = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    line, num_runs = lines_of(TILES, tile, num_queries, layout, OPTIONS)
    share = split
    for _ in range(num_runs):
        run = load_run(line, OPTIONS)
        is_active = (queries.row >= 0) & is_active_in(line, queries.slot)
        seen = keys_seen(run, queries.position, is_active, OPTIONS)
        if OPTIONS.ZERO_PAD_KEYS:
            zero_pad_keys = run.extra
            has_zero_pad_keys = is_active & (tl.where(split == 0, zero_pad_keys, 0) > 0)
            # A zero-padding key has score 0.
            highest = tl.where(has_zero_pad_keys, tl.maximum(maximum, 0.0), maximum)
            reference = tl.where(highest == float("-inf"), 0.0, highest)
            decay = tl.exp2(maximum - reference)
            total = total * decay + tl.where(has_zero_pad_keys, zero_pad_keys * tl.exp2(-reference), 0.0)
            out = out * decay[:, None]
            maximum = highest
        num_full, num_blocks = run.edge // BLOCK_RUN, (run.count + BLOCK_RUN - 1) // BLOCK_RUN
        from_block, to_block = num_blocks * share // num_splits, num_blocks * (share + 1) // num_splits
        # Blocks that every row sees whole, then those that need a mask.
        for MASKED in tl.static_range(2):
            maximum, total, out = _attend_blocks(
                queries,
                maximum,
                total,
                out,
                keys,
                run,
                seen,
                tl.maximum(num_full, from_block) if MASKED else from_block,
                to_block if MASKED else tl.minimum(num_full, to_block),
                scale_log2,
                MASKED,
                OPTIONS,
            )
        if OPTIONS.ROTATED:
            share = tl.where(share == 0, num_splits, share) - 1
        line += OPTIONS.LINE
    row = queries.row
    if (BLOCK_D > 128 or OPTIONS.KEY_WIDTH.BLOCK_D > 128) and not (
        OPTIONS.CAUSAL or OPTIONS.BANDED
    ):  # if no mask needs their positions
        # Rows are loaded again: keeping them through the loops takes registers that the loops need. The barrier keeps
        # the compiler from merging the two loads.
        tl.debug_barrier()
        row = query_rows(TILES.ORDER, tile, num_queries, OPTIONS)
    out_lines = (split * batch_size + tile.batch) * num_queries + row
    out_lines = out_lines * (num_kv_heads * OPTIONS.RATIO) + queries.head
    has_key = total != 0.0  # true for NaN: NaN or infinite inputs give NaN
    out = tl.where(has_key[:, None], out / tl.where(has_key, total, 1.0)[:, None], 0.0)
    store_lines(OUT, out_lines * OPTIONS.VALUE_WIDTH.D, row >= 0, out, OPTIONS.VALUE_WIDTH)
    lse = tl.where(has_key, (maximum + tl.log2(tl.where(has_key, total, 1.0))) * LN_2, float("-inf"))
    tl.store(LSE + out_lines, lse, mask=row >= 0)


@triton.jit(do_not_specialize=SIZES)
def merge_splits_kernel(
    PARTIAL_OUT,
    PARTIAL_LSE,
    OUT,
    LSE,
    num_lines,
    num_splits,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``OUT[lines, D]`` and ``LSE[lines]``: the merge of the splits' partials; a line is a row of one head."""
    line = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    is_line = line < num_lines
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for split in range(num_splits):
        lse = tl.load(PARTIAL_LSE + line + split * num_lines, mask=is_line, other=float("-inf"))
        highest = tl.maximum(highest, lse)
    reference = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros([BLOCK], tl.float32)
    out = tl.full([BLOCK, WIDTH.BLOCK_D], 0.0, tl.float32)
    for split in range(num_splits):
        place = line + split * num_lines
        weight = tl.exp2((tl.load(PARTIAL_LSE + place, mask=is_line, other=float("-inf")) - reference) * LOG2_E)
        total += weight
        out += weight[:, None] * load_lines(PARTIAL_OUT, place * WIDTH.D, is_line, WIDTH)
    has_key = total != 0.0
    safe = tl.where(has_key, total, 1.0)
    store_lines(OUT, line * WIDTH.D, is_line, out / safe[:, None], WIDTH)
    lse = tl.where(has_key, reference + tl.log2(safe) * LN_2, float("-inf"))
    tl.store(LSE + line, lse, mask=is_line)
