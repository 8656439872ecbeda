"""Candidate patterns: progressions of segment lengths, aligned to the machine's tile size."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from dilated_attention_pytorch.patterns import DilatedPattern

from .config import SegmentSelectionConfig
from .workload import Workload


@functools.lru_cache(maxsize=64)
def candidates(config: SegmentSelectionConfig, workload: Workload, tile_rows: int) -> tuple[DilatedPattern, ...]:
    """All candidates for a workload, without duplicates, in a fixed order.

    From every base w_0 (the smallest length allowed, doubled repeatedly) three families are generated, truncated
    at every number of lengths: *geometric*, ``w_i = w_0 ratio^i`` for every ratio of the policy; *uniform*,
    ``w_i = (i + 1) w_0``; *powers of two*, ``w_i = 2^i w_0`` from the smallest power of two that the limits allow.
    Lengths are rounded to multiples of ``tile_rows``. A family ends with the first length that spans the sequence,
    reduced to the shortest such multiple. Rates follow the lengths, ``r_i = round(w_i / w_0)``, so that no group
    costs more per row than the previous one; in a second variant no rate exceeds the number of key/value heads, so
    that some head selects every position. The first rate is 1: every row attends to its neighbours.
    >>> import torch
    >>> workload = Workload(
    ...     sequence_length=1000, batch_size=1, num_heads=4, num_kv_heads=4, head_dim=64, dtype=torch.float32
    ... )
    >>> [pattern.segment_lengths for pattern in candidates(SegmentSelectionConfig(), workload, 128)][:3]
    [(512,), (512, 1024), (512, 768)]
    """
    found = {
        (lengths, rates): None
        for family in _families(config, workload.sequence_length, tile_rows)
        for lengths in (family[:count] for count in range(1, len(family) + 1))
        for rates in _rates(lengths, workload.num_kv_heads)
    }
    return tuple(
        DilatedPattern(
            lengths, rates, offset_rule=workload.offset_rule, tail=workload.tail, segment_shift=workload.segment_shift
        )
        for lengths, rates in found
    )


def _families(config: SegmentSelectionConfig, sequence_length: int, tile_rows: int) -> Iterator[tuple[int, ...]]:
    least, most = config.min_segment_size, config.max_segment_size
    base = _aligned(least, tile_rows, least, most)
    power = 1 << (least - 1).bit_length()
    bases = []
    while base <= most:
        bases.append(base)
        if base >= sequence_length:
            break
        base *= 2
    if power <= most:
        yield tuple(
            _cut((power << level for level in range(config.max_num_segments)), sequence_length, tile_rows, least, most)
        )
    for base in bases:
        for ratio in (2.0, *config.geometric_ratios):
            grown = (
                _aligned(round(base * ratio**level), tile_rows, least, most) for level in range(config.max_num_segments)
            )
            yield tuple(_cut(grown, sequence_length, tile_rows, least, most))
        steps = ((level + 1) * base for level in range(config.max_num_segments))
        yield tuple(_cut(steps, sequence_length, tile_rows, least, most))


def _cut(lengths: Iterator[int], sequence_length: int, tile_rows: int, least: int, most: int) -> Iterator[int]:
    """Increasing lengths up to the first that spans the sequence, at most ``most``."""
    before = 0
    for length in lengths:
        if length > most:
            return
        if length >= sequence_length:
            # All lengths that span the sequence are equivalent: use the shortest such multiple.
            length = min(length, max(least, -(-sequence_length // tile_rows) * tile_rows))
        if length > before:
            yield length
        before = length
        if length >= sequence_length:
            return


def _aligned(length: int, tile_rows: int, least: int, most: int) -> int:
    """The nearest multiple of ``tile_rows`` within the limits; the length itself if there is none."""
    near = max(1, round(length / tile_rows)) * tile_rows
    for multiple in (near, near + tile_rows, near - tile_rows):
        if least <= multiple <= most:
            return multiple
    return length


def _rates(lengths: tuple[int, ...], num_kv_heads: int) -> Iterator[tuple[int, ...]]:
    free = tuple(max(1, round(length / lengths[0])) for length in lengths)
    yield free
    yield tuple(min(rate, num_kv_heads) for rate in free)
