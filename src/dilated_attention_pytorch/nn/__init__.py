"""Attention under patterns as modules."""

from .adaptive import AdaptiveBlockAttention, BlockScorer, BlockSelection
from .dilated_attention import DilatedAttention, PatternAttention
from .dynamic import DynamicDilatedAttention, DynamicMultiheadDilatedAttention
from .multihead import MultiheadDilatedAttention, MultiheadPatternAttention

__all__ = [
    "AdaptiveBlockAttention",
    "BlockScorer",
    "BlockSelection",
    "DilatedAttention",
    "DynamicDilatedAttention",
    "DynamicMultiheadDilatedAttention",
    "MultiheadDilatedAttention",
    "MultiheadPatternAttention",
    "PatternAttention",
]
