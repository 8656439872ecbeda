"""Attention under patterns as modules."""

from .adaptive import AdaptiveBlockAttention
from .dilated_attention import DilatedAttention, PatternAttention
from .dynamic import DynamicDilatedAttention, DynamicMultiheadDilatedAttention
from .linear import Linear
from .multihead import MultiheadDilatedAttention, MultiheadPatternAttention

__all__ = [
    "AdaptiveBlockAttention",
    "DilatedAttention",
    "DynamicDilatedAttention",
    "DynamicMultiheadDilatedAttention",
    "Linear",
    "MultiheadDilatedAttention",
    "MultiheadPatternAttention",
    "PatternAttention",
]
