"""Segment boundaries at natural breaks of a token sequence."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from .pattern import check_count

Breaks = Literal["newline", "paragraph", "document"]
BreakRule = Callable[[Sequence[int]], Iterable[int]]
"""A custom rule: maps token ids to the positions where new units begin."""


def find_breaks(
    tokens: Sequence[int] | Tensor, at: Breaks | BreakRule, *, token: int | Collection[int] | None = None
) -> tuple[int, ...]:
    """Positions of a token sequence where a new unit begins, ascending; excludes 0 and the length.

    Args:
        tokens: token ids ``[N]``, a sequence of integers or a 1-D tensor.
        at: ``"newline"``: after every break token. ``"paragraph"``: after every run of two or more break tokens (a
            blank line). ``"document"``: after every separator. Or a function from the ids to positions.
        token: the break token or several: newlines for the first two (default 10, as in UTF-8 bytes),
            the separator for ``"document"`` (no default).

    Raises:
        TypeError: ``tokens`` are not 1-D integers, ``token`` is neither an integer nor a collection of integers, or the
            function returns a non-integer.
        ValueError: an unknown rule name, no ``token`` with ``"document"``, a ``token`` with a function, or the
            function returns a position outside the sequence.

    >>> text = b"one\\ntwo\\n\\nthree"
    >>> find_breaks(text, "newline"), find_breaks(text, "paragraph")
    ((4, 8, 9), (9,))
    """
    ids = _ids(tokens)
    if callable(at):
        if token is not None:
            raise ValueError(f"token belongs to the named rules, and at is a function: leave it out, got {token!r}")
        found = sorted(set(_integers("at must give integer positions", at(ids))))
        if found and not 0 <= found[0] <= found[-1] <= len(ids):
            raise ValueError(f"at must give positions from 0 to {len(ids)}, got {found[0]} to {found[-1]}")
        return tuple(position for position in found if 0 < position < len(ids))
    if at not in get_args(Breaks):
        names = ", ".join(map(repr, get_args(Breaks)))
        raise ValueError(f"at must be one of {names}, or a function from token ids to positions, got {at!r}")
    if token is None and at == "document":
        raise ValueError('at="document" needs token, the id that separates documents, got None')
    breaking = {10} if token is None else _breaking(token)
    needed, positions, run = (2 if at == "paragraph" else 1), [], 0
    for position, one in enumerate(ids):
        if one in breaking:
            run += 1
            is_break = run >= needed and (
                at != "paragraph" or position + 1 == len(ids) or ids[position + 1] not in breaking
            )
            if is_break and position + 1 < len(ids):
                positions.append(position + 1)
        else:
            run = 0
    return tuple(positions)


def snap_boundaries(
    segment_length: int, sequence_length: int, breaks: Iterable[int] | Tensor, *, tolerance: float
) -> tuple[int, ...]:
    """Segment boundaries: multiples of w, each moved to the nearest break within ``tolerance * w / 2``.

    A boundary moves by less than half of w and by at most ``tolerance * w / 2``, so boundaries stay in order and no
    segment is longer than ``(1 + tolerance) w``. Ties go to the earlier break; a boundary without a nearby break
    does not move.

    Args:
        segment_length: nominal segment length w, in positions.
        sequence_length: number of positions N.
        breaks: preferred segment starts in any order, as :func:`find_breaks` returns them; positions outside the
            sequence are ignored. Tensors and arrays of integers are accepted.
        tolerance: relative excess length of a segment over w; 0 to 1. With 0 nothing moves.

    Returns:
        strictly ascending positions, the first 0 and the last N. As boundaries of a ``SegmentedPattern``, the last
        one starts one more segment, which is empty for N positions.

    Raises:
        TypeError: a length or a break is not an integer.
        ValueError: a length is below 1, or the tolerance is outside 0 to 1.
    >>> snap_boundaries(100, 350, [93, 108, 240, 299], tolerance=0.5)
    (0, 93, 200, 299, 350)
    """
    check_count("segment_length", segment_length)
    check_count("sequence_length", sequence_length)
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0.0 <= tolerance <= 1.0:
        raise ValueError(f"tolerance must be a number from 0 to 1, got {tolerance!r}")
    whole = _integers("breaks must be integer positions", breaks)
    known = sorted({position for position in whole if 0 < position < sequence_length})
    reach = min(int(tolerance * segment_length / 2), (segment_length - 1) // 2)
    edges = [0]
    for edge in range(segment_length, sequence_length, segment_length):
        index = bisect.bisect_left(known, edge)
        near = [position for position in known[max(0, index - 1) : index + 1] if abs(position - edge) <= reach]
        edges.append(min(near, key=lambda position: (abs(position - edge), position), default=edge))
    return (*edges, sequence_length)


def _ids(tokens: Sequence[int] | Tensor) -> Sequence[int]:
    if isinstance(tokens, Tensor):
        if tokens.dim() != 1 or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
            raise TypeError(f"tokens must be integers [N], got {tokens.dtype} of shape {tuple(tokens.shape)}")
        listed: list[int] = tokens.tolist()
        return listed
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        raise TypeError(f"tokens must be a sequence of integer ids or a tensor [N], got {type(tokens).__name__}")
    return tokens if isinstance(tokens, (bytes, range)) else _integers("tokens must be integer ids", tokens)


def _breaking(token: int | Collection[int]) -> set[int]:
    if isinstance(token, int) and not isinstance(token, bool):
        return {token}
    expected = "token must be an integer or a collection of integers"
    if isinstance(token, (str, Tensor)) or not isinstance(token, Collection):
        raise TypeError(f"{expected}, got {token!r} of type {type(token).__name__}")
    return set(_integers(expected, token))


def _integers(expected: str, values: object) -> list[int]:
    """The values as a list; TypeError if one is not an integer. Tensors and arrays of integers are converted."""
    if hasattr(values, "tolist"):  # arrays of any library: numpy is no dependency
        values = values.tolist()
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{expected}, got {values!r} of type {type(values).__name__}")
    found = []
    for value in values:
        one = value.item() if type(value).__module__ == "numpy" and hasattr(value, "item") else value
        if isinstance(one, bool) or not isinstance(one, int):
            raise TypeError(f"{expected}, got {value!r} of type {type(value).__name__}")
        found.append(one)
    return found
