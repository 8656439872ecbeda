"""The cost of a call: seconds from counted features and their rates, and an upper bound of the peak memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.planning.plan import tile_size

from .hardware import Hardware
from .workload import Workload

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


_SCRATCH_OF_A_THREAD = 8 << 20
"""Scratch bytes per thread: score blocks and sums; with matrix products, two blocks of half a million scores."""
_NATIVE_BYTES_OF_A_COLUMN = 144 << 10
"""Scratch bytes per thread and column of a head in the native kernels: 4,096 packed query rows, their gradients, and
partial sums where keys are split over threads."""
_NATIVE_PACKED = 32 << 20
"""Bytes of packed keys in the native kernels."""
_BLOCK_SCORES = 1 << 21
"""Scores per block with dropout (``kernels/products.py``)."""
_BLOCK_BYTES = 96
"""Bytes per score of such a block: scores, products, factors, and 64-bit random numbers."""
_KEPT = 2
"""Factor for temporaries: freed pages that the C library retains count as used."""
_LIBRARY = 192 << 20
"""Bytes that PyTorch loads and compiles at the first call of a process: 83 to 145 MiB were measured on a CPU."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """Memory of one call by category, in bytes."""

    operands: int
    """Query, key and value, and the gradient of the output."""
    results: int
    """Output, log-sum-exp, and the gradients."""
    temporaries: int
    """All temporaries."""
    library: int
    """One-time allocations of the first call of a process."""

    @property
    def total(self) -> int:
        """The sum: the bound of the peak."""
        return self.operands + self.results + self.temporaries + self.library


def peak_bytes(pattern: Pattern, workload: Workload, hardware: Hardware) -> Bytes:
    """Upper bound of the peak memory of one call, operands included, for every implementation except "reference".

    With E_q = B N H D and E_k = B N G D elements of i bytes, R = B N H rows and a bytes of an accumulator: operands
    ``(E_q + 2 E_k) i`` (and E_q i for the gradient of the output), results ``E_q i + R a`` (and the gradients
    ``(E_q + 2 E_k) i``), temporaries per element of the largest tile, which grows with segments that span everything.
    Copies of non-contiguous operands and of autocast are not counted.
    """
    i, a = workload.itemsize, workload.accumulation_itemsize
    rows = workload.batch_size * workload.sequence_length
    query, key = rows * workload.num_heads * workload.head_dim, rows * workload.num_kv_heads * workload.head_dim
    lse = rows * workload.num_heads * a
    operands = (query + 2 * key) * i
    results = query * i + lse
    if workload.is_training:
        operands += query * i
        results += (query + 2 * key) * i
    tile = tile_elements(pattern, workload)
    temporaries = _KEPT * (tile * _bytes_of_an_element(workload) + 6 * tile // workload.head_dim * a)
    if hardware.kind == "cpu":
        of_thread = _SCRATCH_OF_A_THREAD + _NATIVE_BYTES_OF_A_COLUMN * workload.head_dim * workload.is_training
        temporaries += of_thread * hardware.processors + _NATIVE_PACKED
    else:
        temporaries += _SCRATCH_OF_A_THREAD
    if workload.is_padded or workload.has_dropout:
        temporaries += lse
    if workload.is_padded:
        temporaries += 2 * key * i + rows * (a + 1)
    if workload.has_dropout:
        scores = max(_BLOCK_SCORES, tile // workload.head_dim)
        temporaries += scores * _BLOCK_BYTES + 8 * tile * a + 64 * workload.sequence_length
    return Bytes(operands, results, temporaries, _LIBRARY)


def tile_elements(pattern: Pattern, workload: Workload) -> int:
    """Upper bound of the query elements of a tile of :func:`dilated_attention_pytorch.planning.plan.plan`.

    A tile is closed under the pattern: its rows end at boundaries common to all groups, multiples of the least
    common multiple of the lengths, or at the end of the sequence.
    """
    length = workload.sequence_length
    num_rows = length * workload.num_heads * workload.batch_size
    is_shifted = any(group.shift(head) for group in pattern.groups for head in range(workload.num_kv_heads))
    closed = length if is_shifted else math.lcm(*(group.segment_length for group in pattern.groups))
    size = tile_size(num_rows, workload.head_dim, workload.itemsize)
    return min(max(size, min(length, closed) * workload.ratio), num_rows) * workload.head_dim


def _bytes_of_an_element(workload: Workload) -> int:
    """Bytes of temporaries per query element of a tile, for the pass that needs more."""
    i, a = workload.itemsize, workload.accumulation_itemsize
    if i == a:
        # Output of a partial; or its three gradients, and a sum over heads that share keys.
        return 4 * a if workload.is_training else a
    # float16 is converted to float32; bfloat16 is packed for the kernel and rounded.
    copies = {"float16": (4 * a, 8 * a), "bfloat16": (3 * i + a, 8 * i)}[workload.dtype_name]
    return copies[1] + 3 * a + i if workload.is_training else copies[0] + a
