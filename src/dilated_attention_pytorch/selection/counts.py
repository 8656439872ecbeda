"""Counts of problems, pairs, rows and tiles of a pattern for a workload, computed without a plan."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.patterns.dilated import DilationGroup
from dilated_attention_pytorch.planning.plan import tile_size

from .workload import Workload


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """The dense problems of one dilation group, for one sequence of the batch."""

    dilation_rate: int
    segment_length: int
    sizes: tuple[tuple[int, int], ...]
    """Pairs (rows n, number of problems with n queries and n keys), over all key/value heads."""

    @property
    def rows(self) -> int:
        """Number of selected rows, over all key/value heads."""
        return sum(rows * count for rows, count in self.sizes)


def count_group(group: DilationGroup, workload: Workload) -> GroupCounts:
    """The problems of one group: segments of every key/value head, by their number of selected rows."""
    length, heads = workload.sequence_length, workload.num_kv_heads
    sizes: Counter[int] = Counter()
    of_class = Counter((group.offset(head, heads), group.shift(head)) for head in range(heads))
    for (offset, shift), multiplicity in of_class.items():
        start, first_stop = group.segment_bounds(0, shift)
        whole = max(0, length - first_stop) // group.segment_length
        last_start = first_stop + whole * group.segment_length
        parts = [(start, 0, min(first_stop, length), 1)]
        if whole:
            parts.append((first_stop, first_stop, first_stop + group.segment_length, whole))
        if last_start < length:
            parts.append((last_start, last_start, length, 1))
        for segment, begin, end, times in parts:
            sizes[group.selected(segment, offset, begin, end)[1]] += times * multiplicity
    return GroupCounts(
        group.dilation_rate, group.segment_length, tuple(sorted((n, count) for n, count in sizes.items() if n))
    )


def count_groups(pattern: Pattern, workload: Workload) -> tuple[GroupCounts, ...]:
    """The groups in the engine's order: smallest dilation rate first."""
    groups = sorted(pattern.groups, key=lambda group: group.dilation_rate)
    return tuple(count_group(group, workload) for group in groups)


def num_pairs(pattern: Pattern, workload: Workload) -> int:
    """Number of query-key pairs over groups, query heads and batch; equals ``planning.plan(...).num_pairs``.

    >>> import torch
    >>> from dilated_attention_pytorch import DilatedPattern
    >>> workload = Workload(
    ...     sequence_length=8192, batch_size=1, num_heads=1, num_kv_heads=1, head_dim=64, dtype=torch.float32
    ... )
    >>> num_pairs(DilatedPattern([2048, 4096], [1, 2]), workload)  # 4 x 2048 x 2048 and 2 x 2048 x 2048
    25165824
    """
    pairs = 0
    for group in count_groups(pattern, workload):
        for rows, count in group.sizes:
            pairs += count * (rows * (rows + 1) // 2 if workload.is_causal else rows * rows)
    return pairs * workload.ratio * workload.batch_size


def flops(pattern: Pattern, workload: Workload) -> int:
    """Operations of the matrix products: 4 D per pair forward, 10 D more backward, as ``FlopCounterMode`` counts."""
    return pattern.flops(
        workload.sequence_length,
        num_heads=workload.num_heads,
        num_kv_heads=workload.num_kv_heads,
        head_dim=workload.head_dim,
        batch_size=workload.batch_size,
        is_causal=workload.is_causal,
        is_training=workload.is_training,
    )


@dataclass(frozen=True, slots=True)
class Tiling:
    """The engine's tiling of a call: rows, key/value heads and sequences per tile, and the number of tiles."""

    rows: int
    heads: int
    batch: int
    tiles: int
    elements: int
    """Maximum number of query elements per tile."""


def tiling(pattern: Pattern, workload: Workload) -> Tiling:
    """Bounds on the tiles of :func:`dilated_attention_pytorch.planning.plan.plan`, from the segment lengths alone.

    A tile is closed under the pattern: its rows end at boundaries common to all groups, multiples of the least
    common multiple of the lengths, or at the end of the sequence.
    """
    length, ratio, heads = workload.sequence_length, workload.ratio, workload.num_kv_heads
    num_rows = length * workload.num_heads * workload.batch_size
    size = tile_size(num_rows, workload.head_dim, workload.itemsize)
    closed = math.lcm(*(group.segment_length for group in pattern.groups))
    lattices = {group.shift(head) for group in pattern.groups for head in range(heads)}
    if lattices != {0}:
        closed = length
    closed = min(length, closed)
    most_rows = max(1, size // (ratio * heads))
    rows = min(length, max(closed, most_rows // closed * closed))
    of_tile = min(heads, max(1, size // (rows * ratio)))
    batch = max(1, min(workload.batch_size, size // (length * ratio * heads)))
    tiles = -(-length // rows) * -(-heads // of_tile) * -(-workload.batch_size // batch)
    largest = max(size, closed * ratio)
    elements = min(largest, length * workload.num_heads * workload.batch_size) * workload.head_dim
    return Tiling(rows, of_tile, batch, tiles, elements)
