"""The memory model: an upper bound of a call's peak memory from operands, results and temporaries."""

from __future__ import annotations

from dataclasses import dataclass

from dilated_attention_pytorch.patterns import Pattern

from .counts import tiling
from .hardware import Hardware
from .workload import Workload

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
    tile = tiling(pattern, workload).elements
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


def _bytes_of_an_element(workload: Workload) -> int:
    """Bytes of temporaries per query element of a tile, for the pass that needs more."""
    i, a = workload.itemsize, workload.accumulation_itemsize
    if i == a:
        # Output of a partial; or its three gradients, and a sum over heads that share keys.
        return 4 * a if workload.is_training else a
    # float16 is converted to float32; bfloat16 is packed for the kernel and rounded.
    copies = {"float16": (4 * a, 8 * a), "bfloat16": (3 * i + a, 8 * i)}[workload.dtype_name]
    return copies[1] + 3 * a + i if workload.is_training else copies[0] + a
