"""What the machine itself reaches in this run: the rate of a matrix product, and of a copy."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from .clock import Clock
from .shapes import Case, Computes


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates of one device in one dtype."""

    matrix_product_flops: float
    """Floating-point operations a second of a large square matrix product."""
    copy_bytes: float
    """Bytes a second, read and written, of a copy that no cache holds."""

    def seconds(self, case: Case, computes: Computes) -> float:
        """The least time of a case: its operations, or the traffic that nobody avoids, at these rates."""
        return max(case.flops(computes) / self.matrix_product_flops, case.least_bytes(computes) / self.copy_bytes)


class Probe:
    """Measures both rates again and again between the calls that are held against them: a machine changes its pace.

    Args:
        clock: of the device.
        dtype: of the matrices.
        is_dry: whether sizes are tiny, to see only that it works.
    """

    def __init__(self, clock: Clock, dtype: torch.dtype, *, is_dry: bool = False) -> None:
        self.clock = clock
        size, copied = (8192, 1 << 30) if clock.device.type == "cuda" else (2048, 1 << 28)
        if is_dry:
            size, copied = 128, 1 << 20
        generator = torch.Generator(clock.device).manual_seed(0)
        # Normal numbers: a GPU that multiplies zeros draws less power and runs faster than it ever will on data.
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
        """One product and one copy."""
        self._products.append(self.clock.seconds(lambda: torch.mm(*self._factors)))
        self._copies.append(self.clock.seconds(lambda: self._target.copy_(self._source)))

    def take(self) -> Limits:
        """The medians of the samples since the last time."""
        size, copied = self._factors[0].shape[0], self._source.numel()
        limits = Limits(2 * size**3 / statistics.median(self._products), 2 * copied / statistics.median(self._copies))
        self._products, self._copies = [], []
        return limits
