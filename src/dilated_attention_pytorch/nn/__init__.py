"""Attention under patterns as modules."""

from .adaptive import AdaptiveBlockAttention
from .dilated_attention import DilatedAttention, PatternAttention
from .dynamic import DynamicDilatedAttention, DynamicMultiheadDilatedAttention
from .multihead import MultiheadDilatedAttention, MultiheadPatternAttention

__all__ = [
    "AdaptiveBlockAttention",
    "DilatedAttention",
    "DynamicDilatedAttention",
    "DynamicMultiheadDilatedAttention",
    "MultiheadDilatedAttention",
    "MultiheadPatternAttention",
    "PatternAttention",
]
