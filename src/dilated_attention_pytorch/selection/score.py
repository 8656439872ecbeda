"""The quality score of a candidate apart from time and memory: coverage and diversity, between 0 and 1."""

from __future__ import annotations

from dilated_attention_pytorch.patterns import Pattern

from .config import SegmentSelectionConfig
from .workload import Workload


def coverage(pattern: Pattern, workload: Workload) -> float:
    """The maximum over groups of ``selected fraction x reach``.

    The reach of segment length w is the mean over positions of the position's segment length relative to the
    sequence: ``sum over segments of length^2 / N^2``. The selected fraction is that of the positions selected by any
    key/value head: the number of distinct offsets over r. Coverage is 1 if every position attends to the whole
    sequence, in at least one head, at rate r.
    """
    length, heads = workload.sequence_length, workload.num_kv_heads
    best = 0.0
    for group in pattern.groups:
        whole, tail = divmod(length, min(group.segment_length, length))
        reach = (whole * min(group.segment_length, length) ** 2 + tail**2) / length**2
        offsets = {group.offset(head, heads) for head in range(heads)}
        best = max(best, len(offsets) / group.dilation_rate * reach)
    return best


def diversity(pattern: Pattern, workload: Workload, config: SegmentSelectionConfig) -> float:
    """Fraction of the octaves between the shortest and longest allowed length that contain a segment length.

    Lengths beyond the sequence count as its length; the number of octaves is capped at the allowed number of lengths.
    """
    length = workload.sequence_length

    def octave(segment_length: int) -> int:
        return min(segment_length, length).bit_length()

    octaves = octave(config.max_segment_size) - octave(config.min_segment_size) + 1
    found = {octave(group.segment_length) for group in pattern.groups}
    return min(1.0, len(found) / min(octaves, config.max_num_segments))
