"""Where the runs of every tile lie in the table of runs: regions whose ends follow from positions, nothing is counted.

The runs of tile t lie from line ``line(t)`` on, before ``line(t + 1)``. With x the position of the row at which the
tile would begin if rows were not ordered, d the number of the document that holds x and b its first position (without
documents d = b = 0)::

    line(t) = t * per_tile + d * per_document + sum_i (b // w_i + (x - b + s_i) // w_i - (x_0 + s_i) // w_i)

over the groups i of segment length w_i and shift s_i, x_0 the position of the first row. So a program finds its lines
by itself, and a table for D documents has, of every head, with T tiles of N rows no more lines than ::

    lines = T * per_tile + D * per_document + sum_i (N - 1) // w_i

where neither the host nor another launch reads a boundary.

*Every tile has room for its runs.* Of group i it has one run at most for every interval (segment, cut by documents)
that its rows meet. Call ``Phi_i(x)`` the summand of group i plus ``c_i d``, c_i = 1, or 2 where the group is shifted.

1. For x <= y at most ``Phi_i(y) - Phi_i(x)`` intervals begin in (x, y]. Within a document that is how many begin;
   from the last row of a document of n rows to the first of the next ``Phi_i`` grows by
   ``(b + n) // w_i - b // w_i - (n - 1 + s_i) // w_i + c_i >= n // w_i - (n - 1 + s_i) // w_i + c_i >= 1``.
2. Rows that are not ordered lie side by side: a tile meets the interval of its first row x and those that begin
   behind it and before the next tile, at most ``1 + Phi_i(x') - Phi_i(x)`` with x' the x of the next tile.
3. Ordered rows stay in their pieces (:mod:`.order`: from one start of a segment of the shortest group to the next),
   and pieces in their places, so x lies in the piece of the tile's first row. Where intervals of group i begin only
   where pieces do, that is (2.) again. Elsewhere one interval at most begins within a piece, since no segment is
   shorter than a piece. Those within the tile's first piece and within its last may lie outside of (x, x'], the others
   do not: 3 instead of 1 in (2.).

So ``per_tile`` is the sum of these 1 and 3, ``per_document`` that of c_i. Rules add what a tile meets in one document
to ``per_tile``, and as much to ``per_document`` for those that begin in the tile; or twice as much to ``per_tile``, for
the documents that reach out of the tile, and what a document within a tile meets to ``per_document``, if that is less.

*Regions never overlap and stay in the table, whatever the boundaries hold.* Bisection of any integers gives a d that
does not decrease with x, ``b // w + (x - b + s) // w`` is ``(x + s) // w`` or one less for any b in [0, x], and
c_i >= 1. Where boundaries are none, runs without room are left out.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .problem import Kind
from .rule_table import RuleTable, Tiles
from .segments import document_of, load_group
from .sides import Side


class Regions(NamedTuple):
    """The numbers that decide where the runs of a tile lie, and how many lines that takes."""

    per_tile: int
    """Lines that every tile adds."""
    per_document: int
    """Lines that every document adds."""
    lines: int
    """Of one key/value head, at least 1: a table without lines is no memory that a kernel could be given."""


def regions_of(kind: Kind, rules: RuleTable | None, side: Side, tile_rows: int) -> Regions:
    """The regions of tiles of ``tile_rows`` rows."""
    num_tiles, num_documents = side.num_windows * -(-side.window // tile_rows), kind.num_documents or 1
    per_tile = len(kind.groups) + 2 * kind.num_unaligned_groups * side.is_ordered
    per_document = len(kind.groups) + kind.num_shifted_groups
    if rules is not None:
        reach = side.window if side.is_ordered else min(tile_rows, side.num_rows)
        if kind.num_documents is None:
            # One tile is bounded wherever it lies: a step of decoding, which begins elsewhere, asks for the same again.
            is_aligned = side.is_ordered or (side.num_rows > tile_rows and side.window % tile_rows == 0)
            begins = None if side.offset is None or not is_aligned else (side.offset, side.offset + side.num_rows)
            per_tile += rules.most_runs(Tiles(begins, reach))
        else:
            of_any, within = rules.most_runs(Tiles(None, reach)), rules.most_runs_within(reach)
            choices = ((of_any, of_any), (2 * of_any, within))
            added = min(choices, key=lambda one: one[0] * num_tiles + one[1] * num_documents)
            per_tile, per_document = per_tile + added[0], per_document + added[1]
    lines = num_tiles * per_tile + num_documents * per_document
    lines += sum((side.num_rows - 1) // length for length in kind.segment_lengths)
    return Regions(per_tile, per_document, max(1, lines))


@triton.jit
def first_line(
    GROUPS,
    CU_SEQLENS,
    tile,
    kv_head,
    num_rows,
    offset,
    num_groups,
    num_kv_heads,
    num_documents,
    search_steps,
    last_position,
    tiles_per_window,
    per_tile,
    per_document,
    TILE_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The first line of the region of each tile, or behind the last tile the end of the last region."""
    row = tile // tiles_per_window * WINDOW + tile % tiles_per_window * TILE_ROWS
    position = tl.minimum(row, num_rows - 1) + offset
    document, begin, _end = document_of(position, CU_SEQLENS, num_documents, search_steps, last_position, PACKED)
    begin = tl.minimum(tl.maximum(begin, 0), position)
    line = tile * per_tile + document * per_document
    for group in range(num_groups):
        length, _, _, shift = load_group(GROUPS, group, kv_head, num_kv_heads)
        line += begin // length + (position - begin + shift) // length - (offset + shift) // length
    return line
