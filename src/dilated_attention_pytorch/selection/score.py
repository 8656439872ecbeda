"""What a candidate is worth before time and memory: how much it spans, and at how many scales. Between 0 and 1."""

from __future__ import annotations

from dilated_attention_pytorch.patterns import Pattern

from .config import SegmentSelectionConfig
from .workload import Workload


def coverage(pattern: Pattern, workload: Workload) -> float:
    """The largest, over groups, of ``selected share x reach``.

    The reach of segment length w is the mean over positions of the length of the position's segment, as a part of the
    sequence: ``sum over segments of length^2 / N^2``. The selected share is the part of the positions that some
    key/value head selects: the number of different offsets over r. It is 1 where every position sees the whole
    sequence, through one head at least, at rate r.
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
    """The part of the octaves from the shortest to the longest allowed length that have a segment length.

    Lengths beyond the sequence count as its length; as many octaves as there may be lengths suffice.
    """
    length = workload.sequence_length

    def octave(segment_length: int) -> int:
        return min(segment_length, length).bit_length()

    octaves = octave(config.max_segment_size) - octave(config.min_segment_size) + 1
    found = {octave(group.segment_length) for group in pattern.groups}
    return min(1.0, len(found) / min(octaves, config.max_num_segments))
