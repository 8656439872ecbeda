"""Attention modules by name."""

from typing import Any

from dilated_attention_pytorch.legacy import look_up

from .factories import (
    create_adaptive_sparse_attention,
    create_block_sparse_attention,
    create_dilated_attention,
    create_multihead_dilated_attention,
    create_ring_attention,
)

__all__ = [
    "create_adaptive_sparse_attention",
    "create_block_sparse_attention",
    "create_dilated_attention",
    "create_multihead_dilated_attention",
    "create_ring_attention",
]


def __getattr__(name: str) -> Any:
    return look_up("core", name)
