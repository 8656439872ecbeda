"""Attention of this library inside models that people already have."""

from .multihead_replacement import MultiheadReplacement
from .qkv_replacement import QkvReplacement
from .replacement import LeftLayer, ReplacedLayer, ReplacementReport, replace_attention
from .sparse_models import replace_sparse_attention
from .torchscale import AdoptedDilatedAttention, adopt
from .transformers import BoundedCache, extend_context, register, set_pattern

__all__ = [
    "AdoptedDilatedAttention",
    "BoundedCache",
    "LeftLayer",
    "MultiheadReplacement",
    "QkvReplacement",
    "ReplacedLayer",
    "ReplacementReport",
    "adopt",
    "extend_context",
    "register",
    "replace_attention",
    "replace_sparse_attention",
    "set_pattern",
]
