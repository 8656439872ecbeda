"""Memory that one call of attention allocates on a CPU beside its operands and results, from the call's own plan."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from dilated_attention_pytorch.kernels import native
from dilated_attention_pytorch.ops.call import Call
from dilated_attention_pytorch.ops.operators import call_of
from dilated_attention_pytorch.ops.tiles import tiles_of
from dilated_attention_pytorch.planning.geometry import Partial
from dilated_attention_pytorch.training.attention_bytes import packed_bytes


def own_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes that an operator of this package allocates in the forward pass.

    Counts keys and values that the native kernels pack, copies with padded keys set to zero, and float32 accumulators
    of a tile in low precision. The kernels of other implementations are not counted.

    Args:
        func: ``attend`` of either operator library; for any other operator the result is 0.
        args: its operands, which may be fake tensors.
    """
    if func._opname != "attend":
        return 0
    return _of_partial(*args) if func.namespace == "dilated_attention_native" else _of_call(call_of(*args))


def _of_partial(query: Tensor, *rest: Any) -> int:
    """Bytes of :func:`.kernels.native.merge_partial`, whose keys come from outside the call."""
    ratio, (sequences, _, _, num_queries, num_keys, *_), heads, axes = rest[5:9]
    if num_queries * ratio <= native.ROWS_OF_STREAM:
        return 0  # with so few queries, keys are read in place
    domains = sequences * len(heads) * math.prod(axes[::4])
    return packed_bytes(num_keys, domains, query.shape[3], query.dtype)


def _of_call(call: Call) -> int:
    """Bytes of a call under a pattern."""
    # With padded keys, keys and values are copied with zeros in place of them.
    copied = 0 if call.key_padding_mask is None else call.key.nbytes + call.value.nbytes
    if not call.impl.is_in_place:
        return copied
    with unset_fake_temporarily(), _disable_current_modes():  # a plan is computed from real integers
        return copied + _of_tiles(call._replace(cu_seqlens=None))


def _of_tiles(call: Call) -> int:
    (tiles, batch_step), query, most = tiles_of(call), call.query, 0
    head_dim, sequences = query.shape[3], min(batch_step, query.shape[0])
    for tile in tiles:
        packed = 0
        for partial in tile.partials:
            if isinstance(partial, Partial):
                domains = sequences * partial.num_problems
                packed = max(packed, packed_bytes(partial.num_keys, domains, head_dim, query.dtype))
        first, last = tile.query_rows
        rows = sequences * (last - first) * (tile.kv_heads[1] - tile.kv_heads[0]) * call.ratio
        is_written_once = all(partial.is_first and native.is_written_once(partial) for partial in tile.partials)
        has_accumulator = query.dtype != call.dtype and not is_written_once
        most = max(most, packed + has_accumulator * rows * head_dim * call.dtype.itemsize)
    return most
