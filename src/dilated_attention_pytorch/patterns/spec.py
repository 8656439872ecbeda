"""The parser of pattern specs."""

from __future__ import annotations

import functools
import json

from .blocks import block_pattern_from_entry
from .dilated import DilatedPattern, SegmentedPattern
from .pattern import Pattern, PatternSum


@functools.lru_cache(maxsize=64)
def pattern_from_spec(spec: str) -> Pattern:
    """The pattern with this :attr:`Pattern.spec`."""
    patterns: list[Pattern] = []
    for entry in json.loads(spec):
        if entry[0] == "segments":
            _, boundaries, rates, rule, *heads = entry
            segmented = SegmentedPattern(boundaries, rates, offset_rule=rule)
            patterns.append(segmented.for_heads(*heads) if heads else segmented)
            continue
        if isinstance(entry[0][0], str):
            patterns.append(block_pattern_from_entry(entry))
            continue
        lengths, rates, shifts, rule, tail, *heads = entry
        pattern = DilatedPattern(lengths, rates, offset_rule=rule, tail=tail, segment_shift=shifts)
        patterns.append(pattern.for_heads(*heads) if heads else pattern)
    return patterns[0] if len(patterns) == 1 else PatternSum(tuple(patterns))
