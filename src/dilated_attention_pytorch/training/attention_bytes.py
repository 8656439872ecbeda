"""Temporary memory of attention in a layer of a training step, on a CPU."""

from __future__ import annotations

import math

import torch

from dilated_attention_pytorch.kernels.native import factor_dtype
from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.planning.plan import tile_size

from .autocast import computing_dtype
from .settings import TrainSettings

_KEYS_OF_WINDOW, _KEYS_OF_BLOCK, _ALIGNMENT = 8192, 256, 16
_PACKED_BYTES = 1 << 24
_ROWS_OF_CHUNK = 4096
"""Same values as in ``csrc/forward.cpp`` and ``csrc/backward.cpp``."""


def packed_bytes(num_keys: int, num_domains: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that the forward kernel packs for keys and values of a partial: a window of as many domains as fit.

    At most 16 MiB, or one domain's window of 8,192 keys if that is more.

    >>> packed_bytes(4096, 100, 64, torch.float32) == 2**24
    True
    """
    if not num_keys or not num_domains:
        return 0
    of_block = min(max(-(-num_keys // _ALIGNMENT), 1) * _ALIGNMENT, _KEYS_OF_BLOCK)
    blocks = -(-min(num_keys, _KEYS_OF_WINDOW) // of_block)
    of_domain = blocks * of_block * 2 * head_dim * factor_dtype(dtype).itemsize
    return of_domain * min(max(_PACKED_BYTES // of_domain, 1), num_domains)


def attention_bytes(settings: TrainSettings) -> dict[str, int]:
    """Temporary bytes by operation, "attend" and "attend_backward", of the package's CPU kernels.

    In low precision, a tile has float32 accumulators of its output, or of its three gradients. The forward pass packs
    keys and values (:func:`packed_bytes`). The backward pass copies the log-sum-exp, and every thread packs the queries
    of a chunk and holds their gradients. Memory of a thread for a single tile is small and not counted.
    """
    model = settings.model
    assert model.num_kv_heads is not None
    found: dict[str, int] = {}
    for pattern in model.different_patterns:
        of_pattern = tile_bytes(
            pattern,
            settings.context_length,
            settings.batch_size,
            model.num_heads,
            model.num_kv_heads,
            model.embed_dim // model.num_heads,
            settings.precision,
            threads=max(1, settings.threads),
        )
        found = {name: max(size, found.get(name, 0)) for name, size in of_pattern.items()}
    return found


def tile_bytes(
    pattern: Pattern,
    length: int,
    batch_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    precision: str,
    *,
    threads: int = 1,
) -> dict[str, int]:
    """:func:`attention_bytes` for a layer with one pattern and sequences of ``length`` tokens."""
    rows = batch_size * length
    lse, dtype = 4 * rows * num_heads, computing_dtype(precision)
    packed = of_threads = 0
    for most_keys, domains in _domains(pattern, length, batch_size * num_kv_heads):
        packed = max(packed, packed_bytes(most_keys, domains, head_dim, dtype))
        chunk = min(most_keys * num_heads // num_kv_heads, _ROWS_OF_CHUNK)
        # Queries and gradients of the output, each transposed and not, and the gradient of the queries.
        of_threads = max(of_threads, min(threads, domains) * chunk * head_dim * (4 * factor_dtype(dtype).itemsize + 4))
    if dtype == torch.float32:
        return {"attend": packed, "attend_backward": lse + of_threads}
    # At least the longest segment of one key/value head, which is never split.
    longest = min(max((group.segment_length for group in pattern.groups), default=1), length)
    of_tile = max(longest * num_heads // num_kv_heads, tile_size(rows * num_heads, head_dim, torch.bfloat16.itemsize))
    accumulator = 4 * min(rows * num_heads, of_tile) * head_dim
    keys = 2 * accumulator * num_kv_heads // num_heads
    return {"attend": accumulator + packed, "attend_backward": lse + accumulator + keys + of_threads}


def _domains(pattern: Pattern, length: int, of_batch: int) -> list[tuple[int, int]]:
    """For every group and rule: the maximum number of keys per domain, and of domains per batch."""
    found = [
        (
            math.ceil(min(group.segment_length, length) / group.dilation_rate),
            of_batch * -(-length // group.segment_length),
        )
        for group in pattern.groups
    ]
    return [*found, *((length, of_batch) for _ in pattern.rules)]
