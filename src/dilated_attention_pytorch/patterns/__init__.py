"""What attends to what: frozen, hashable, integers only."""

from .blocks import (
    BlockPattern,
    HeadRule,
    from_block_mask,
    global_tokens,
    hierarchical,
    local_window,
    per_head,
    random_blocks,
    strided_blocks,
)
from .dilated import DilatedPattern, DilationGroup, OffsetRule, SegmentedPattern, Tail
from .expression import pattern_from_expression
from .mixing import shifted_right, splitmix64
from .pattern import Pattern, PatternSum
from .rules import NO_END, Range, Spans, num_pairs
from .spec import pattern_from_spec

__all__ = [
    "NO_END",
    "BlockPattern",
    "DilatedPattern",
    "DilationGroup",
    "HeadRule",
    "OffsetRule",
    "Pattern",
    "PatternSum",
    "Range",
    "SegmentedPattern",
    "Spans",
    "Tail",
    "from_block_mask",
    "global_tokens",
    "hierarchical",
    "local_window",
    "num_pairs",
    "pattern_from_expression",
    "pattern_from_spec",
    "per_head",
    "random_blocks",
    "shifted_right",
    "splitmix64",
    "strided_blocks",
]
