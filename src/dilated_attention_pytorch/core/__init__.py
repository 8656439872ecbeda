"""Attention modules made by a name and a configuration."""

from typing import Any

from dilated_attention_pytorch.legacy import look_up

from .config import (
    AdaptiveAttentionConfig,
    DilatedAttentionConfig,
    DistributedAttentionConfig,
    DynamicAttentionConfig,
    MultiheadConfig,
    RingAttentionConfig,
    SparseAttentionConfig,
)
from .makers import (
    create_adaptive_sparse_attention,
    create_block_sparse_attention,
    create_dilated_attention,
    create_multihead_dilated_attention,
    create_ring_attention,
)

__all__ = [
    "AdaptiveAttentionConfig",
    "DilatedAttentionConfig",
    "DistributedAttentionConfig",
    "DynamicAttentionConfig",
    "MultiheadConfig",
    "RingAttentionConfig",
    "SparseAttentionConfig",
    "create_adaptive_sparse_attention",
    "create_block_sparse_attention",
    "create_dilated_attention",
    "create_multihead_dilated_attention",
    "create_ring_attention",
]


def __getattr__(name: str) -> Any:
    return look_up("core", name)
