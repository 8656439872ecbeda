"""Multi-scale dilated attention in PyTorch, exact in forward and gradient."""

import os
import sys
from typing import TYPE_CHECKING, Any

from .waiting import choose_waiting

# How threads wait is settled when torch is imported, which everything below does.
choose_waiting(os.environ, sys.orig_argv)

from . import legacy
from .models import LongNetCache, LongNetConfig, LongNetLM, generate
from .nn import (
    AdaptiveBlockAttention,
    DilatedAttention,
    DynamicDilatedAttention,
    DynamicMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    MultiheadPatternAttention,
    PatternAttention,
)
from .ops import AttentionOutput, attend, attend_with_lse, dilated_attention, merge
from .patterns import (
    DilatedPattern,
    Pattern,
    PatternSum,
    SegmentedPattern,
    from_block_mask,
    global_tokens,
    hierarchical,
    local_window,
    per_head,
    random_blocks,
    strided_blocks,
)
from .selection import DynamicSegmentSelector, SegmentSelectionConfig

if TYPE_CHECKING:
    from .models import LongNetForCausalLM as LongNetForCausalLM

# What `import *` brings needs torch alone, so LongNetForCausalLM, which needs transformers, is asked for by its name.
__all__ = [
    "AdaptiveBlockAttention",
    "AttentionOutput",
    "DilatedAttention",
    "DilatedPattern",
    "DynamicDilatedAttention",
    "DynamicMultiheadDilatedAttention",
    "DynamicSegmentSelector",
    "LongNetCache",
    "LongNetConfig",
    "LongNetLM",
    "MultiheadDilatedAttention",
    "MultiheadPatternAttention",
    "Pattern",
    "PatternAttention",
    "PatternSum",
    "SegmentSelectionConfig",
    "SegmentedPattern",
    "attend",
    "attend_with_lse",
    "dilated_attention",
    "from_block_mask",
    "generate",
    "global_tokens",
    "hierarchical",
    "local_window",
    "merge",
    "per_head",
    "random_blocks",
    "strided_blocks",
]

legacy.install()


def __getattr__(name: str) -> Any:
    if name == "LongNetForCausalLM":  # needs transformers, so it is loaded on first use
        from .models import LongNetForCausalLM

        return LongNetForCausalLM
    return legacy.look_up("", name)
