"""The block sizes that the kernels are shipped with: a few candidates for each head dim and width of the numbers.

Every line compiles without spilling a register for compute capability 8.0 and 9.0; a test compiles them all and
``docs/kernels.md`` holds the table. The first candidate is the one taken where nothing is timed: under deterministic
algorithms, while a CUDA graph is captured, and in Triton's interpreter.
"""

from __future__ import annotations

from typing import NamedTuple


class Configuration(NamedTuple):
    """Blocks of one kernel: lines that a tile holds, lines that it walks over at a time, warps, pipeline stages."""

    block_rows: int
    block_run: int
    num_warps: int
    num_stages: int


C = Configuration
# kernel -> bytes of a number -> widest head (rounded up to a power of two) -> candidates
_SHIPPED: dict[str, dict[int, dict[int, tuple[Configuration, ...]]]] = {
    "forward": {
        2: {
            64: (C(128, 128, 8, 3), C(128, 64, 4, 3), C(64, 64, 4, 3)),
            128: (C(128, 64, 8, 3), C(128, 128, 8, 2), C(64, 64, 4, 3)),
            256: (C(128, 32, 8, 2), C(64, 32, 4, 2)),
        },
        4: {64: (C(64, 32, 4, 2),), 128: (C(32, 32, 4, 2),), 256: (C(32, 16, 4, 2),)},
    },
    "query_gradient": {
        2: {
            64: (C(128, 64, 8, 3), C(64, 64, 4, 3)),
            128: (C(128, 64, 8, 2), C(64, 64, 4, 2)),
            256: (C(64, 32, 8, 2),),
        },
        4: {64: (C(64, 32, 8, 2),), 128: (C(32, 32, 8, 2),), 256: (C(16, 16, 4, 1),)},
    },
    "key_gradient": {
        2: {
            64: (C(128, 64, 8, 3), C(64, 64, 4, 3)),
            128: (C(128, 32, 8, 2), C(64, 64, 8, 2)),
            256: (C(64, 32, 8, 1),),
        },
        4: {64: (C(64, 32, 8, 2),), 128: (C(32, 32, 8, 2),), 256: (C(16, 16, 4, 1),)},
    },
}  # fmt: skip
FEW_QUERIES = Configuration(16, 64, 4, 3)
"""The forward of at most 16 lines of queries: a decoding step."""


def candidates(kernel: str, block_d: int, itemsize: int) -> tuple[Configuration, ...]:
    """The configurations of a kernel for heads padded to ``block_d`` and numbers of ``itemsize`` bytes."""
    by_width = _SHIPPED[kernel][itemsize]
    return by_width[min(width for width in by_width if width >= block_d)]
