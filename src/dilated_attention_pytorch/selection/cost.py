"""Seconds of a call, from counted features and their rates."""

from __future__ import annotations

from collections.abc import Sequence

from dilated_attention_pytorch.estimate.workload import Workload
from dilated_attention_pytorch.patterns import Pattern

from .hardware import Hardware

FEATURES = ("kernel calls", "classes", "operations", "pairs", "bytes")
"""Features of the time model, for one call under a pattern.

A group takes a kernel call forward and one backward. A class (the selected rows of a segment for a head) has a fixed
cost. Operations are those of the matrix products; every pair also has an exponential. Bytes are those of query, key,
value and output of the selected rows, read or written once forward and twice backward.
"""

_CALL_SECONDS = 10e-6
"""Nominal overhead of one kernel call in seconds."""


def features(pattern: Pattern, workload: Workload) -> tuple[float, ...]:
    """The values of :data:`FEATURES` for one call.

    >>> import torch
    >>> from dilated_attention_pytorch import DilatedPattern
    >>> workload = Workload(
    ...     sequence_length=8192, batch_size=1, num_heads=1, num_kv_heads=1, head_dim=64, dtype=torch.float32
    ... )
    >>> pairs = features(DilatedPattern([2048, 4096], [1, 2]), workload)[FEATURES.index("pairs")]
    >>> pairs == 4 * 2048**2 + 2 * 2048**2
    True
    """
    length, heads = workload.sequence_length, workload.num_kv_heads
    times, passes = workload.ratio * workload.batch_size, 3 if workload.is_training else 1
    sizes = [
        size for group in pattern.groups for head in range(heads) for size in group.class_sizes(head, heads, length)
    ]
    classes = sum(count for selected, count in sizes if selected) * times
    rows = sum(selected * count for selected, count in sizes) * times
    operations = pattern.flops(
        length,
        num_heads=workload.num_heads,
        num_kv_heads=heads,
        head_dim=workload.head_dim,
        batch_size=workload.batch_size,
        is_causal=workload.is_causal,
        is_training=workload.is_training,
    )
    return (
        float((1 + workload.is_training) * len(pattern.groups)),
        float(classes),
        float(operations),
        float(pattern.num_pairs(length, num_kv_heads=heads, is_causal=workload.is_causal) * times),
        float(rows * workload.head_dim * workload.itemsize * 4 * passes),
    )


def nominal_rates(workload: Workload, hardware: Hardware) -> tuple[float, ...]:
    """The formula, for a machine that was not measured: seconds per unit of every feature.

    ``10 us x kernel calls + operations / rate + bytes / bandwidth``, at the data sheet's rates.
    """
    is_16 = workload.itemsize == 2
    rate = hardware.flops_16 if is_16 else hardware.flops_32 / (workload.itemsize // 4)
    return (_CALL_SECONDS, 0.0, 1 / rate, 0.0, 1 / hardware.bytes_per_second)


def weighted(seconds_per_unit: Sequence[float], counts: Sequence[float]) -> float:
    """The dot product: seconds of a call with these features."""
    return sum(seconds * count for seconds, count in zip(seconds_per_unit, counts, strict=True))
