"""The limit of a time: the highest rates of operations and of memory that are measured in the same run."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from dilated_attention_pytorch.kernels.select import refusal
from dilated_attention_pytorch.ops import attend
from dilated_attention_pytorch.patterns import DilatedPattern
from dilated_attention_pytorch.patterns.flops import pair_flops

from .clock import Clock
from .shapes import Case, Computes

if TYPE_CHECKING:
    from .results import Row

_HEADS, _HEAD_DIM = 4, 64


@dataclass(frozen=True, slots=True)
class Limits:
    """Highest rates of one device and dtype that were measured around a case."""

    matrix_product_flops: float
    """Operations per second of a large square matrix product; on a CPU, of dense attention if that is faster:
    PyTorch's, or the native kernels' over one whole segment. ``torch.mm`` is far from the limit of some processors."""
    copy_bytes: float
    """Bytes per second of a copy, read plus written, or of a sum, over as much memory as the case moves."""

    def seconds(self, case: Case, computes: Computes) -> float:
        """Lower bound of a case's time: its operations or its unavoidable traffic at these rates."""
        return max(case.flops(computes) / self.matrix_product_flops, case.least_bytes(computes) / self.copy_bytes)


class Probe:
    """Samples both rates repeatedly between the measured calls, since a machine's speed varies.

    Args:
        clock: clock of the device.
        dtype: dtype of the matrices.
        is_dry: use tiny sizes, as a smoke test.
    """

    def __init__(self, clock: Clock, dtype: torch.dtype, *, is_dry: bool = False) -> None:
        self.clock = clock
        size, rows, copied = (8192, 0, 1 << 30) if clock.device.type == "cuda" else (2048, 2048, 1 << 28)
        if is_dry:
            size, rows, copied = 128, 128, 1 << 20
        generator = torch.Generator(clock.device).manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            # Random numbers: a GPU that multiplies zeros draws less power and runs faster than on real data.
            return torch.randn(shape, generator=generator, device=clock.device).to(dtype)

        a, b = draw(size, size), draw(size, size)
        self._products: list[tuple[int, Callable[[], object]]] = [(2 * size**3, lambda: torch.mm(a, b))]
        if clock.device.type == "cpu":
            x, pattern = draw(1, rows, _HEADS, _HEAD_DIM), DilatedPattern([rows], [1])
            heads, flops = x.transpose(1, 2), pair_flops(_HEADS * rows**2, _HEAD_DIM)
            self._products.append(
                (flops, lambda: torch.nn.functional.scaled_dot_product_attention(heads, heads, heads))
            )
            if refusal("native", clock.device, dtype, _HEAD_DIM) is None:
                self._products.append((flops, lambda: attend(x, x, x, pattern, impl="native")))
        self._source = torch.empty(copied, dtype=torch.int8, device=clock.device).fill_(1)
        self._target = torch.empty_like(self._source)
        self._flops, self._bytes = 0.0, 0.0
        for _ in range(2):  # the first calls load what they use
            self._flops, self._bytes = 0.0, 0.0
            self.sample(copied)
        self.sample(copied)
        self.at_first = self.take()

    def sample(self, *num_bytes: int) -> None:
        """Measure the rates once, that of memory over each of these numbers of bytes."""
        for flops, call in self._products:
            self._flops = max(self._flops, flops / self.clock.seconds(call))
        for size in num_bytes:
            size = max(1 << 16, min(self._source.numel(), size // 2)) // 4 * 4
            copy = functools.partial(self._target[:size].copy_, self._source[:size])
            for moved, call in ((2 * size, copy), (size, self._source[:size].view(torch.float32).sum)):
                self._bytes = max(self._bytes, moved / self.clock.seconds(call))

    def take(self) -> Limits:
        """The highest rates since the last call."""
        limits = Limits(self._flops, self._bytes)
        self._flops, self._bytes = 0.0, 0.0
        return limits


def limit_by_highest(rows: Iterable[Row]) -> None:
    """Bound the time of every row by the highest rate of operations in the run, and the rate of memory of its case."""
    of_dtype: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.limits is not None:
            of_dtype[row.case.dtype].append(row)
    for timed in of_dtype.values():
        highest = max(row.limits.matrix_product_flops for row in timed if row.limits is not None)
        for row in timed:
            if row.limits is not None:
                limits = replace(row.limits, matrix_product_flops=highest)
                row.limit_seconds = limits.seconds(row.case, row.computes)
