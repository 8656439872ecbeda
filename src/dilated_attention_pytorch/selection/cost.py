"""The time model: features counted from pattern and workload, times seconds per unit."""

from __future__ import annotations

from collections.abc import Sequence

from dilated_attention_pytorch.patterns import Pattern

from .counts import GroupCounts, Tiling, count_groups, tiling
from .hardware import Hardware
from .workload import Workload

_BLOCKS = (32, 64, 256)
"""Query block sizes of PyTorch's CPU kernel: larger for longer problems."""

_KEYS_AT_ONCE = 512
"""Keys per block of the kernel; causal problems skip only whole blocks."""

FEATURES = (
    "calls",
    "kernel calls",
    *(f"pairs in blocks of {block}" for block in _BLOCKS),
    *(f"rows in blocks of {block}" for block in _BLOCKS),
    "exponentials",
    "rows merged",
    "rows",
)
"""Features of the time model.

Pairs and rows are weighted by the head dimension, pairs also by the load imbalance of the threads; every pair has an
exponential besides its products. Every row of a group is read, packed and written, which costs more in small blocks;
rows of later groups are merged into the existing output; every row of the call is initialised once.
"""

_CALL_SECONDS = 10e-6
"""Nominal overhead of one kernel call in seconds."""


def features(pattern: Pattern, workload: Workload, hardware: Hardware) -> tuple[float, ...]:
    """The values of :data:`FEATURES` for one call."""
    cut = tiling(pattern, workload)
    threads = hardware.processors if hardware.kind == "cpu" else 1
    pairs, computed = dict.fromkeys(_BLOCKS, 0.0), dict.fromkeys(_BLOCKS, 0.0)
    calls = exponentials = merged = 0.0
    times = workload.ratio * workload.batch_size
    for index, group in enumerate(count_groups(pattern, workload)):
        together, of_group = _problems_together(group, cut, workload)
        calls += of_group
        for rows, count in group.sizes:
            block = block_rows(rows)
            of_size = (_causal_pairs(rows) if workload.is_causal else rows * rows) * count * times
            exponentials += of_size
            computed[block] += rows * count * times * workload.head_dim
            pairs[block] += (
                workload.head_dim
                * of_size
                * _imbalance(together, rows, block, threads, is_training=workload.is_training)
            )
        merged += group.rows * times * workload.head_dim if index else 0
    total = workload.sequence_length * workload.num_heads * workload.batch_size * workload.head_dim
    return (1.0, calls, *pairs.values(), *computed.values(), exponentials, merged, float(total))


def _causal_pairs(rows: int) -> float:
    """Pairs that the kernel computes for a causal problem: whole key blocks that contain a visible key."""
    runs, rest = divmod(rows, _KEYS_AT_ONCE)
    return _KEYS_AT_ONCE**2 * runs * (runs + 1) / 2 + rest * rows


def block_rows(rows: int) -> int:
    """Query block size of PyTorch's CPU kernel for a problem of ``rows`` rows."""
    small, middle, large = _BLOCKS
    return large if rows >= 768 else middle if rows >= 192 else small


def _problems_together(group: GroupCounts, cut: Tiling, workload: Workload) -> tuple[int, float]:
    """Number of problems per kernel call, and number of kernel calls of the group.

    A partial repeats along sequences, segments, heads of a run of offsets, such runs, and query heads that share keys;
    a kernel call covers the two longest of these axes, the others are loops.
    """
    segments = max(1, cut.rows // group.segment_length)
    run = min(cut.heads, group.dilation_rate) if group.dilation_rate > 1 else cut.heads
    axes = sorted((cut.batch, segments, run, cut.heads // run, workload.ratio), reverse=True)
    together = axes[0] * axes[1]
    loops = axes[2] * axes[3] * axes[4] + (1 if cut.heads % run else 0)
    return together, cut.tiles * loops * (1 + bool(cut.rows % group.segment_length)) * (1 + workload.is_training)


def _imbalance(together: int, rows: int, block: int, threads: int, *, is_training: bool) -> float:
    """Load of the busiest thread relative to the mean.

    Threads share query blocks in the forward pass and whole problems in the backward pass: two and five of the seven
    matrix products.
    """
    blocks = together * -(-rows // block)
    forward = -(-blocks // threads) * threads / blocks
    if not is_training:
        return forward
    return (2 * forward + 5 * -(-together // threads) * threads / together) / 7


def nominal_seconds(pattern: Pattern, workload: Workload, hardware: Hardware) -> float:
    """Time estimate for a machine that was not measured, from operations, traffic and calls at nominal rates.

    ``flops / rate + bytes / bandwidth + 10 us x calls``. Traffic: every row of a group is read and written once, and
    keys and values are re-read for every 128 queries if those of a problem exceed the cache.
    """
    if workload.dtype_name in ("float16", "bfloat16"):
        rate = hardware.flops_16
    else:
        rate = hardware.flops_32 / (workload.itemsize // 4)
    cut = tiling(pattern, workload)
    passes, products = (3.0, 14) if workload.is_training else (1.0, 4)
    operations = traffic = calls = 0.0
    row = workload.head_dim * workload.itemsize
    times = workload.ratio * workload.batch_size
    for group in count_groups(pattern, workload):
        calls += _problems_together(group, cut, workload)[1]
        for rows, count in group.sizes:
            pairs = rows * (rows + 1) / 2 if workload.is_causal else rows * rows
            operations += pairs * count * times * workload.head_dim * products
            reads = 1 if 2 * rows * row <= hardware.cache_bytes else -(-rows // 128)
            traffic += rows * count * times * row * passes * (4 + 2 * (reads - 1))
    return operations / rate + traffic / hardware.bytes_per_second + calls * _CALL_SECONDS


def weighted(seconds_per_unit: Sequence[float], counts: Sequence[float]) -> float:
    """The dot product."""
    return sum(seconds * count for seconds, count in zip(seconds_per_unit, counts, strict=True))
