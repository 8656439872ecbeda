"""How long a call takes: features counted from pattern and workload, times seconds per unit of each."""

from __future__ import annotations

from collections.abc import Sequence

from dilated_attention_pytorch.patterns import Pattern

from .counts import GroupCounts, Tiling, count_groups, tiling
from .hardware import Hardware
from .workload import Workload

_BLOCKS = (32, 64, 256)
"""Queries that PyTorch's kernel for the CPU takes at once: the more, the longer the problem."""

_KEYS_AT_ONCE = 512
"""Keys that the kernel computes at once: a causal problem skips none but whole runs of them."""

FEATURES = (
    "calls", "kernel calls", *(f"pairs in blocks of {block}" for block in _BLOCKS),
    *(f"rows in blocks of {block}" for block in _BLOCKS), "exponentials", "rows merged", "rows",
)  # fmt: skip
"""What seconds are fitted to.

Pairs and rows are weighted by the width of a head, pairs by how evenly threads share them, and every pair has an
exponential beside its products. Every row of a group is read, packed and written, which costs more in small blocks; one
of a later group is merged into what is there; every row of the call is written for the first time.
"""

_CALL_SECONDS = 10e-6
"""Nominal time of one kernel call, beside its work."""


def features(pattern: Pattern, workload: Workload, hardware: Hardware) -> tuple[float, ...]:
    """The counts of :data:`FEATURES` for one call."""
    cut = tiling(pattern, workload)
    threads = hardware.processors if hardware.kind == "cpu" else 1
    pairs, computed = dict.fromkeys(_BLOCKS, 0.0), dict.fromkeys(_BLOCKS, 0.0)
    calls = exponentials = merged = 0.0
    times = workload.ratio * workload.batch_size
    for place, group in enumerate(count_groups(pattern, workload)):
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
        merged += group.rows * times * workload.head_dim if place else 0
    total = workload.sequence_length * workload.num_heads * workload.batch_size * workload.head_dim
    return (1.0, calls, *pairs.values(), *computed.values(), exponentials, merged, float(total))


def _causal_pairs(rows: int) -> float:
    """Pairs that the kernel computes of a causal problem: every run of keys that a block of queries sees some of."""
    runs, rest = divmod(rows, _KEYS_AT_ONCE)
    return _KEYS_AT_ONCE**2 * runs * (runs + 1) / 2 + rest * rows


def block_rows(rows: int) -> int:
    """Which of the blocks PyTorch's kernel for the CPU takes for a problem of that many rows."""
    small, middle, large = _BLOCKS
    return large if rows >= 768 else middle if rows >= 192 else small


def _problems_together(group: GroupCounts, cut: Tiling, workload: Workload) -> tuple[int, float]:
    """How many problems one kernel call computes, and how many kernel calls the group takes.

    A partial repeats along sequences, segments, heads of a run of offsets, such runs, and query heads that share keys;
    a kernel call takes the two longest of these axes, the others are looped over.
    """
    segments = max(1, cut.rows // group.segment_length)
    run = min(cut.heads, group.dilation_rate) if group.dilation_rate > 1 else cut.heads
    axes = sorted((cut.batch, segments, run, cut.heads // run, workload.ratio), reverse=True)
    together = axes[0] * axes[1]
    loops = axes[2] * axes[3] * axes[4] + (1 if cut.heads % run else 0)
    return together, cut.tiles * loops * (1 + bool(cut.rows % group.segment_length)) * (1 + workload.is_training)


def _imbalance(together: int, rows: int, block: int, threads: int, *, is_training: bool) -> float:
    """By how much the busiest thread has more than its share.

    Forward, threads share blocks of queries, backward whole problems: two and five of seven matrix products.
    """
    blocks = together * -(-rows // block)
    forward = -(-blocks // threads) * threads / blocks
    if not is_training:
        return forward
    return (2 * forward + 5 * -(-together // threads) * threads / together) / 7


def nominal_seconds(pattern: Pattern, workload: Workload, hardware: Hardware) -> float:
    """The formula for a machine that was not measured: operations, traffic and calls at nominal rates.

    ``flops / rate + bytes / bandwidth + 10 us x calls``. Traffic is every row of a group read and written once, and
    keys and values once more for every 128 queries where those of a problem do not stay in the cache.
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
    """The sum of the products."""
    return sum(seconds * count for seconds, count in zip(seconds_per_unit, counts, strict=True))
