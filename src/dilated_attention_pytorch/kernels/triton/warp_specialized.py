"""The forward of :mod:`.forward` with specialised warps, for compute capability 9.0: one copies, the others compute.

One warp describes each run of keys to the device's copy engine (TMA), which writes blocks of it into shared memory;
every four of the other warps compute 64 lines of the tile (:mod:`.consumer`). Barriers in shared memory tell which
stages are filled and which are free. The kernel is written in Gluon, Triton's lower-level language, which has no
interpreter: ``tests/support/gluon_emulator.py`` runs it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from .consumer import LINES, PARTS, attend_lines
from .runs import load_run
from .tiles import SIZES, lines_of, tile_of

try:
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_load
except ImportError:  # its name in Triton 3.6
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_copy_global_to_shared as async_load

REGISTERS = gl.constexpr(240)
"""Registers per thread of the warps that compute; the warp that copies has 24."""


class Stages(NamedTuple):
    """Shared memory for some blocks of keys and values, and two barriers of each: filled, and free again."""

    key_blocks: Any
    value_blocks: Any
    key_full: Any
    key_free: Any
    value_full: Any
    value_free: Any


class Tile(NamedTuple):
    """The rows and heads that a program computes, and the runs that they see."""

    batch: Any
    kv_head: Any
    head_block: Any
    window: Any
    number: Any
    line: Any
    num_runs: Any


class Call(NamedTuple):
    """Numbers common to all tiles."""

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
    """Compile-time constants of the kernel, named as in :mod:`.forward`."""

    RATIO: Any
    PACK: Any
    D: Any
    BLOCK_D: Any
    BLOCK_RUN: Any
    STAGES: Any
    LINE: Any
    WINDOW: Any
    ORDERED: Any
    CAUSAL: Any
    BANDED: Any


@gluon.jit
def _copy_run(KEY, VALUE, line, index, settled, call, stages, constants):
    """Copy a run's blocks into the stages, from block number ``index`` on; return the number of the block after them.

    Descriptors lie in memory that every call from the same line of code overwrites. The blocks that the previous such
    call copied, those before ``settled``, must have arrived first: a copy may read its descriptor at any time.
    """
    D: gl.constexpr = constants.D
    BLOCK_D: gl.constexpr = constants.BLOCK_D
    BLOCK_RUN: gl.constexpr = constants.BLOCK_RUN
    STAGES: gl.constexpr = constants.STAGES
    for block in range(gl.maximum(index - STAGES, 0), settled):
        mbarrier.wait(stages.key_full.index(block % STAGES), block // STAGES & 1)
        mbarrier.wait(stages.value_full.index(block % STAGES), block // STAGES & 1)
    first, rate, count, _full, _zero_pad_keys = load_run(line)
    row = (first - call.key_offset).to(gl.int64)
    wide_rate = gl.where(count > 1, rate, 1).to(gl.int64)  # the rate of a run of one row may not be a valid stride
    keys = tma.make_tensor_descriptor(
        KEY + row * call.key_stride_n,
        [count, D],
        [call.key_stride_n * wide_rate, 1],
        [BLOCK_RUN, BLOCK_D],
        stages.key_blocks.type.layout,
    )
    values = tma.make_tensor_descriptor(
        VALUE + row * call.value_stride_n,
        [count, D],
        [call.value_stride_n * wide_rate, 1],
        [BLOCK_RUN, BLOCK_D],
        stages.value_blocks.type.layout,
    )
    for block in range((count + BLOCK_RUN - 1) // BLOCK_RUN):
        stage, phase = index % STAGES, index // STAGES & 1
        mbarrier.wait(stages.key_free.index(stage), phase ^ 1)
        mbarrier.expect(stages.key_full.index(stage), BLOCK_RUN * BLOCK_D * 2)
        async_load(keys, [block * BLOCK_RUN, 0], stages.key_full.index(stage), stages.key_blocks.index(stage))
        mbarrier.wait(stages.value_free.index(stage), phase ^ 1)
        mbarrier.expect(stages.value_full.index(stage), BLOCK_RUN * BLOCK_D * 2)
        async_load(values, [block * BLOCK_RUN, 0], stages.value_full.index(stage), stages.value_blocks.index(stage))
        index += 1
    return index


@gluon.jit
def _copy_runs(KEY, VALUE, tile, call, stages, constants):
    """The warp that copies.

    Two lines of code describe runs in turn, so that one run is described while the blocks of the other are in flight.
    """
    line = tile.line
    index = tile.num_runs * 0
    settled = index  # end of the blocks of the run before the last one
    for run in range(0, tile.num_runs, 2):
        first = index
        index = _copy_run(KEY, VALUE, line, index, settled, call, stages, constants)
        settled = index
        if run + 1 < tile.num_runs:
            index = _copy_run(KEY, VALUE, line + constants.LINE, index, first, call, stages, constants)
        line += 2 * constants.LINE


@gluon.jit(do_not_specialize=SIZES)
def warp_specialized_kernel(
    QUERY,
    KEY,
    VALUE,
    OUT,
    LSE,
    ORDER,
    RUNS,
    RANGES,
    query_stride_b,
    query_stride_n,
    query_stride_h,
    key_stride_b,
    key_stride_n,
    key_stride_h,
    value_stride_b,
    value_stride_n,
    value_stride_h,
    batch_size,
    num_queries,
    num_kv_heads,
    query_offset,
    key_offset,
    num_spans,
    heads_per_span,
    windows_per_span,
    tiles_per_window,
    lines_per_head,
    scale_log2,
    RATIO: gl.constexpr,
    PACK: gl.constexpr,
    D: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_RUN: gl.constexpr,
    STAGES: gl.constexpr,
    LINE: gl.constexpr,
    WINDOW: gl.constexpr,
    ORDERED: gl.constexpr,
    CAUSAL: gl.constexpr,
    BANDED: gl.constexpr,
):
    """``OUT[B, N, H, D]`` and ``LSE[B, N, H]``, as :func:`.forward.forward_kernel` computes them from the same runs."""
    dtype: gl.constexpr = QUERY.dtype.element_ty
    batch, kv_head, head_block, window, number = tile_of(
        gl.program_id(0),
        batch_size * num_kv_heads,
        num_kv_heads,
        num_spans,
        heads_per_span,
        windows_per_span,
        tiles_per_window,
        RATIO // PACK,
        CAUSAL,
    )
    line, num_runs = lines_of(
        RUNS, RANGES, kv_head, window, number, num_queries, tiles_per_window, lines_per_head, WINDOW, LINE
    )
    batch = batch.to(gl.int64)
    of_block: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_RUN, BLOCK_D], dtype)
    of_query: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LINES, BLOCK_D], dtype)
    of_barrier: gl.constexpr = mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(dtype, [PARTS, LINES, BLOCK_D], of_query)
    stages = Stages(
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_RUN, BLOCK_D], of_block),
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_RUN, BLOCK_D], of_block),
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
        num_queries,
        num_kv_heads,
        query_stride_n,
        query_stride_h,
        key_stride_n,
        value_stride_n,
        query_offset,
        key_offset,
        scale_log2,
    )
    constants: gl.constexpr = Constants(
        RATIO, PACK, D, BLOCK_D, BLOCK_RUN, STAGES, LINE, WINDOW, ORDERED, CAUSAL, BANDED
    )
    query = QUERY + batch * query_stride_b
    key = KEY + batch * key_stride_b + kv_head.to(gl.int64) * key_stride_h
    value = VALUE + batch * value_stride_b + kv_head.to(gl.int64) * value_stride_h
    gl.warp_specialize(
        [
            (attend_lines, (query, OUT, LSE, ORDER, queries, tile, call, stages, constants, 0)),
            (attend_lines, (query, OUT, LSE, ORDER, queries, tile, call, stages, constants, 1)),
            (_copy_runs, (key, value, tile, call, stages, constants)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
