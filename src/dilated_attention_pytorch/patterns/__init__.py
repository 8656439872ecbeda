"""What attends to what: frozen, hashable, integers only."""

from .blocks import (
    from_block_mask,
    global_tokens,
    hierarchical,
    local_window,
    per_head,
    random_blocks,
    strided_blocks,
)
from .dilated import DilatedPattern, SegmentedPattern
from .expression import pattern_from_expression
from .pattern import Pattern, PatternSum
from .reach import Reach
from .spec import pattern_from_spec

__all__ = [
    "DilatedPattern",
    "Pattern",
    "PatternSum",
    "Reach",
    "SegmentedPattern",
    "from_block_mask",
    "global_tokens",
    "hierarchical",
    "local_window",
    "pattern_from_expression",
    "pattern_from_spec",
    "per_head",
    "random_blocks",
    "strided_blocks",
]
