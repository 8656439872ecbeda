"""Terms of the scores besides the scaled products: a cap, a bias by distance, and a bias by key.

    s = softcap * tanh(scale * q.k / softcap) + distance_bias[h, j - i + N - 1] + key_bias[b, j, g]

for query row i and key row j; with coordinates, the bias by distance is ``distance_bias[h, 0]`` times the distance of
the two rows' coordinates. Kernels of a call without terms are compiled without any of this.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .tiles import head_of, lines_at

TWO_LOG2_E = tl.constexpr(2.8853900817779268)


class Coordinates(NamedTuple):
    """The coordinates that the distances of a tile's rows are taken between."""

    own: tl.tuple
    """x and y of the rows of the tile, ``[rows]`` each."""
    OTHERS: tl.tuple
    """Pointers to x and y of row 0 of the other side."""
    unit: tl.tensor
    """``[rows of the tile]``: bias of a distance of 1. Tiles of keys have one per head instead."""


class TileTerms(NamedTuple):
    """The terms of the scores of one tile's rows; what stands for a term that the call has not is never read."""

    DISTANCE_BIAS: tl.tensor
    diagonal: tl.tensor
    """``[rows of the tile]``: index in ``DISTANCE_BIAS`` for each row and row 0 of the other side. Tiles of keys: for
    the first head."""
    coordinates: Coordinates
    key_bias: tl.tuple
    """Tiles of queries: pointer to the bias of key row 0, and stride. Tiles of keys: the biases ``[rows]``."""
    factor: tl.tensor
    """Factor of the products: the scale; with a cap, the scale divided by it."""
    softcap: tl.tensor


@triton.jit
def coordinates_at(AXES, row, is_row):
    """x and y of rows, from pointers to those of row 0."""
    X, Y = AXES
    return tl.load(X + row, mask=is_row, other=0.0), tl.load(Y + row, mask=is_row, other=0.0)


@triton.jit
def terms_of_queries(TERMS, tile, head, row, slabs, OPTIONS: tl.constexpr):
    """The :class:`TileTerms` of a tile of query rows; ``head`` is the query head of each.

    Coordinates are those of key rows: query row i has the position of key row ``i + ahead``.
    """
    DISTANCE_BIAS, COORDINATES, KEY_BIAS, factor, softcap = TERMS
    BIAS, diagonal, coordinates, key_bias = row, row, row, row
    if OPTIONS.DISTANCE_BIAS:
        BIAS = DISTANCE_BIAS
    if OPTIONS.COORDINATES:
        KEYS, ahead = COORDINATES + tile.batch * 2 * slabs.num_keys, slabs.query_offset - slabs.key_offset
        AXES = KEYS, KEYS + slabs.num_keys
        coordinates = Coordinates(coordinates_at(AXES, row + ahead, row >= 0), AXES, tl.load(DISTANCE_BIAS + head))
    elif OPTIONS.DISTANCE_BIAS:
        # Slots without a row get the indices of row 0, which exist.
        first = head.to(tl.int64) * (slabs.num_queries + slabs.num_keys - 1)
        diagonal = first + slabs.num_queries - 1 - tl.maximum(row, 0)
    if OPTIONS.KEY_BIAS:
        key_bias = head_of(KEY_BIAS, tile.batch, tile.kv_head)
    return TileTerms(BIAS, diagonal, coordinates, key_bias, factor, softcap)


@triton.jit
def terms_of_keys(TERMS, tile, row, slabs, OPTIONS: tl.constexpr):
    """The :class:`TileTerms` of a tile of key rows; ``ahead`` as for :func:`terms_of_queries`."""
    DISTANCE_BIAS, COORDINATES, KEY_BIAS, factor, softcap = TERMS
    BIAS, diagonal, coordinates, key_bias = row, row, row, row
    if OPTIONS.DISTANCE_BIAS:
        BIAS = DISTANCE_BIAS
    if OPTIONS.COORDINATES:
        KEYS, ahead = COORDINATES + tile.batch * 2 * slabs.num_keys, slabs.query_offset - slabs.key_offset
        own = coordinates_at((KEYS, KEYS + slabs.num_keys), row, row >= 0)
        coordinates = Coordinates(own, (KEYS + ahead, KEYS + slabs.num_keys + ahead), factor)
    elif OPTIONS.DISTANCE_BIAS:
        diagonal = tl.maximum(row, 0).to(tl.int64) + slabs.num_queries - 1
    if OPTIONS.KEY_BIAS:
        BASE, lines = lines_at(KEY_BIAS, tile.batch, row, tile.kv_head)
        key_bias = tl.load(BASE + lines, mask=row >= 0, other=0.0)
    return TileTerms(BIAS, diagonal, coordinates, key_bias, factor, softcap)


@triton.jit
def bias_of_head(TERMS, head, slabs, OPTIONS: tl.constexpr):
    """Index in ``DISTANCE_BIAS`` where a head's begin; with coordinates, the head's bias of a distance of 1."""
    of_head = head
    if OPTIONS.COORDINATES:
        of_head = tl.load(TERMS[0] + head)
    elif OPTIONS.DISTANCE_BIAS:
        of_head = head * (slabs.num_queries + slabs.num_keys - 1)
    return of_head


@triton.jit
def distances_to(row, is_row, coordinates):
    """Distances ``[rows of a tile, rows of the other side]`` of the coordinates; 0 where one is NaN."""
    x, y = coordinates.own
    other_x, other_y = coordinates_at(coordinates.OTHERS, row, is_row)
    across, down = x[:, None] - other_x[None, :], y[:, None] - other_y[None, :]
    # The maximum of NaN and 0 is 0.
    return tl.sqrt(tl.maximum(across * across + down * down, 0.0))


@triton.jit
def tanh(x):
    """The hyperbolic tangent within a few roundings, also near 0, where exponentials would cancel; NaN stays.

    The polynomial is that of ``tanhf`` in Moshier's Cephes library.
    """
    size, square = tl.abs(x), x * x
    near = ((-5.70498872745e-3 * square + 2.06390887954e-2) * square - 5.37397155531e-2) * square
    near = ((near + 1.33314422036e-1) * square - 3.33332819422e-1) * square * x + x
    decay = tl.exp2(size * -TWO_LOG2_E)
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(size < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def scaled(score, terms, OPTIONS: tl.constexpr):
    """The scaled products, capped, and the hyperbolic tangents of the cap; without a cap, the scaled products twice."""
    score *= terms.factor
    share = score
    if OPTIONS.SOFTCAP:
        share = tanh(score)
        score = terms.softcap * share
    return score, share


@triton.jit
def biased(score, terms, key_row, is_key, MASKED: tl.constexpr, OPTIONS: tl.constexpr):
    """The scores ``[query rows of a tile, keys]`` with their biases; only ``MASKED`` blocks have keys that are none."""
    if OPTIONS.COORDINATES:
        score += terms.coordinates.unit[:, None] * distances_to(key_row, is_key, terms.coordinates)
    elif OPTIONS.DISTANCE_BIAS:
        pointers = terms.DISTANCE_BIAS + terms.diagonal[:, None] + key_row[None, :]
        if MASKED:
            score += tl.load(pointers, mask=is_key[None, :], other=0.0)
        else:
            score += tl.load(pointers)
    if OPTIONS.KEY_BIAS:
        BASE, stride = terms.key_bias
        bias = tl.load(BASE + key_row.to(tl.int64) * stride, mask=is_key, other=0.0)
        score += bias[None, :]
    return score


@triton.jit
def biased_by_queries(score, terms, of_head, query_row, is_query, OPTIONS: tl.constexpr):
    """The scores ``[key rows of a tile, queries]`` with their biases; ``of_head`` is from :func:`bias_of_head`."""
    if OPTIONS.COORDINATES:
        score += of_head * distances_to(query_row, is_query, terms.coordinates)
    elif OPTIONS.DISTANCE_BIAS:
        pointers = terms.DISTANCE_BIAS + terms.diagonal[:, None] + (of_head - query_row)[None, :]
        score += tl.load(pointers, mask=is_query[None, :], other=0.0)
    if OPTIONS.KEY_BIAS:
        score += terms.key_bias[:, None]
    return score


@triton.jit
def add_to_diagonals(GRAD_DISTANCE_BIAS, grad_score, diagonal, key_row, is_pair):
    """Add the gradients of scores ``[query rows, keys]`` to those of their biases.

    Additions are atomic: on a GPU their order, and with it the rounding of the sums, varies from run to run.
    """
    pointers = GRAD_DISTANCE_BIAS + diagonal[:, None] + key_row[None, :]
    tl.atomic_add(pointers, grad_score, mask=is_pair & (grad_score != 0.0), sem="relaxed")
