"""The block sizes that the kernels are shipped with: a few candidates for each device, width of numbers and head dim.

With Triton 3.9 every line compiles without spilling a register, with the causal mask, a window's and without, for calls
without padding, dropout and grouped heads; ``docs/kernels.md`` holds the table and what the others spill,
``python -m dilated_attention_pytorch.benchmarks.registers`` makes it and a test repeats it. The first candidate is the
one taken where nothing is timed: under deterministic algorithms, while a CUDA graph is captured, and in Triton's
interpreter.
"""

from __future__ import annotations

import functools
from typing import NamedTuple


class Configuration(NamedTuple):
    """Blocks of one kernel: lines that a tile holds, lines that it walks over at a time, warps, pipeline stages."""

    block_rows: int
    block_run: int
    num_warps: int
    num_stages: int


C = Configuration
Candidates = tuple[Configuration, ...]
# kernel -> widest head (rounded up to a power of two) -> candidates
_FLOAT32: dict[str, dict[int, Candidates]] = {
    "forward": {64: (C(64, 32, 8, 2),), 128: (C(32, 16, 8, 2),), 256: (C(16, 16, 8, 2),)},
    "few_queries": {256: (C(16, 16, 8, 2),)},
    "query_gradient": {64: (C(16, 64, 8, 2),), 128: (C(16, 32, 8, 2),), 256: (C(16, 16, 8, 2),)},
    "key_gradient": {64: (C(32, 32, 8, 2),), 128: (C(32, 32, 8, 2),), 256: (C(32, 16, 8, 2),)},
}
# Compute capability 8.x, and newer devices with its 99 KiB of shared memory for a program.
_AMPERE: dict[str, dict[int, Candidates]] = {
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
_HOPPER: dict[str, dict[int, Candidates]] = {
    "forward": {
        64: (C(128, 128, 8, 3), C(128, 64, 8, 3), C(64, 64, 4, 3)),
        128: (C(128, 64, 8, 3), C(128, 32, 8, 3), C(64, 64, 8, 3)),
        256: (C(128, 32, 8, 2), C(64, 32, 8, 3)),
    },
    "few_queries": {128: (C(16, 64, 4, 3),), 256: (C(16, 32, 8, 2),)},
    "query_gradient": {
        64: (C(128, 64, 8, 3), C(128, 128, 8, 2), C(64, 64, 4, 3)),
        128: (C(128, 64, 8, 2), C(64, 64, 8, 3)),
        256: (C(64, 16, 8, 2), C(32, 32, 8, 2)),
    },
    "key_gradient": {
        64: (C(128, 64, 8, 3), C(128, 32, 8, 3), C(64, 64, 4, 3)),
        128: (C(64, 32, 8, 3), C(64, 32, 8, 2)),
        256: (C(32, 32, 8, 3),),
    },
}
# Instead of those above where a window is in the pattern: its mask makes some of them spill.
_AMPERE_BANDED: dict[str, dict[int, Candidates]] = {
    "forward": {64: (C(128, 64, 8, 3), C(64, 64, 8, 3))},
    "key_gradient": {128: (C(64, 32, 8, 3), C(32, 64, 8, 2))},
}
_HOPPER_BANDED: dict[str, dict[int, Candidates]] = {
    "forward": {256: (C(64, 32, 8, 3),)},
    "few_queries": {64: (C(16, 64, 4, 2),)},
}


@functools.cache
def candidates(
    kernel: str, block_d: int, itemsize: int, capability: tuple[int, int], banded: bool = False
) -> Candidates:
    """The configurations of a kernel for heads padded to ``block_d`` and numbers of ``itemsize`` bytes.

    ``"few_queries"`` is the forward where one small tile holds all lines of queries, as in decoding; ``banded`` are
    patterns with a window.
    """
    if itemsize == 4:
        by_width = _FLOAT32[kernel]
    else:
        by_kernel, instead = (_HOPPER, _HOPPER_BANDED) if capability[0] in (9, 10) else (_AMPERE, _AMPERE_BANDED)
        by_width = by_kernel[kernel] | (instead.get(kernel, {}) if banded else {})
    return by_width[min(width for width in by_width if width >= block_d)]
