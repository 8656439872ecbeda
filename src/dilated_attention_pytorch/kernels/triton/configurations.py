"""Block sizes that the kernels are shipped with: a few candidates per device, element size and head dimension.

They were chosen by compiling them: a register spilled in a loop over blocks is stored and loaded in every block. Block
sizes depend on the compiler's version and on the mask for that reason. A test compiles the first candidates. For AMD
GPUs the kernels were compiled and never run.

The first candidate is used where nothing is timed: under deterministic algorithms, while a CUDA graph is
captured, and in Triton's interpreter.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple


class BlockSizes(NamedTuple):
    """Block sizes of one kernel: lines per tile, lines walked over at a time, warps, pipeline stages."""

    block_rows: int
    block_run: int
    num_warps: int
    num_stages: int


C = BlockSizes
Candidates = tuple[BlockSizes, ...]
# kernel -> widest head (rounded up to a power of two) -> candidates
Table = dict[str, dict[int, Candidates]]
_FLOAT32: Table = {
    "forward": {64: (C(64, 32, 8, 2),), 128: (C(32, 16, 8, 2),), 256: (C(16, 16, 8, 2),)},
    "few_queries": {256: (C(16, 16, 8, 2),)},
    "query_gradient": {64: (C(16, 64, 8, 2),), 128: (C(16, 32, 8, 2),), 256: (C(16, 16, 8, 2),)},
    "key_gradient": {64: (C(32, 32, 8, 2),), 128: (C(32, 32, 8, 2),), 256: (C(32, 16, 8, 2),)},
}
# Compute capability 8.x, and 11.x and newer with 99 KiB of shared memory for a program.
_AMPERE: Table = {
    "forward": {
        64: (C(128, 64, 8, 3), C(64, 64, 4, 3)),
        128: (C(128, 32, 8, 3), C(64, 64, 8, 3)),
        256: (C(64, 32, 8, 2),),
    },
    "few_queries": {128: (C(16, 64, 4, 3),), 256: (C(16, 32, 8, 2),)},
    "query_gradient": {
        64: (C(128, 32, 8, 3), C(64, 64, 8, 3)),
        128: (C(64, 64, 8, 2), C(64, 32, 8, 3)),
        256: (C(32, 32, 8, 2),),
    },
    "key_gradient": {
        64: (C(128, 16, 8, 3), C(32, 64, 8, 3)),
        128: (C(64, 64, 8, 2), C(64, 32, 8, 3)),
        256: (C(32, 32, 8, 2),),
    },
}
# In order of time on an H200 (Triton 3.6) among 36 block sizes of the forward and 24 and 32 of the gradients: 32,768
# rows, heads of 64 under five groups and of 128 under three. Heads of 256 were compiled only.
_HOPPER: Table = {
    "forward": {
        64: (C(64, 128, 4, 3), C(128, 128, 8, 3), C(128, 64, 8, 3), C(128, 64, 4, 2)),
        128: (C(128, 64, 8, 3), C(64, 64, 4, 3), C(128, 128, 8, 3)),
        256: (C(128, 32, 8, 2), C(64, 32, 8, 3)),
    },
    "few_queries": {128: (C(16, 64, 4, 3),), 256: (C(16, 32, 8, 2),)},
    "query_gradient": {
        64: (C(128, 32, 8, 3), C(64, 64, 4, 3), C(128, 64, 4, 3)),
        128: (C(128, 64, 8, 3), C(64, 64, 4, 2), C(128, 64, 8, 2)),
        256: (C(64, 16, 8, 2), C(32, 32, 8, 2)),
    },
    "key_gradient": {
        64: (C(128, 16, 4, 3), C(64, 32, 4, 3), C(64, 128, 4, 2)),
        128: (C(128, 32, 8, 3), C(64, 32, 4, 3), C(128, 16, 8, 3)),
        256: (C(32, 32, 8, 3),),
    },
}
# Overrides for compute capability 10.x: products are written to a separate memory and read from there.
_BLACKWELL: Table = {
    "forward": {
        64: (C(128, 64, 8, 3), C(128, 64, 4, 2), C(64, 64, 4, 3)),
        128: (C(128, 64, 8, 3), C(128, 32, 8, 3), C(64, 64, 8, 3)),
    },
    "query_gradient": {
        64: (C(128, 64, 8, 3), C(64, 64, 4, 3)),
        128: (C(64, 64, 8, 3), C(128, 64, 8, 2)),
    },
    "key_gradient": {
        64: (C(128, 64, 8, 3), C(128, 32, 8, 3), C(64, 64, 4, 3)),
        128: (C(64, 32, 8, 3), C(64, 32, 8, 2), C(128, 32, 8, 2)),
    },
}
# Warps have 64 threads; with 8 warps a thread has 256 registers, with 4 it has 512.
_AMD: Table = {
    "forward": {
        64: (C(128, 64, 4, 1), C(128, 64, 4, 2)),
        128: (C(128, 64, 4, 1), C(128, 32, 4, 1)),
        256: (C(64, 32, 4, 1),),
    },
    "few_queries": {128: (C(16, 64, 4, 1),), 256: (C(16, 32, 4, 1),)},
    "query_gradient": {
        64: (C(128, 64, 4, 1), C(64, 64, 4, 1)),
        128: (C(128, 32, 4, 1), C(64, 64, 4, 1)),
        256: (C(32, 32, 4, 1),),
    },
    "key_gradient": {
        64: (C(128, 32, 4, 1), C(64, 64, 4, 1)),
        128: (C(128, 32, 4, 1), C(64, 32, 4, 1)),
        256: (C(32, 16, 4, 1),),
    },
}
_AMD_FLOAT32: Table = {
    "forward": {64: (C(64, 32, 4, 1),), 128: (C(32, 32, 4, 1),), 256: (C(16, 16, 4, 1),)},
    "few_queries": {256: (C(16, 16, 4, 1),)},
    "query_gradient": {64: (C(64, 32, 4, 1),), 128: (C(32, 32, 4, 1),), 256: (C(16, 16, 4, 1),)},
    "key_gradient": {64: (C(32, 32, 4, 1),), 128: (C(32, 16, 4, 1),), 256: (C(16, 16, 4, 1),)},
}
# Overrides for patterns with a window, whose mask makes some of the configurations above spill.
_AMPERE_BANDED: Table = {
    "key_gradient": {128: (C(64, 32, 8, 3), C(32, 64, 8, 2))},
}
_HOPPER_BANDED: Table = {
    "forward": {256: (C(64, 32, 8, 3),)},
}
# Overrides for calls with a bias by distance: a tile of the bias is copied to shared memory ahead, a float32 per pair.
# Distances of coordinates are computed; most of the configurations above spill with them too.
_DISTANCE_BIAS: Table = {
    "forward": {
        64: (C(128, 64, 8, 2), C(64, 64, 4, 2)),
        128: (C(64, 64, 8, 2), C(128, 32, 8, 2)),
        256: (C(64, 16, 8, 2),),
    },
    "query_gradient": {64: (C(128, 32, 8, 2), C(128, 16, 8, 2)), 128: (C(64, 16, 8, 2),), 256: (C(32, 16, 8, 2),)},
    "key_gradient": {64: (C(128, 16, 8, 2), C(64, 32, 8, 2)), 128: (C(64, 16, 8, 2),), 256: (C(32, 16, 8, 2),)},
}
_FLOAT32_DISTANCE_BIAS: Table = {"key_gradient": {256: (C(16, 16, 8, 2),)}}
# Overrides for Triton before 3.9, where other blocks spill registers in the loop over blocks.
_BLACKWELL_BEFORE_3_9: Table = {
    "forward": {64: (C(128, 64, 8, 3), C(64, 64, 4, 3))},
    "key_gradient": {
        64: (C(128, 32, 8, 3), C(128, 32, 8, 2)),
        128: (C(128, 16, 8, 2), C(128, 32, 8, 2), C(64, 32, 8, 2)),
    },
}


@functools.cache
def candidates(
    kernel: str, block_d: int, itemsize: int, target: str, banded: bool, biased: bool, triton: tuple[int, int]
) -> Candidates:
    """The configurations of a kernel for heads padded to ``block_d`` and elements of ``itemsize`` bytes.

    ``"few_queries"`` is the forward if one small tile holds all lines of queries, as in decoding. ``block_d`` is the
    wider of keys and values, whose blocks lie in shared memory. ``target`` is the compiler's name of the device,
    ``banded`` means that the pattern has a window, ``biased`` a bias by distance, ``triton`` is the compiler's version.
    """
    by_width: dict[int, Candidates] = {}
    for table in _tables(target, itemsize, banded, biased, triton):
        by_width |= table.get(kernel, {})
    found = by_width[min(width for width in by_width if width >= block_d)]
    if target.startswith("sm_10") and triton < (3, 7) and block_d <= 32:
        # Triton 3.6 misses barriers around such products by one warpgroup: github.com/triton-lang/triton/issues/9871.
        found = tuple(one for one in found if one.num_warps > 4 or one.block_rows < 64)
    return found


def _tables(target: str, itemsize: int, banded: bool, biased: bool, triton: tuple[int, int]) -> Iterator[Table]:
    """The applicable tables; later ones override earlier ones."""
    if target.startswith("gfx"):
        yield _AMD_FLOAT32 if itemsize == 4 else _AMD
        return
    if itemsize == 4:
        yield _FLOAT32
        if biased:
            yield _FLOAT32_DISTANCE_BIAS
        return
    yield from _tables_of_nvidia(target, banded, triton)
    if biased:
        yield _DISTANCE_BIAS


def _tables_of_nvidia(target: str, banded: bool, triton: tuple[int, int]) -> Iterator[Table]:
    """The tables for elements of 2 bytes."""
    if target.startswith(("sm_9", "sm_10")):
        yield _HOPPER
        if target.startswith("sm_10"):
            yield _BLACKWELL
        if banded:
            yield _HOPPER_BANDED
        if target.startswith("sm_10") and triton < (3, 9):
            yield _BLACKWELL_BEFORE_3_9
    else:
        yield _AMPERE
        if banded:
            yield _AMPERE_BANDED
