"""What attention takes by itself in a layer of a step, beside its operands and results, on a CPU."""

from __future__ import annotations

import torch

from dilated_attention_pytorch.planning import tile_size

from .autocast import computing_dtype
from .settings import TrainSettings


def attention_bytes(settings: TrainSettings) -> dict[str, int]:
    """Bytes by operation, "attend" and "attend_backward", of the kernels of this package for the CPU.

    In low precision a tile has accumulators in float32: of its output, or of its three gradients. The backward pass
    has a copy of the log-sum-exp. What the threads have is small beside that and is not counted.
    """
    model = settings.model
    assert model.num_kv_heads is not None
    rows, head_dim = settings.batch_size * settings.context_length, model.embed_dim // model.num_heads
    lse = 4 * rows * model.num_heads
    if computing_dtype(settings.precision) == torch.float32:
        return {"attend": 0, "attend_backward": lse}
    of_tile = min(rows * model.num_heads, _tile(settings, rows * model.num_heads, head_dim))
    accumulator = 4 * of_tile * head_dim
    keys = 2 * accumulator * model.num_kv_heads // model.num_heads
    return {"attend": accumulator, "attend_backward": lse + accumulator + keys}


def _tile(settings: TrainSettings, num_rows: int, head_dim: int) -> int:
    """Rows times heads of a tile: at least the longest segment of one key/value head, which is never cut."""
    model = settings.model
    assert model.num_kv_heads is not None
    groups = [group for pattern in model.different_patterns for group in pattern.groups]
    longest = min(max((group.segment_length for group in groups), default=1), settings.context_length)
    longest = longest * model.num_heads // model.num_kv_heads
    return max(longest, tile_size(num_rows, head_dim, torch.bfloat16.itemsize))
