"""An asynchronous device for :mod:`support.gluon_emulator`: memory, barriers, copies and products.

Every warp partition is a generator that stops before each operation that others can see. TMA copies and warpgroup
products are events that complete between these steps, in random order. Everything that a kernel must not rely on
becomes visible: shared memory is NaN until a copy into it has arrived, and for a product in flight while it is written;
a product is NaN if the writes of a partition were not fenced. Deadlocks between partitions, and wrong uses of barriers
and addresses, raise an error.
"""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

Steps = Generator[Callable[[], bool] | None, None, Any]


class Wrong(AssertionError):
    """The kernel made an error that a device would not survive."""


class Pointer:
    """Addresses of elements in the storage of a tensor."""

    def __init__(self, storage: Tensor, offset: Any) -> None:
        self.storage, self.offset = storage, offset
        self.dtype = types.SimpleNamespace(element_ty=storage.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.storage, self.offset + other)

    def __sub__(self, other: Any) -> Pointer:
        return self + -other

    def at(self, mask: Tensor | None) -> Tensor:
        """The offsets, 0 where masked out; all others must lie in the storage."""
        offset = torch.as_tensor(self.offset, dtype=torch.int64)
        if mask is not None:
            offset = torch.where(mask, offset, 0)
        if not 0 <= int(offset.min()) <= int(offset.max()) < len(self.storage):
            raise Wrong("an address lies outside of its tensor")
        return offset


class Barrier:
    """An mbarrier: a phase completes when all arrivals and all bytes are in."""

    def __init__(self, count: int) -> None:
        self.count = self.missing = count
        self.bytes = self.phase = 0

    def arrive(self, arrivals: int, num_bytes: int) -> None:
        self.missing, self.bytes = self.missing - arrivals, self.bytes + num_bytes
        if self.missing < 0:
            raise Wrong("more arrivals at a barrier than it counts")
        if self.missing == 0 and self.bytes == 0:
            self.missing, self.phase = self.count, self.phase + 1


class Cell:
    """A part of shared memory that is always written as a whole, or a barrier."""

    def __init__(self, shape: list[int], dtype: torch.dtype) -> None:
        self.value: Any = torch.full(shape, float("nan"), dtype=dtype) if dtype.is_floating_point else None
        self.version = 0
        self.unfenced_by: Partition | None = None

    def write(self, value: Any, partition: Partition | None = None) -> None:
        self.value, self.version, self.unfenced_by = value, self.version + 1, partition

    @property
    def barrier(self) -> Barrier:
        if not isinstance(self.value, Barrier):
            raise Wrong("a barrier is used before it is initialised")
        return self.value


class Shared:
    """An allocation of shared memory, or a view of one of its cells."""

    def __init__(self, cells: list[Cell], is_transposed: bool = False) -> None:
        self.cells, self.is_transposed = cells, is_transposed

    def index(self, index: Any) -> Shared:
        if not 0 <= int(index) < len(self.cells):
            raise Wrong("an index lies outside of shared memory")
        return Shared([self.cells[int(index)]])

    def permute(self, order: tuple[int, int]) -> Shared:
        assert order == (1, 0)
        return Shared(self.cells, not self.is_transposed)

    def store(self, value: Tensor) -> None:
        self.cell.write(value.clone(), Program.current.running)

    @property
    def cell(self) -> Cell:
        (cell,) = self.cells
        return cell

    @property
    def matrix(self) -> Tensor:
        return self.cell.value.mT if self.is_transposed else self.cell.value


class Product:
    """A matrix product in flight; its value is available when it is done."""

    def __init__(self, left: Tensor | Shared, right: Shared, total: Tensor, use_total: bool) -> None:
        self.left, self.right, self.total = left, right, total if use_total else torch.zeros_like(total)
        self.reads = [x.cell for x in (left, right) if isinstance(x, Shared)]
        self.versions = [cell.version for cell in self.reads]
        self.is_spoilt = any(cell.unfenced_by is not None for cell in self.reads)
        self.value: Tensor | None = None

    def finish(self) -> None:
        left = self.left.matrix if isinstance(self.left, Shared) else self.left
        assert left.dtype == self.right.matrix.dtype, "a product needs operands of one type"
        self.value = left.float() @ self.right.matrix.float() + self.total
        if self.is_spoilt or self.versions != [cell.version for cell in self.reads]:
            self.value = torch.full_like(self.total, float("nan"))


class Partition:
    """A warp partition: warps that run one function."""

    def __init__(self, name: str, steps: Steps) -> None:
        self.name, self.steps, self.is_done = name, steps, False
        self.is_ready: Callable[[], bool] = lambda: True
        self.products: list[Product] = []

    def step(self) -> None:
        """Run up to the next operation that others can see."""
        Program.current.running = self
        try:
            self.is_ready = next(self.steps) or (lambda: True)
        except StopIteration:
            self.is_done = True


class Program:
    """One program of the grid: its partitions, and the copies in flight."""

    current: Program
    running: Partition

    def __init__(self, index: int, draw: random.Random) -> None:
        self.index, self.draw = index, draw
        self.copies: list[Callable[[], None]] = []
        self.cells: list[Cell] = []
        self.descriptors: dict[Any, int] = {}
        self.partitions: list[Partition] = []
        # Some partitions are slow in one program and fast in the next, to reach schedules that are rare otherwise.
        self.weights = [draw.choice([1, 30, 1000]) for _ in range(7)]

    def run(self, steps: Steps) -> None:
        Program.current, self.partitions = self, [Partition("program", steps)]
        while self.partitions:
            partitions = [one for one in self.partitions if not one.is_done]
            if partitions:
                self._advance(partitions)
            self.partitions = [one for one in self.partitions if not one.is_done]
        if self.copies:
            raise Wrong("a program ends while copies are under way")

    def _advance(self, partitions: list[Partition]) -> None:
        choices: list[tuple[int, Callable[[], None]]] = []
        for number, partition in enumerate(partitions):
            if partition.is_ready():
                choices.append((self.weights[number], partition.step))
            unfinished = next((one for one in partition.products if one.value is None), None)
            if unfinished is not None:
                choices.append((self.weights[3 + number], unfinished.finish))
        if self.copies:
            choices.append((self.weights[6], self._land))
        if not choices:
            raise Wrong(f"nothing moves any more: {', '.join(one.name for one in partitions)} wait for ever")
        weights, actions = zip(*choices, strict=True)
        self.draw.choices(actions, weights)[0]()

    def _land(self) -> None:
        self.copies.pop(self.draw.randrange(len(self.copies)))()
