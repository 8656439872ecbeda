"""Dilated attention as modules."""

from .dilated_attention import DilatedAttention
from .multihead import MultiheadDilatedAttention

__all__ = ["DilatedAttention", "MultiheadDilatedAttention"]
