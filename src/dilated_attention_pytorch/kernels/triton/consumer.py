"""The computing warps of :mod:`.warp_specialized`: four warps per 64 lines of a tile, on blocks copied by another warp.

The product with one block's values is in flight while they compute the softmax of the next block; blocks that none of
the 64 lines sees are skipped.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .forward import LN_2, probabilities_of
from .runs import is_active_in, keys_seen, load_run
from .tiles import kept_within, rows_of

LINES = gl.constexpr(64)
"""Lines of a tile per four warps: the rows of their matrix instructions."""
PARTS = gl.constexpr(2)
"""Groups of four warps per tile; with three, a thread would have 160 registers, and the loops over keys would spill."""


class Softmax(NamedTuple):
    """State of the online softmax of 64 lines."""

    maximum: Any
    total: Any
    out: Any
    probability: Any
    """Probabilities of the last block, whose product with its values may be pending."""


class Seen(NamedTuple):
    """The keys of a run that each of the 64 lines sees: from ``start`` to before ``stop``, if it takes part."""

    is_active: Any
    start: Any
    stop: Any


@gluon.jit
def _rows_of(ORDER, tile, call, constants, PART: gl.constexpr, layout: gl.constexpr):
    """Slot, row and head of the 64 lines from ``64 PART`` on; the row is -1 where there is none."""
    PACK: gl.constexpr = constants.PACK
    place = PART * LINES + gl.arange(0, LINES, layout=layout)
    slot = place // PACK
    row = rows_of(
        ORDER,
        tile.kv_head,
        tile.window,
        tile.number,
        call.num_queries,
        slot,
        PARTS * LINES // PACK,
        constants.WINDOW,
        constants.ORDERED,
    )
    return slot, row, tile.kv_head * constants.RATIO + tile.head_block * PACK + place % PACK


@gluon.jit
def _blocks_seen(seen, count, constants):
    """First block of a run that one of the 64 lines sees, one past the last such block, and number of blocks.

    If no line sees a key of the run, all blocks lie before the first.
    """
    BLOCK_RUN: gl.constexpr = constants.BLOCK_RUN
    num_blocks = (count + BLOCK_RUN - 1) // BLOCK_RUN
    stop_key = gl.max(seen.stop, 0)
    start = count * 0
    if constants.BANDED:
        start = gl.min(seen.start, 0) // BLOCK_RUN
    start = gl.where(stop_key > 0, start, num_blocks)
    return start, gl.maximum(start, (stop_key + BLOCK_RUN - 1) // BLOCK_RUN), num_blocks


@gluon.jit
def _attend_block(
    queries, softmax, index, block, seen, call, stages, constants, MASKED: gl.constexpr, PENDING: gl.constexpr
):
    """Attend to one block of a run, the ``index``-th that was copied.

    With ``PENDING``, the product of the previous block with its values is computed during the softmax of this block;
    without, that product is done already.
    """
    STAGES: gl.constexpr = constants.STAGES
    maximum, total, out, probability = softmax
    stage, before, turn = index % STAGES, (index - 1) % STAGES, index // STAGES & 1
    of_score: gl.constexpr = maximum.type.layout.parent
    none = gl.zeros([LINES, constants.BLOCK_RUN], gl.float32, layout=of_score)
    mbarrier.wait(stages.key_full.index(stage), turn)
    keys = stages.key_blocks.index(stage).permute((1, 0))
    score = warpgroup_mma(queries, keys, none, use_acc=False, is_async=True)
    if PENDING:
        out = warpgroup_mma(probability, stages.value_blocks.index(before), out, is_async=True)
    score = warpgroup_mma_wait(PENDING, deps=[score])
    mbarrier.arrive(stages.key_free.index(stage))
    if MASKED:
        column = gl.arange(0, constants.BLOCK_RUN, layout=gl.SliceLayout(0, of_score))
        score = kept_within(
            score, float("-inf"), block * constants.BLOCK_RUN, column, seen.start, seen.stop, constants.BANDED
        )
    maximum, total, decay, weight = probabilities_of(score, maximum, total, seen.is_active, call.scale_log2)
    weight = gl.convert_layout(weight.to(probability.dtype), probability.type.layout)
    mbarrier.wait(stages.value_full.index(stage), turn)
    if PENDING:
        out, weight, total = warpgroup_mma_wait(0, deps=[out, weight, total])
        mbarrier.arrive(stages.value_free.index(before))
    out = out * gl.convert_layout(decay, gl.SliceLayout(1, out.type.layout))[:, None]
    return Softmax(maximum, total, out, weight)


@gluon.jit
def _attend_blocks(queries, softmax, index, from_block, to_block, seen, call, stages, constants, MASKED: gl.constexpr):
    """Attend to the blocks ``[from_block, to_block)`` of a run, while the product of the block before is pending.

    It is called for two loops, not for one with a branch for the mask: around a branch, the compiler waits for the
    product before it computes the first exponential.
    """
    for block in range(from_block, to_block):
        softmax = _attend_block(queries, softmax, index, block, seen, call, stages, constants, MASKED, True)
        index += 1
    return softmax, index


@gluon.jit
def _settled(softmax, index, is_pending, stages, constants):
    """Compute the pending product, if there is one, and free its values."""
    maximum, total, out, probability = softmax
    last = (index + constants.STAGES - 1) % constants.STAGES
    if is_pending != 0:
        out = warpgroup_mma(probability, stages.value_blocks.index(last), out)
        mbarrier.arrive(stages.value_free.index(last))
    return Softmax(maximum, total, out, probability)


@gluon.jit
def _pass_blocks(index, number, stages, constants):
    """Free blocks that these warps skip, each once it has arrived: else the next would be freed in its place."""
    STAGES: gl.constexpr = constants.STAGES
    for passed in range(index, index + number):
        place, turn = passed % STAGES, passed // STAGES & 1
        mbarrier.wait(stages.key_full.index(place), turn)
        mbarrier.arrive(stages.key_free.index(place))
        mbarrier.wait(stages.value_full.index(place), turn)
        mbarrier.arrive(stages.value_free.index(place))
    return index + number


@gluon.jit
def _store_queries(QUERY, ORDER, queries, tile, call, constants, PART: gl.constexpr):
    """Copy the 64 lines of queries into shared memory, 0 where there is no row and past the head dimension."""
    BLOCK_D: gl.constexpr = constants.BLOCK_D
    of_copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    _slot, row, head = _rows_of(ORDER, tile, call, constants, PART, gl.SliceLayout(1, of_copy))
    column = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, of_copy))
    is_number = (row >= 0)[:, None] & (column < constants.D)[None, :]
    lines = row.to(gl.int64) * call.query_stride_n + head.to(gl.int64) * call.query_stride_h
    queries.store(gl.load(QUERY + lines[:, None] + column[None, :], mask=is_number, other=0.0))
    fence_async_shared()


@gluon.jit
def _store_results(OUT, LSE, ORDER, softmax, row, head, tile, call, constants, PART: gl.constexpr):
    """Write output and log-sum-exp of the 64 lines; ``row`` and ``head`` have the layout of the scores' rows."""
    maximum, total, out, _probability = softmax
    of_out: gl.constexpr = out.type.layout
    D: gl.constexpr = constants.D
    num_heads = call.num_kv_heads * constants.RATIO
    has_key = total != 0.0  # true for NaN: NaN or infinite inputs give NaN
    safe = gl.where(has_key, total, 1.0)
    lse = gl.where(has_key, (maximum + gl.log2(safe)) * LN_2, float("-inf"))
    gl.store(LSE + (tile.batch * call.num_queries + row) * num_heads + head, lse, mask=row >= 0)
    _slot, row, head = _rows_of(ORDER, tile, call, constants, PART, gl.SliceLayout(1, of_out))
    column = gl.arange(0, constants.BLOCK_D, layout=gl.SliceLayout(0, of_out))
    is_number = (row >= 0)[:, None] & (column < D)[None, :]
    lines = ((tile.batch * call.num_queries + row) * num_heads + head) * D
    factor = gl.convert_layout(gl.where(has_key, 1.0 / safe, 0.0), gl.SliceLayout(1, of_out))
    out = (out * factor[:, None]).to(OUT.dtype.element_ty)
    gl.store(OUT + lines[:, None] + column[None, :], out, mask=is_number)


@gluon.jit
def attend_lines(QUERY, OUT, LSE, ORDER, queries, tile, call, stages, constants, PART: gl.constexpr):
    """Four computing warps: the 64 lines of the tile from ``64 PART`` on."""
    BLOCK_D: gl.constexpr = constants.BLOCK_D
    BLOCK_RUN: gl.constexpr = constants.BLOCK_RUN
    of_score: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_RUN, 16]
    )
    of_out: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_D, 16]
    )
    of_weight: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=of_out, k_width=2)
    query = queries.index(PART)
    _store_queries(QUERY, ORDER, query, tile, call, constants, PART)
    slot, row, head = _rows_of(ORDER, tile, call, constants, PART, gl.SliceLayout(1, of_score))
    position = row + call.query_offset
    softmax = Softmax(
        gl.full([LINES], float("-inf"), gl.float32, layout=gl.SliceLayout(1, of_score)),
        gl.full([LINES], 0.0, gl.float32, layout=gl.SliceLayout(1, of_score)),
        gl.zeros([LINES, BLOCK_D], gl.float32, layout=of_out),
        gl.zeros([LINES, BLOCK_RUN], QUERY.dtype.element_ty, layout=of_weight),
    )
    line = tile.line
    index = tile.num_runs * 0
    num_passed = index
    is_pending = index  # 1 while the product of the last probabilities with the values of their block is pending
    for _ in range(tile.num_runs):
        _first, _rate, count, full, _zero_pad_keys = load_run(line)
        is_active = (row >= 0) & is_active_in(line, slot)
        start, stop = keys_seen(line, position, is_active, constants.LINE, constants.CAUSAL, constants.BANDED)
        seen = Seen(is_active, start, stop)
        block, to_block, num_blocks = _blocks_seen(seen, count, constants)
        num_passed += block  # including those at the end of the previous run
        if num_passed > 0:
            softmax = _settled(softmax, index, is_pending, stages, constants)
            is_pending = index * 0
        index = _pass_blocks(index, num_passed, stages, constants)
        if (is_pending == 0) & (block < to_block):
            softmax = _attend_block(query, softmax, index, block, seen, call, stages, constants, True, False)
            index += 1
            block += 1
            is_pending = index * 0 + 1
        num_full = gl.minimum(gl.maximum(full // BLOCK_RUN, block), to_block)
        softmax, index = _attend_blocks(query, softmax, index, block, num_full, seen, call, stages, constants, False)
        softmax, index = _attend_blocks(query, softmax, index, num_full, to_block, seen, call, stages, constants, True)
        num_passed = num_blocks - to_block
        line += constants.LINE
    softmax = _settled(softmax, index, is_pending, stages, constants)
    _pass_blocks(index, num_passed, stages, constants)
    _store_results(OUT, LSE, ORDER, softmax, row, head, tile, call, constants, PART)
