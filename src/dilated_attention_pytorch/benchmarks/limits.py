"""The machine's rates in this run: matrix products and copies."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from .clock import Clock
from .shapes import Case, Computes


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates of one device and dtype."""

    matrix_product_flops: float
    """Operations per second of a large square matrix product."""
    copy_bytes: float
    """Bytes per second, read plus written, of a copy that exceeds all caches."""

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
        size, copied = (8192, 1 << 30) if clock.device.type == "cuda" else (2048, 1 << 28)
        if is_dry:
            size, copied = 128, 1 << 20
        generator = torch.Generator(clock.device).manual_seed(0)
        # Random numbers: a GPU that multiplies zeros draws less power and runs faster than on real data.
        self._factors = [torch.randn(size, size, generator=generator, device=clock.device).to(dtype) for _ in range(2)]
        self._source = torch.empty(copied, dtype=torch.int8, device=clock.device).fill_(1)
        self._target = torch.empty_like(self._source)
        self._products: list[float] = []
        self._copies: list[float] = []
        for _ in range(4):
            self.sample()
        self._products.pop(0)
        self._copies.pop(0)
        self.at_first = self.take()

    def sample(self) -> None:
        """Time one product and one copy."""
        self._products.append(self.clock.seconds(lambda: torch.mm(*self._factors)))
        self._copies.append(self.clock.seconds(lambda: self._target.copy_(self._source)))

    def take(self) -> Limits:
        """Medians of the samples since the last call."""
        size, copied = self._factors[0].shape[0], self._source.numel()
        limits = Limits(2 * size**3 / statistics.median(self._products), 2 * copied / statistics.median(self._copies))
        self._products, self._copies = [], []
        return limits
