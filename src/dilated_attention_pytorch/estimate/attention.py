"""Memory of one call of attention: operands, results, and what the kernels allocate themselves."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels import compilation, native
from dilated_attention_pytorch.ops.operators import call_of
from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.plan.planner import tile_size

from .workload import Workload

_SCRATCH_OF_A_THREAD = 8 << 20
"""Scratch bytes per thread: score blocks and sums; with matrix products, two blocks of half a million scores."""
_BYTES_OF_A_PACKED_ROW = 36
"""Most bytes per column of a query row that a thread packs: four copies of queries and gradients, the gradients of the
queries, and partial sums where keys are split over threads."""
_BLOCK_SCORES = 1 << 21
"""Scores per block with dropout (``kernels/products.py``)."""
_BLOCK_BYTES = 96
"""Bytes per score of such a block: scores, products, factors, and 64-bit random numbers."""
_KEPT = 2
"""Factor for temporaries: freed pages that the C library retains count as used."""
_LIBRARY = 192 << 20
"""Bytes that PyTorch loads and compiles at the first call of a process: 83 to 145 MiB were measured on a CPU."""
GRADIENTS = 4
"""Operands of ``attend_backward`` before those of the call."""


@functools.cache
def _kernel_sizes() -> native.Sizes | None:
    """Sizes of the buffers of the CPU kernels; None if they do not run here."""
    return native.sizes() if compilation.can_load() else None


def packed_bytes(num_keys: int, num_domains: int, columns: int, dtype: torch.dtype) -> int:
    """Bytes that the forward CPU kernel packs for keys and values of a partial: a window of as many domains as fit.

    At most 16 MiB, or one domain's window of 8,192 keys if that is more; 0 where the kernels do not run. ``columns``
    are those of a key and of its value.
    """
    sizes = _kernel_sizes()
    if sizes is None or not num_keys or not num_domains:
        return 0
    of_block = min(-(-num_keys // sizes.alignment) * sizes.alignment, sizes.packed_keys)
    blocks = -(-min(num_keys, sizes.keys_of_window) // of_block)
    of_domain = blocks * of_block * columns * native.factor_dtype(dtype).itemsize
    return of_domain * min(max(sizes.packed_bytes // of_domain, 1), num_domains)


def tile_elements(pattern: Pattern, workload: Workload) -> int:
    """Upper bound of the query elements of a tile of :func:`dilated_attention_pytorch.plan.planner.plan`.

    A tile is closed under the pattern: its rows end at boundaries common to all groups, multiples of the least
    common multiple of the lengths, or at the end of the sequence.
    """
    length = workload.sequence_length
    num_rows = length * workload.num_heads * workload.batch_size
    is_shifted = any(group.shift(head) for group in pattern.groups for head in range(workload.num_kv_heads))
    is_whole = is_shifted or pattern.rules
    closed = length if is_whole else math.lcm(*(group.segment_length for group in pattern.groups))
    size = tile_size(num_rows, workload.head_dim, workload.itemsize)
    return min(max(size, min(length, closed) * workload.ratio), num_rows) * workload.head_dim


def kernel_bytes(
    pattern: Pattern,
    workload: Workload,
    *,
    num_queries: int | None = None,
    value_dim: int | None = None,
    num_distances: int = 0,
    threads: int = 1,
) -> tuple[int, int]:
    """Bytes that the CPU kernels allocate beside operands and results, in the forward and in the backward pass.

    The forward pass packs keys and values (:func:`packed_bytes`), and copies them if keys are padded. The backward pass
    copies the log-sum-exp, and every thread packs the queries of a chunk and holds their gradients. In low precision a
    tile has float32 accumulators of its output, unless every row is written once, and of its three gradients. Of a bias
    by distance, a partial copies the part that it reads, and has its gradient, once and for every query head of a
    domain. A thread's memory for a single tile is less than 1 MB and not counted.

    Args:
        pattern: the pattern.
        workload: sizes of the call.
        num_queries: rows of the query, if there are fewer than keys.
        value_dim: width of the values, if it differs from that of queries and keys.
        num_distances: columns of a bias by distance.
        threads: number of threads that compute it.
    """
    length, head_dim, dtype = workload.sequence_length, workload.head_dim, workload.dtype
    value_dim = value_dim or head_dim
    batch, sizes, is_coarse = workload.batch_size * workload.num_kv_heads, _kernel_sizes(), workload.itemsize == 2
    own = replace(workload, sequence_length=num_queries or length)
    rows = tile_elements(pattern, own) // head_dim
    # Keys of a domain, the positions that it spans, and the number of domains; in low precision, of those of a tile.
    domains = [
        (-(-min(group.segment_length, length) // group.dilation_rate), min(group.segment_length, length))
        for group in pattern.groups
    ]
    domains += [(length, length) for _ in pattern.rules]
    packed = of_threads = line = of_lines = 0
    of_row = 2 * (head_dim + value_dim) * native.factor_dtype(dtype).itemsize + 4 * head_dim
    chunk = 0 if sizes is None else sizes.rows_of_chunk
    for keys, span in domains:
        number = batch * -(-length // span)
        of_threads = max(of_threads, min(threads, number) * min(keys * workload.ratio, chunk) * of_row)
        if is_coarse:
            number = min(number, max(1, rows // (span * workload.ratio)))
        packed = max(packed, packed_bytes(keys, number, head_dim + value_dim, dtype))
        read = min(2 * keys, num_distances)
        of_lines = max(of_lines, 4 * (workload.num_heads + number * workload.ratio) * read)
        if read < num_distances:
            line = max(line, 4 * workload.num_heads * read)
    forward = packed + line
    if workload.is_padded:
        forward += batch * length * (head_dim + value_dim) * workload.itemsize
    backward = own.accumulation_itemsize * own.sequence_length * batch * workload.ratio + of_threads + line + of_lines
    if not is_coarse:
        return forward, backward
    is_written_once = len(domains) == 1 and (bool(pattern.rules) or domains[0][0] <= native.KEYS_OF_WINDOW)
    accumulated = workload.accumulation_itemsize * rows
    return (
        forward + (not is_written_once) * accumulated * value_dim,
        backward + accumulated * head_dim + accumulated * (head_dim + value_dim) // workload.ratio,
    )


def operator_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """:func:`kernel_bytes` of an operator of this package, from its operands, which may be fake tensors.

    Args:
        func: ``attend`` of either library of operators, or ``attend_backward``; the result is 0 for any other.
        args: its operands.
    """
    is_backward = func._opname == "attend_backward"
    if func._opname != "attend" and not is_backward:
        return 0
    if func.namespace == "dilated_attention_native":
        return 0 if is_backward else _partial_bytes(*args)
    call = call_of(*args[GRADIENTS if is_backward else 0 :])
    if not call.impl.is_in_place:
        return 0 if call.key_padding_mask is None else call.key.nbytes + call.value.nbytes
    assert call.pattern is not None
    workload = Workload(
        sequence_length=call.key.shape[1],
        batch_size=call.query.shape[0],
        num_heads=call.query.shape[2],
        num_kv_heads=call.key.shape[2],
        head_dim=call.query.shape[3],
        dtype=call.query.dtype,
        is_padded=call.key_padding_mask is not None,
    )
    bias = None if is_backward and call.has_fixed_bias else call.distance_bias
    return kernel_bytes(
        call.pattern,
        workload,
        num_queries=call.query.shape[1],
        value_dim=call.value.shape[3],
        num_distances=0 if bias is None else bias.shape[1],
    )[is_backward]


def _partial_bytes(query: Tensor, *rest: Any) -> int:
    """Bytes of :func:`.kernels.native.merge_partial`, whose keys come from outside the call."""
    ratio, (sequences, _, _, num_queries, num_keys, *_), heads, axes = rest[5:9]
    if num_queries * ratio <= native.ROWS_OF_STREAM:
        return 0  # with so few queries, keys are read in place
    columns = query.shape[3] + rest[1].shape[3]
    return packed_bytes(num_keys, sequences * len(heads) * math.prod(axes[::4]), columns, query.dtype)


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


def peak_bytes(pattern: Pattern, workload: Workload, *, threads: int | None) -> Bytes:
    """Upper bound of the peak memory of one call, operands included, for every implementation except "reference".

    With E_q = B N H D and E_k = B N G D elements of i bytes, R = B N H rows and a bytes of an accumulator: operands
    ``(E_q + 2 E_k) i`` (and E_q i for the gradient of the output), results ``E_q i + R a`` (and the gradients
    ``(E_q + 2 E_k) i``), temporaries per element of the largest tile, which grows with segments that span everything.
    Copies of non-contiguous operands and of autocast are not counted.

    Args:
        pattern: the pattern.
        workload: sizes of the call.
        threads: number of threads of a CPU; None on another device.
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
    temporaries += _SCRATCH_OF_A_THREAD * (1 if threads is None else threads)
    sizes = _kernel_sizes()
    if threads is not None and sizes is not None:
        of_rows = _BYTES_OF_A_PACKED_ROW * sizes.rows_of_chunk * workload.head_dim * workload.is_training
        temporaries += of_rows * threads + _KEPT * sizes.packed_bytes
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
