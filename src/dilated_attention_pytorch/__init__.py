"""Multi-scale dilated attention in PyTorch, exact in forward and gradient."""

from .nn import DilatedAttention, MultiheadDilatedAttention
from .ops import AttentionOutput, attend, attend_with_lse, dilated_attention, merge
from .patterns import DilatedPattern, Pattern, PatternSum

__all__ = [
    "AttentionOutput",
    "DilatedAttention",
    "DilatedPattern",
    "MultiheadDilatedAttention",
    "Pattern",
    "PatternSum",
    "attend",
    "attend_with_lse",
    "dilated_attention",
    "merge",
]
