"""Dilated attention as Triton kernels: tiles of query (or key) rows that share a slab of keys (or queries)."""
