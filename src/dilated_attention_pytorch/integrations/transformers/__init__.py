"""Attention under a pattern inside models of transformers, as ``attn_implementation="dilated"``."""

from .bounded import BoundedCache
from .extension import extend_context
from .pattern import set_pattern
from .registration import register

__all__ = ["BoundedCache", "extend_context", "register", "set_pattern"]
