"""How the tiles of a slide lie: their spacing, and tiles at one place."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_FEW = 3
_LEAST_SHARE = 0.25
_ENOUGH_FOR_A_DIVISOR = 8
_PART_OF_COMMONEST = 4
_CERTAIN = 8
_MOST_STEPS = 4


class Placement(NamedTuple):
    """How tiles lie."""

    spacing: int | None
    """Distance of neighbours; None if too few lie in one row or column to tell."""
    repeated: int
    """Tiles at the place of another one."""
    first: list[int]
    """The first such place, if there is one."""


def placement(coordinates: Tensor) -> Placement:
    """Measure how tiles lie.

    The spacing is the smallest of the common distances to the next tile in the same row or column. Where tiles are so
    sparse that no distance is common, or that the common one may be a few steps, it is the greatest common divisor of
    all distances.

    Args:
        coordinates: ``[N, 2]``.
    """
    places = coordinates.round().long()
    steps = []
    for axis in (0, 1):
        # By the other axis, and by this one among equals.
        places = places[places[:, axis].argsort(stable=True)]
        places = places[places[:, 1 - axis].argsort(stable=True)]
        distances = places.diff(dim=0)
        steps.append(distances[distances[:, 1 - axis] == 0, axis])
    is_repeated = (places.diff(dim=0) == 0).all(dim=1)
    first = places[1:][is_repeated][:1].flatten().tolist()
    neighbours = torch.cat(steps)
    return Placement(_spacing(places, neighbours[neighbours > 0]), int(is_repeated.sum()), first)


def _spacing(places: Tensor, neighbours: Tensor) -> int | None:
    distances, counts = neighbours.unique(return_counts=True)
    most = int(counts.max()) if len(counts) else 0
    is_common = most >= _FEW and most >= _LEAST_SHARE * len(neighbours)
    common = int(distances[_PART_OF_COMMONEST * counts >= most][0]) if is_common else None
    if len(places) < _ENOUGH_FOR_A_DIVISOR or (common is not None and most >= _CERTAIN):
        return common
    divisors = torch.cat([axis.unique().diff() for axis in places.unbind(dim=1)])
    while len(divisors) > 1:
        half = len(divisors) // 2
        divisors = torch.cat((torch.gcd(divisors[:half], divisors[half : 2 * half]), divisors[2 * half :]))
    divisor = int(divisors[0]) if len(divisors) else 1
    if common is None:
        return divisor if divisor > 1 else None
    # Contours that begin at any pixel have a small divisor.
    return divisor if common % divisor == 0 and common <= _MOST_STEPS * divisor else common
