"""Regions of the table of runs: each tile's lines follow from positions, without counting runs.

The runs of tile t lie on lines ``line(t)`` to ``line(t + 1) - 1``. Let x be the position of the row at which the tile
would begin if rows were not ordered, d the index of the document that contains x, and b the first position of that
document (without documents d = b = 0). Then ::

    line(t) = t * per_tile + d * per_document + sum_i (b // w_i + (x - b + s_i) // w_i - (x_0 + s_i) // w_i)

summed over the groups i of segment length w_i and shift s_i, where x_0 is the position of the first row. Every program
thus finds its lines by itself, and for D documents and N rows in T tiles, the table has per head at most ::

    lines = T * per_tile + D * per_document + sum_i (N - 1) // w_i

lines. Neither the host nor another launch reads a boundary.

*Every tile has room for its runs.* For group i a tile has at most one run per interval (a segment, cut at document
boundaries) that its rows meet. Let ``Phi_i(x)`` be the summand of group i plus ``c_i d``, where c_i = 1, or 2 if the
group is shifted.

1. For x <= y, at most ``Phi_i(y) - Phi_i(x)`` intervals begin in (x, y]. Within a document this is their exact number;
   from the last row of a document of n rows to the first of the next, ``Phi_i`` grows by
   ``(b + n) // w_i - b // w_i - (n - 1 + s_i) // w_i + c_i >= n // w_i - (n - 1 + s_i) // w_i + c_i >= 1``.
2. Rows that are not ordered are consecutive: a tile meets the interval of its first row x and those that begin after x
   and before the next tile, at most ``1 + Phi_i(x') - Phi_i(x)``, where x' is the x of the next tile.
3. Ordered rows stay in their pieces (:mod:`.order`: from one start of a segment of the shortest group to the next),
   and pieces in their places, so x lies in the piece of the tile's first row. If intervals of group i begin only where
   pieces begin, the bound of (2.) holds again. Otherwise at most one interval begins inside a piece, since no segment
   is shorter than a piece. Only the ones that begin inside the tile's first piece and inside its last may lie outside
   of (x, x']: 3 instead of 1 in (2.).

So ``per_tile`` is the sum of these 1 and 3, and ``per_document`` the sum of c_i. Rules add the number of runs that a
tile meets in one document to ``per_tile``, and the same number to ``per_document`` for documents that begin in the
tile; or, if that takes fewer lines, twice that number to ``per_tile``, for the documents that extend beyond the tile,
and the number of runs that a document within a tile meets to ``per_document``.

*Regions never overlap and stay in the table, whatever the boundaries contain.* Bisection of arbitrary integers gives a
d that does not decrease with x, ``b // w + (x - b + s) // w`` is ``(x + s) // w`` or one less for any b in [0, x], and
c_i >= 1. With invalid boundaries, runs without room are left out.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .problem import Kind
from .rule_table import RuleTable, TileRanges
from .segments import document_of, load_group
from .sides import Side


class Regions(NamedTuple):
    """Numbers that determine the regions of the tiles, and the size of the table."""

    per_tile: int
    """Lines added per tile."""
    per_document: int
    """Lines added per document."""
    lines: int
    """Lines per key/value head, at least 1: an empty table has no memory to pass to a kernel."""


def regions_of(kind: Kind, rules: RuleTable | None, side: Side, tile_rows: int) -> Regions:
    """The regions of tiles of ``tile_rows`` rows."""
    num_tiles, num_documents = side.num_windows * -(-side.window // tile_rows), kind.num_documents or 1
    per_tile = len(kind.groups) + 2 * kind.num_unaligned_groups * side.is_ordered
    per_document = len(kind.groups) + kind.num_shifted_groups
    if rules is not None:
        reach = side.window if side.is_ordered else min(tile_rows, side.num_rows)
        if kind.num_documents is None:
            # A single tile is bounded wherever it lies, so that all decoding steps get the same number.
            is_aligned = side.is_ordered or (side.num_rows > tile_rows and side.window % tile_rows == 0)
            begins = None if side.offset is None or not is_aligned else (side.offset, side.offset + side.num_rows)
            per_tile += rules.most_runs(TileRanges(begins, reach))
        else:
            of_any, within = rules.most_runs(TileRanges(None, reach)), rules.most_runs_within(reach)
            choices = ((of_any, of_any), (2 * of_any, within))
            added = min(choices, key=lambda one: one[0] * num_tiles + one[1] * num_documents)
            per_tile, per_document = per_tile + added[0], per_document + added[1]
    lines = num_tiles * per_tile + num_documents * per_document
    lines += sum((side.num_rows - 1) // length for length in kind.segment_lengths)
    return Regions(per_tile, per_document, max(1, lines))


@triton.jit
def first_line(groups, documents, regions, tile, num_rows, offset, tiles_per_window, OPTIONS: tl.constexpr):
    """First line of each tile's region; for the index past the last tile, the end of the last region."""
    row = tile // tiles_per_window * OPTIONS.WINDOW + tile % tiles_per_window * OPTIONS.TILE_ROWS
    position = tl.minimum(row, num_rows - 1) + offset
    document, begin, _end = document_of(position, documents, OPTIONS.PACKED)
    begin = tl.minimum(tl.maximum(begin, 0), position)
    line = tile * regions.per_tile + document * regions.per_document
    for group in range(groups.number):
        length, _, _, shift = load_group(groups, group)
        line += begin // length + (position - begin + shift) // length - (offset + shift) // length
    return line
