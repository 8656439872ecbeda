"""The sparse attention of Longformer, BigBird and their relatives in transformers, computed by this package."""

from .replacement import replace_sparse_attention

__all__ = ["replace_sparse_attention"]
