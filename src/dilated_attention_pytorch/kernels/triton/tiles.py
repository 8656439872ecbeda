"""The rows of a tile, the order in which tiles are computed, and operations on blocks of lines."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dilated_attention_pytorch.kernels.select import is_interpreted

INTERPRETED = tl.constexpr(is_interpreted())
# Integers that change from call to call: a kernel is not recompiled when one of them is 1 or a multiple of 16. This
# holds for arguments only: Triton specializes the integers of a tuple, whatever the kernel asks for. So kernels take
# these numbers one by one and group them for the functions that they call; the tuples that they are launched with hold
# tensors, strides, which are multiples of 16 in most calls, and numbers that do not change in a run.
SIZES = [
    "batch_size",
    "heads_per_span",
    "key_offset",
    "last_position",
    "lines_per_head",
    "num_documents",
    "num_groups",
    "num_keys",
    "num_kv_heads",
    "num_lines",
    "num_others",
    "num_queries",
    "num_rows",
    "num_rules",
    "num_spans",
    "num_splits",
    "offset",
    "others_offset",
    "per_document",
    "per_tile",
    "query_offset",
    "search_steps",
    "shortest_group",
    "span_steps",
    "tiles_per_window",
    "windows_per_span",
]


class Width(NamedTuple):
    """Number of columns of a head's rows, and of the blocks that hold them."""

    D: int
    BLOCK_D: int


def constant(width: Width) -> Any:
    """A width as a field of :class:`ComputingOptions`.

    Triton 3.6 compiles no call of a function with a tuple from another tuple unless it is marked as constant. The
    interpreter takes it as it is.
    """
    return width if INTERPRETED.value else tl.constexpr(width)


class ComputingOptions(NamedTuple):
    """Compile-time constants of the computing kernels."""

    RATIO: int
    """Query heads per key/value head."""
    PACK: int
    """Query heads that share a tile."""
    KEY_WIDTH: Width
    """Of queries and keys."""
    VALUE_WIDTH: Width
    """Of values and outputs."""
    BLOCK_ROWS: int
    """Rows of a tile, times the heads that share it."""
    BLOCK_RUN: int
    """Rows of a run that are computed at once."""
    LINE: int
    """Integers per run."""
    WINDOW: int
    ORDERED: bool
    """Whether rows are ordered within their windows."""
    CAUSAL: bool
    BANDED: bool
    """Whether distances are bounded differently from the causal mask."""
    PADDED: bool
    DROPOUT: bool
    TERMS: bool
    """Whether scores are more than scaled products."""
    SOFTCAP: bool
    DISTANCE_BIAS: bool
    COORDINATES: bool
    """Whether the bias by distance is one of coordinates."""
    KEY_BIAS: bool
    ZERO_PAD_KEYS: bool
    ROTATED: bool
    """Whether the shares of splits move on with every run."""


class CallOperands(NamedTuple):
    """The operands of a call: tensors when a kernel is launched, pointers in it."""

    QUERY: Any
    """With the strides of sequences, rows and heads, like ``KEY`` and ``VALUE``."""
    KEY: Any
    VALUE: Any
    PADDING: Any
    DROPOUT: Any
    """The seed, the threshold and the factor of dropout."""
    TERMS: Any
    """None, or what :mod:`.terms` reads."""


class CallOutputs(NamedTuple):
    """The outputs of a call, the gradients of the output, and what the backward computes first: the deltas."""

    OUT: Any
    GRAD_OUT: Any
    """With strides."""
    LSE: Any
    DELTA: Any


class TileRuns(NamedTuple):
    """The rows of the tiles in order, the runs that tiles walk over, and each tile's first run and number of runs."""

    ORDER: Any
    RUNS: Any
    RANGES: Any


class CallRows(NamedTuple):
    """The rows of queries and keys."""

    batch_size: tl.tensor
    num_queries: tl.tensor
    num_keys: tl.tensor
    num_kv_heads: tl.tensor
    query_offset: tl.tensor
    """Position of the first query."""
    key_offset: tl.tensor


class Layout(NamedTuple):
    """The order of the tiles, and the size of the table of their runs."""

    num_spans: tl.tensor
    heads_per_span: tl.tensor
    windows_per_span: tl.tensor
    tiles_per_window: tl.tensor
    lines_per_head: tl.tensor


class TilePlace(NamedTuple):
    """The place of a tile: its sequence, key/value head, block of query heads, window, and number in the window."""

    batch: tl.tensor
    kv_head: tl.tensor
    head_block: tl.tensor
    window: tl.tensor
    number: tl.tensor


class Keys(NamedTuple):
    """Keys and values of one head, and the padding mask of its sequence."""

    KEY: tl.tuple
    """Pointer to the first row, and the stride of rows."""
    VALUE: tl.tuple
    PADDING: tl.tensor
    offset: tl.tensor
    """Position of the first row."""


@triton.jit
def tile_of(index, slabs, layout, HEAD_BLOCKS: tl.constexpr, LAST_FIRST: tl.constexpr):
    """The ``index``-th :class:`TilePlace`.

    A span, some windows of some heads, is finished before the next begins, so that its keys and values stay in the
    device's cache; within a span, the first tiles of all windows come first, as they see most. Under a causal mask
    later rows see most: ``LAST_FIRST`` begins with them.
    """
    _, heads_per_span, windows_per_span, tiles_per_window, _ = layout
    outer, inner = index // HEAD_BLOCKS, index % HEAD_BLOCKS
    head_block = inner
    per_span = heads_per_span * windows_per_span * tiles_per_window
    outer, inner = outer // per_span, outer % per_span
    number, inner = inner // (heads_per_span * windows_per_span), inner % (heads_per_span * windows_per_span)
    spans_of_heads = slabs.batch_size * slabs.num_kv_heads // heads_per_span
    head = outer % spans_of_heads * heads_per_span + inner // windows_per_span
    window = outer // spans_of_heads * windows_per_span + inner % windows_per_span
    if LAST_FIRST:
        window = layout.num_spans * windows_per_span - 1 - window
    return TilePlace((head // slabs.num_kv_heads).to(tl.int64), head % slabs.num_kv_heads, head_block, window, number)


@triton.jit
def lines_of(TILES, tile, num_rows, layout, OPTIONS: tl.constexpr):
    """Line of a tile's first run, and number of runs; no runs if a span extends past the last window."""
    num_windows = (num_rows + OPTIONS.WINDOW - 1) // OPTIONS.WINDOW
    index = (tile.kv_head * num_windows + tile.window) * layout.tiles_per_window + tile.number
    range_of_tile = TILES.RANGES + index * 2
    first = tl.load(range_of_tile, mask=tile.window < num_windows, other=0)
    line = TILES.RUNS + (tile.kv_head.to(tl.int64) * layout.lines_per_head + first) * OPTIONS.LINE
    return line, tl.load(range_of_tile + 1, mask=tile.window < num_windows, other=0)


@triton.jit
def rows_of(ORDER, tile, num_rows, slot, TILE_ROWS: tl.constexpr, OPTIONS: tl.constexpr):
    """The row in each slot of a tile of ``TILE_ROWS`` rows; -1 in slots without one."""
    index = tile.number * TILE_ROWS + slot
    row = tile.window * OPTIONS.WINDOW + index
    is_row = (slot < TILE_ROWS) & (index < OPTIONS.WINDOW) & (row < num_rows)
    if OPTIONS.ORDERED:
        num_windows = (num_rows + OPTIONS.WINDOW - 1) // OPTIONS.WINDOW
        line = ORDER + (tile.kv_head * num_windows + tile.window).to(tl.int64) * OPTIONS.WINDOW
        row = tl.load(line + index, mask=is_row, other=-1)
    return tl.where(is_row, row, -1)


@triton.jit
def load_lines(BASE, line_offset, is_line, WIDTH: tl.constexpr):
    """``[lines, BLOCK_D]`` from ``BASE + line_offset``; missing lines, and columns from D on, are 0."""
    column = tl.arange(0, WIDTH.BLOCK_D)
    mask = is_line[:, None] & (column < WIDTH.D)[None, :]
    return tl.load(BASE + line_offset[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def lines_at(STRIDED, batch, row, head):
    """The pointer of a tensor, given with the strides of sequences, rows and heads, and the offsets of rows from it."""
    BASE, stride_b, stride_n, stride_h = STRIDED
    return BASE, batch * stride_b + row.to(tl.int64) * stride_n + head.to(tl.int64) * stride_h


@triton.jit
def load_rows(STRIDED, tile, row, head, is_row, WIDTH: tl.constexpr):
    """``[rows, BLOCK_D]`` of a tile's sequence; missing rows, and columns from D on, are 0."""
    BASE, line_offset = lines_at(STRIDED, tile.batch, row, head)
    return load_lines(BASE, line_offset, is_row, WIDTH)


@triton.jit
def head_of(STRIDED, batch, head):
    """Pointer to the first row of a head, and the stride of rows."""
    BASE, stride_b, stride_n, stride_h = STRIDED
    return BASE + batch * stride_b + head.to(tl.int64) * stride_h, stride_n


@triton.jit
def keys_of(OPERANDS, tile, slabs):
    """The :class:`Keys` of a tile's head."""
    KEY, VALUE = head_of(OPERANDS.KEY, tile.batch, tile.kv_head), head_of(OPERANDS.VALUE, tile.batch, tile.kv_head)
    return Keys(KEY, VALUE, OPERANDS.PADDING + tile.batch * slabs.num_keys, slabs.key_offset)


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """``value`` rounded to the nearest number of ``dtype``."""
    if INTERPRETED and dtype == tl.bfloat16:  # the interpreter truncates: the lower bits are rounded to 0 first
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        value = bits.to(tl.float32, bitcast=True)
    return value.to(dtype)


@triton.jit
def store_lines(BASE, line_offset, is_line, value, WIDTH: tl.constexpr):
    """Store ``[lines, BLOCK_D]`` to the existing lines, in the dtype of ``BASE``."""
    column = tl.arange(0, WIDTH.BLOCK_D)
    mask = is_line[:, None] & (column < WIDTH.D)[None, :]
    tl.store(BASE + line_offset[:, None] + column[None, :], rounded(value, BASE.dtype.element_ty), mask=mask)


@triton.jit
def load_block(pointers, is_line, MASKED: tl.constexpr, WIDTH: tl.constexpr):
    """``[lines, BLOCK_D]``: masked by line if ``MASKED``, by column if D does not fill the block."""
    inside = (tl.arange(0, WIDTH.BLOCK_D) < WIDTH.D)[None, :]
    if MASKED:
        return tl.load(pointers, mask=is_line[:, None] & inside, other=0.0)
    if WIDTH.D == WIDTH.BLOCK_D:
        return tl.load(pointers)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def rows_of_run(HEAD, first_row, rate, BLOCK_RUN: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers ``[BLOCK_RUN, BLOCK_D]`` to a run's first block, and their distance to the next block's.

    ``HEAD`` is a pointer to the first row of a head and the stride of rows.
    """
    BASE, stride = HEAD
    wide_rate = rate.to(tl.int64)  # a stride times a rate exceeds 2^31 before any address does
    row_in_block = tl.arange(0, BLOCK_RUN) * wide_rate
    first_line = BASE + first_row.to(tl.int64) * stride
    pointers = first_line + (row_in_block * stride)[:, None] + tl.arange(0, WIDTH.BLOCK_D)[None, :]
    return pointers, stride * wide_rate * BLOCK_RUN


@triton.jit
def is_seen_key(index, count, first_row, rate, PADDING, PADDED: tl.constexpr):
    """Whether each row of a run exists and is no padding."""
    is_key = index < count
    if PADDED:
        is_key = is_key & (tl.load(PADDING + first_row + index * rate, mask=is_key, other=1) == 0)
    return is_key


@triton.jit
def product(left, right, total=None):
    """``left @ right + total`` in float32; float32 operands are multiplied exactly, not rounded to fewer bits."""
    if INTERPRETED:  # it uses numpy, which has no bfloat16: products of bfloat16 numbers are exact in float32
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")
