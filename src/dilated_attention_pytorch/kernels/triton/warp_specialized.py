"""The forward of :mod:`.forward` with warps of two kinds, for compute capability 9.0: one copies, the others compute.

One warp describes each run of keys to the device's copy engine (TMA), which writes blocks of it into shared memory;
every four other warps compute 64 lines of the tile, and their product with one block's values is under way while they
take the softmax of the next; blocks that none of these 64 sees they pass. Barriers in shared memory say which stage is
filled and which is free. It is written in Gluon, Triton's language below Triton, which has no interpreter:
``tests/gluon_emulator.py`` runs it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .forward import LN_2, probabilities_of
from .rules import FAR
from .runs import is_active_in, is_in_band, load_band, load_run
from .tiles import SIZES, lines_of, rows_of, tile_of

try:
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_load
except ImportError:  # its name in Triton 3.6
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_copy_global_to_shared as async_load

LINES = gl.constexpr(64)
"""Lines of a tile that four warps compute: the rows of their matrix instructions."""
PARTS = gl.constexpr(2)
"""How often that is in a tile: with three, 160 registers a thread are left, and the loops over keys spill."""
REGISTERS = gl.constexpr(240)
"""Of a thread that computes; of one that copies 24."""


class Stages(NamedTuple):
    """Shared memory for some blocks of keys and values, and the barriers of each: filled, and free again."""

    key_blocks: Any
    value_blocks: Any
    key_full: Any
    key_free: Any
    value_full: Any
    value_free: Any


class Tile(NamedTuple):
    """Which rows of which heads a program computes, and the runs that they see."""

    batch: Any
    kv_head: Any
    head_block: Any
    window: Any
    number: Any
    line: Any
    num_runs: Any


class Call(NamedTuple):
    """Numbers of all tiles."""

    num_queries: Any
    num_kv_heads: Any
    query_stride_n: Any
    query_stride_h: Any
    key_stride_n: Any
    value_stride_n: Any
    query_offset: Any
    key_offset: Any
    scale_log2: Any


class Constants(NamedTuple):
    """What the kernel is compiled for; the names of :mod:`.forward`."""

    RATIO: Any
    PACK: Any
    D: Any
    BLOCK_RUN: Any
    STAGES: Any
    LINE: Any
    WINDOW: Any
    ORDERED: Any
    CAUSAL: Any
    BANDED: Any


@gluon.jit
def _copy_run(KEY, VALUE, line, index, settled, call, stages, constants):
    """Copy a run's blocks into the stages from the ``index``-th on; returns the index of the block after them.

    The descriptors lie in memory that a call from the same line of code writes again. What that one copied, the blocks
    before ``settled``, must have arrived before: a copy reads its descriptor when it likes.
    """
    D: gl.constexpr = constants.D
    BLOCK_RUN: gl.constexpr = constants.BLOCK_RUN
    STAGES: gl.constexpr = constants.STAGES
    for block in range(gl.maximum(index - STAGES, 0), settled):
        mbarrier.wait(stages.key_full.index(block % STAGES), block // STAGES & 1)
        mbarrier.wait(stages.value_full.index(block % STAGES), block // STAGES & 1)
    first, rate, count, _full, _phantoms = load_run(line)
    row = (first - call.key_offset).to(gl.int64)
    wide_rate = gl.where(count > 1, rate, 1).to(gl.int64)  # a run of one row may have a rate that no stride can be
    keys = tma.make_tensor_descriptor(
        KEY + row * call.key_stride_n, [count, D], [call.key_stride_n * wide_rate, 1], [BLOCK_RUN, D],
        stages.key_blocks.type.layout,
    )  # fmt: skip
    values = tma.make_tensor_descriptor(
        VALUE + row * call.value_stride_n, [count, D], [call.value_stride_n * wide_rate, 1], [BLOCK_RUN, D],
        stages.value_blocks.type.layout,
    )  # fmt: skip
    for block in range((count + BLOCK_RUN - 1) // BLOCK_RUN):
        stage, phase = index % STAGES, index // STAGES & 1
        mbarrier.wait(stages.key_free.index(stage), phase ^ 1)
        mbarrier.expect(stages.key_full.index(stage), BLOCK_RUN * D * 2)
        async_load(keys, [block * BLOCK_RUN, 0], stages.key_full.index(stage), stages.key_blocks.index(stage))
        mbarrier.wait(stages.value_free.index(stage), phase ^ 1)
        mbarrier.expect(stages.value_full.index(stage), BLOCK_RUN * D * 2)
        async_load(values, [block * BLOCK_RUN, 0], stages.value_full.index(stage), stages.value_blocks.index(stage))
        index += 1
    return index


@gluon.jit
def _copy_runs(KEY, VALUE, tile, call, stages, constants):
    """The one warp that copies.

    Two lines of code describe runs by turns, so that one is described while another's blocks are on their way.
    """
    line = tile.line
    index = tile.num_runs * 0
    settled = index  # where the blocks of the run before the last one end
    for run in range(0, tile.num_runs, 2):
        first = index
        index = _copy_run(KEY, VALUE, line, index, settled, call, stages, constants)
        settled = index
        if run + 1 < tile.num_runs:
            index = _copy_run(KEY, VALUE, line + constants.LINE, index, first, call, stages, constants)
        line += 2 * constants.LINE


@gluon.jit
def _rows_of(ORDER, tile, call, constants, PART: gl.constexpr, layout: gl.constexpr):
    """Slot, row and head of the 64 lines from ``64 PART`` on; the row is -1 where there is none."""
    PACK: gl.constexpr = constants.PACK
    place = PART * LINES + gl.arange(0, LINES, layout=layout)
    slot = place // PACK
    row = rows_of(
        ORDER, tile.kv_head, tile.window, tile.number, call.num_queries, slot, PARTS * LINES // PACK,
        constants.WINDOW, constants.ORDERED,
    )  # fmt: skip
    return slot, row, tile.kv_head * constants.RATIO + tile.head_block * PACK + place % PACK


@gluon.jit
def _scores_seen(score, block, first, rate, count, low, high, position, constants):
    """A block's scores, -inf where the run has ended or its mask leaves a pair out."""
    index = block * constants.BLOCK_RUN + gl.arange(0, constants.BLOCK_RUN, layout=gl.SliceLayout(0, score.type.layout))
    is_seen = (index < count)[None, :]
    if constants.CAUSAL or constants.BANDED:
        key_position = (first + index * rate)[None, :]
        is_seen = is_seen & is_in_band(key_position, position[:, None], low, high, constants.BANDED)
    return gl.where(is_seen, score, float("-inf"))


@gluon.jit
def _attend_blocks(
    query, none, maximum, total, out, probability, index, line, from_block, to_block, position, is_row, slot, call,
    stages, constants, MASKED: gl.constexpr,
):  # fmt: skip
    """The blocks ``[from_block, to_block)`` of a run.

    ``probability`` is that of the block before, whose product with its values is computed beside the softmax of this
    one. Two loops call for this, not one that asks for the mask: around a branch, the compiler waits for the product
    before it takes the first exponential.
    """
    STAGES: gl.constexpr = constants.STAGES
    first, rate, count, _full, _phantoms = load_run(line)
    low, high = load_band(line, constants.LINE, constants.BANDED)
    is_active = is_row & is_active_in(line, slot)
    for block in range(from_block, to_block):
        stage, before = index % STAGES, (index - 1) % STAGES
        mbarrier.wait(stages.key_full.index(stage), index // STAGES & 1)
        score = warpgroup_mma(query, stages.key_blocks.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        out = warpgroup_mma(probability, stages.value_blocks.index(before), out, is_async=True)
        score = warpgroup_mma_wait(1, deps=[score])
        mbarrier.arrive(stages.key_free.index(stage))
        if MASKED:
            score = _scores_seen(score, block, first, rate, count, low, high, position, constants)
        maximum, total, decay, weight = probabilities_of(score, maximum, total, is_active, call.scale_log2)
        weight = gl.convert_layout(weight.to(probability.dtype), probability.type.layout)
        mbarrier.wait(stages.value_full.index(stage), index // STAGES & 1)
        out, probability, total = warpgroup_mma_wait(0, deps=[out, weight, total])
        mbarrier.arrive(stages.value_free.index(before))
        out = out * gl.convert_layout(decay, gl.SliceLayout(1, out.type.layout))[:, None]
        index += 1
    return maximum, total, out, probability, index


@gluon.jit
def _blocks_of(line, position, is_row, slot, constants):
    """Of a run's blocks the first that one of the 64 rows sees, one past the last, and how many there are.

    Where none sees a key of the run, all of them lie before the first.
    """
    BLOCK_RUN: gl.constexpr = constants.BLOCK_RUN
    first, rate, count, _full, _phantoms = load_run(line)
    low, high = load_band(line, constants.LINE, constants.BANDED)
    is_active = is_row & is_active_in(line, slot)
    num_blocks = (count + BLOCK_RUN - 1) // BLOCK_RUN
    latest = gl.max(gl.where(is_active, position, -1), 0)
    stop_key = gl.where(latest >= 0, count, 0)
    start_key = count * 0
    if constants.CAUSAL or constants.BANDED:
        ahead = (latest - first).to(gl.int64) + high  # of the first key; 64 bits as a band may have no end
        stop_key = gl.where(ahead >= 0, gl.minimum(gl.maximum(ahead, 0) // rate + 1, stop_key), 0).to(gl.int32)
    if constants.BANDED:
        earliest = gl.min(gl.where(is_active, position, FAR), 0)
        behind = gl.maximum((earliest - first).to(gl.int64) + low, 0)
        start_key = gl.minimum((behind + rate - 1) // rate, stop_key).to(gl.int32)
    stop = (stop_key + BLOCK_RUN - 1) // BLOCK_RUN
    start = gl.where(start_key < stop_key, start_key // BLOCK_RUN, num_blocks)
    return start, gl.maximum(start, stop), num_blocks


@gluon.jit
def _pass_blocks(index, number, stages, constants):
    """Free blocks that these warps do not compute, each when it is there: else the next would be freed in its place."""
    STAGES: gl.constexpr = constants.STAGES
    for passed in range(index, index + number):
        place, turn = passed % STAGES, passed // STAGES & 1
        mbarrier.wait(stages.key_full.index(place), turn)
        mbarrier.arrive(stages.key_free.index(place))
        mbarrier.wait(stages.value_full.index(place), turn)
        mbarrier.arrive(stages.value_free.index(place))
    return index + number


@gluon.jit
def _settled(out, probability, index, is_pending, stages, constants):
    """The output with the product that is still to come, if one is; its values are freed."""
    last = (index + constants.STAGES - 1) % constants.STAGES
    if is_pending != 0:
        out = warpgroup_mma(probability, stages.value_blocks.index(last), out)
        mbarrier.arrive(stages.value_free.index(last))
    return out


@gluon.jit
def _begin_block(
    query, none, maximum, total, out, probability, index, block, line, position, is_row, slot, call, stages, constants,
):  # fmt: skip
    """A block before which no product is to come; masked whether it must be or not."""
    begun, turn = index % constants.STAGES, index // constants.STAGES & 1
    first, rate, count, _full, _phantoms = load_run(line)
    low, high = load_band(line, constants.LINE, constants.BANDED)
    mbarrier.wait(stages.key_full.index(begun), turn)
    score = warpgroup_mma(query, stages.key_blocks.index(begun).permute((1, 0)), none, use_acc=False)
    mbarrier.arrive(stages.key_free.index(begun))
    score = _scores_seen(score, block, first, rate, count, low, high, position, constants)
    is_active = is_row & is_active_in(line, slot)
    maximum, total, decay, weight = probabilities_of(score, maximum, total, is_active, call.scale_log2)
    probability = gl.convert_layout(weight.to(probability.dtype), probability.type.layout)
    mbarrier.wait(stages.value_full.index(begun), turn)
    out = out * gl.convert_layout(decay, gl.SliceLayout(1, out.type.layout))[:, None]
    return maximum, total, out, probability


@gluon.jit
def _attend_lines(QUERY, OUT, LSE, ORDER, queries, tile, call, stages, constants, PART: gl.constexpr):
    """Four warps that compute: the 64 lines of the tile from ``64 PART`` on."""
    D: gl.constexpr = constants.D
    BLOCK_RUN: gl.constexpr = constants.BLOCK_RUN
    dtype: gl.constexpr = QUERY.dtype.element_ty
    of_copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    of_score: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_RUN, 16]
    )
    of_out: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    of_weight: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=of_out, k_width=2)

    slot, row, head = _rows_of(ORDER, tile, call, constants, PART, gl.SliceLayout(1, of_copy))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, of_copy))
    lines = row.to(gl.int64) * call.query_stride_n + head.to(gl.int64) * call.query_stride_h
    query = queries.index(PART)
    query.store(gl.load(QUERY + lines[:, None] + column[None, :], mask=(row >= 0)[:, None], other=0.0))
    fence_async_shared()

    slot, row, head = _rows_of(ORDER, tile, call, constants, PART, gl.SliceLayout(1, of_score))
    is_row = row >= 0
    position = row + call.query_offset
    maximum = gl.full([LINES], float("-inf"), gl.float32, layout=gl.SliceLayout(1, of_score))
    total = gl.full([LINES], 0.0, gl.float32, layout=gl.SliceLayout(1, of_score))
    out = gl.zeros([LINES, D], gl.float32, layout=of_out)
    probability = gl.zeros([LINES, BLOCK_RUN], dtype, layout=of_weight)
    none = gl.zeros([LINES, BLOCK_RUN], gl.float32, layout=of_score)
    line = tile.line
    index = tile.num_runs * 0
    is_pending = index  # 1 where the product of the last probabilities with the values of their block is still to come
    for _ in range(tile.num_runs):
        _first, _rate, _count, full, _phantoms = load_run(line)
        start, stop, num_blocks = _blocks_of(line, position, is_row, slot, constants)
        if start > 0:
            out = _settled(out, probability, index, is_pending, stages, constants)
            is_pending = index * 0
        index = _pass_blocks(index, start, stages, constants)
        if (is_pending == 0) & (start < stop):
            maximum, total, out, probability = _begin_block(
                query, none, maximum, total, out, probability, index, start, line, position, is_row, slot, call, stages,
                constants,
            )  # fmt: skip
            index += 1
            start += 1
            is_pending = index * 0 + 1
        num_full = gl.minimum(gl.maximum(full // BLOCK_RUN, start), stop)
        maximum, total, out, probability, index = _attend_blocks(
            query, none, maximum, total, out, probability, index, line, start, num_full, position, is_row, slot,
            call, stages, constants, False,
        )  # fmt: skip
        maximum, total, out, probability, index = _attend_blocks(
            query, none, maximum, total, out, probability, index, line, num_full, stop, position, is_row, slot,
            call, stages, constants, True,
        )  # fmt: skip
        if stop < num_blocks:
            out = _settled(out, probability, index, is_pending, stages, constants)
            is_pending = index * 0
        index = _pass_blocks(index, num_blocks - stop, stages, constants)
        line += constants.LINE
    out = _settled(out, probability, index, is_pending, stages, constants)

    num_heads = call.num_kv_heads * constants.RATIO
    has_key = total != 0.0  # NaN is no zero: what came in as NaN or infinite goes out as NaN
    safe = gl.where(has_key, total, 1.0)
    lse = gl.where(has_key, (maximum + gl.log2(safe)) * LN_2, float("-inf"))
    gl.store(LSE + (tile.batch * call.num_queries + row) * num_heads + head, lse, mask=is_row)
    slot, row, head = _rows_of(ORDER, tile, call, constants, PART, gl.SliceLayout(1, of_out))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, of_out))
    lines = ((tile.batch * call.num_queries + row) * num_heads + head) * D
    factor = gl.convert_layout(gl.where(has_key, 1.0 / safe, 0.0), gl.SliceLayout(1, of_out))
    gl.store(OUT + lines[:, None] + column[None, :], (out * factor[:, None]).to(dtype), mask=(row >= 0)[:, None])


@gluon.jit(do_not_specialize=SIZES)
def warp_specialized_kernel(
    QUERY, KEY, VALUE, OUT, LSE, ORDER, RUNS, RANGES,
    query_stride_b, query_stride_n, query_stride_h, key_stride_b, key_stride_n, key_stride_h,
    value_stride_b, value_stride_n, value_stride_h,
    batch_size, num_queries, num_kv_heads, query_offset, key_offset, num_spans, heads_per_span,
    windows_per_span,
    tiles_per_window, lines_per_head, scale_log2,
    RATIO: gl.constexpr, PACK: gl.constexpr, D: gl.constexpr, BLOCK_RUN: gl.constexpr,
    STAGES: gl.constexpr, LINE: gl.constexpr, WINDOW: gl.constexpr, ORDERED: gl.constexpr,
    CAUSAL: gl.constexpr, BANDED: gl.constexpr,
):  # fmt: skip
    """``OUT[B, N, H, D]`` and ``LSE[B, N, H]``, as :func:`.forward.forward_kernel` computes them of the same runs."""
    dtype: gl.constexpr = QUERY.dtype.element_ty
    batch, kv_head, head_block, window, number = tile_of(
        gl.program_id(0), batch_size * num_kv_heads, num_kv_heads, num_spans, heads_per_span, windows_per_span,
        tiles_per_window, RATIO // PACK, CAUSAL,
    )  # fmt: skip
    line, num_runs = lines_of(
        RUNS, RANGES, kv_head, window, number, num_queries, tiles_per_window, lines_per_head, WINDOW, LINE
    )
    batch = batch.to(gl.int64)
    of_block: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_RUN, D], dtype)
    of_query: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LINES, D], dtype)
    of_barrier: gl.constexpr = mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(dtype, [PARTS, LINES, D], of_query)
    stages = Stages(
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_RUN, D], of_block),
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_RUN, D], of_block),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], of_barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], of_barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], of_barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], of_barrier),
    )
    for stage in gl.static_range(STAGES):
        mbarrier.init(stages.key_full.index(stage), count=1)
        mbarrier.init(stages.value_full.index(stage), count=1)
        mbarrier.init(stages.key_free.index(stage), count=PARTS)
        mbarrier.init(stages.value_free.index(stage), count=PARTS)
    fence_async_shared()
    tile = Tile(batch, kv_head, head_block, window, number, line, num_runs)
    call = Call(
        num_queries, num_kv_heads, query_stride_n, query_stride_h, key_stride_n, value_stride_n, query_offset,
        key_offset, scale_log2,
    )  # fmt: skip
    constants: gl.constexpr = Constants(
        RATIO, PACK, D, BLOCK_RUN, STAGES, LINE, WINDOW, ORDERED, CAUSAL, BANDED
    )  # fmt: skip
    query = QUERY + batch * query_stride_b
    key = KEY + batch * key_stride_b + kv_head.to(gl.int64) * key_stride_h
    value = VALUE + batch * value_stride_b + kv_head.to(gl.int64) * value_stride_h
    gl.warp_specialize(
        [
            (_attend_lines, (query, OUT, LSE, ORDER, queries, tile, call, stages, constants, 0)),
            (_attend_lines, (query, OUT, LSE, ORDER, queries, tile, call, stages, constants, 1)),
            (_copy_runs, (key, value, tile, call, stages, constants)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
