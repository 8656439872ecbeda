"""Block-sparse rules: strided, random and hierarchical blocks, and block masks."""

from __future__ import annotations

import base64
import functools
from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .mixing import splitmix64
from .rules import Range, Rectangles, Rule, Spans, Window, spans_of


class BlockRule(Rule):
    """A rule over blocks of ``block_size`` positions: a query block attends to a key block entirely or not at all."""

    block_size: int

    @abstractmethod
    def sees_block(self, kv_head: int, num_kv_heads: int, query_block: Tensor, key_block: Tensor) -> Tensor:
        """The rule's definition: a bool tensor, for broadcastable integer tensors of block numbers."""

    def mask_between(self, kv_head: int, num_kv_heads: int, query_blocks: Tensor, key_blocks: Tensor) -> Tensor:
        """:meth:`sees_block` for two ranges of consecutive blocks: bool ``[query blocks, key blocks]``."""
        seen = self.sees_block(kv_head, num_kv_heads, query_blocks[:, None], key_blocks)
        return seen.expand(len(query_blocks), len(key_blocks))

    def sees(self, kv_head: int, num_kv_heads: int, query: Tensor, key: Tensor) -> Tensor:
        size = self.block_size
        return self.sees_block(kv_head, num_kv_heads, query // size, key // size)

    def spans(self, kv_head: int, num_kv_heads: int, queries: Range, keys: Range) -> Spans:
        if queries[0] >= queries[1] or keys[0] >= keys[1]:
            return spans_of([])
        size = self.block_size
        query_blocks = torch.arange(queries[0] // size, -(-queries[1] // size))
        key_blocks = range(keys[0] // size, -(-keys[1] // size))
        before, after = (len(key_blocks) if distance is None else -(-distance // size) for distance in self.reach)
        if before + after < len(key_blocks):
            query, start, stop = self._near_runs(kv_head, num_kv_heads, query_blocks, key_blocks, (before, after))
        else:
            query, start, stop = self._runs(kv_head, num_kv_heads, query_blocks, key_blocks)
        return Spans(
            (query * size).clamp(min=queries[0]),
            ((query + 1) * size).clamp(max=queries[1]),
            (start * size).clamp(min=keys[0]),
            (stop * size).clamp(max=keys[1]),
        )

    def _runs(
        self, kv_head: int, num_kv_heads: int, query_blocks: Tensor, key_blocks: range
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query block, start and stop key block of every run of consecutive visible key blocks."""
        every = torch.arange(key_blocks.start, key_blocks.stop)
        rows_at_once = max(1, MASK_CELLS // len(every))
        found = [
            _runs_of_mask(self.mask_between(kv_head, num_kv_heads, some, every))
            for some in query_blocks.split(rows_at_once)
        ]
        query = torch.cat([rows + index * rows_at_once for index, (rows, _, _) in enumerate(found)])
        start, stop = (torch.cat([runs[part] for runs in found]) + key_blocks.start for part in (1, 2))
        return query_blocks[query], start, stop

    def _near_runs(
        self, kv_head: int, num_kv_heads: int, query_blocks: Tensor, key_blocks: range, far: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`_runs` of a rule that reaches at most ``far`` blocks back and ahead: only those are evaluated."""
        distances, found = torch.arange(-far[0], far[1] + 1), []
        for some in query_blocks.split(max(1, MASK_CELLS // len(distances))):
            near = some[:, None] + distances
            inside = (near >= key_blocks.start) & (near < key_blocks.stop)
            rows, start, stop = _runs_of_mask(self.sees_block(kv_head, num_kv_heads, some[:, None], near) & inside)
            found.append((some[rows], near[rows, 0] + start, near[rows, 0] + stop))
        query, start, stop = (torch.cat(parts) for parts in zip(*found, strict=True))
        return query, start, stop


MASK_CELLS = 1 << 22
"""Block pairs evaluated at a time."""
MOST_BLOCK_PAIRS = 1 << 30
"""Most block pairs to count; more would take minutes per head."""


def _runs_of_mask(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row, start column and stop column of every run of True in the rows of a mask."""
    padded = torch.nn.functional.pad(mask.to(torch.int8), (1, 1))
    change = padded[:, 1:] - padded[:, :-1]
    rows, starts = (change == 1).nonzero(as_tuple=True)
    return rows, starts, (change == -1).nonzero(as_tuple=True)[1]


@dataclass(frozen=True, slots=True)
class StridedBlocks(BlockRule):
    """Query block i sees the key blocks j with ``(i - j) mod stride == 0``."""

    stride: int
    block_size: int

    def __repr__(self) -> str:
        return f"strided_blocks({self.stride}, block_size={self.block_size})"

    @property
    def period(self) -> int:
        return self.block_size

    @property
    def entry(self) -> list[Any]:
        return ["strided_blocks", self.stride, self.block_size]

    def sees_block(self, kv_head: int, num_kv_heads: int, query_block: Tensor, key_block: Tensor) -> Tensor:
        return (query_block - key_block) % self.stride == 0


@dataclass(frozen=True, slots=True)
class RandomBlocks(BlockRule):
    """Query block i attends to ``num_blocks`` of every ``out_of`` consecutive key blocks, drawn by seed and head.

    The draw depends only on i, the head and the seed: not on the length, the world size or the machine.
    """

    num_blocks: int
    out_of: int
    block_size: int
    seed: int

    def __repr__(self) -> str:
        return f"random_blocks({self.num_blocks / self.out_of}, seed={self.seed}, block_size={self.block_size})"

    @property
    def entry(self) -> list[Any]:
        return ["random_blocks", self.num_blocks, self.out_of, self.block_size, self.seed]

    def kind(self, kv_head: int, num_kv_heads: int) -> Hashable:
        return kv_head

    def sees_block(self, kv_head: int, num_kv_heads: int, query_block: Tensor, key_block: Tensor) -> Tensor:
        first, own = key_block // self.out_of * self.out_of, self._draw(kv_head, query_block, key_block)
        rank = torch.zeros_like(own)
        for other in range(self.out_of):
            draw = self._draw(kv_head, query_block, first + other)
            rank += ((draw < own) | ((draw == own) & (first + other < key_block))).to(rank.dtype)
        return rank < self.num_blocks

    def mask_between(self, kv_head: int, num_kv_heads: int, query_blocks: Tensor, key_blocks: Tensor) -> Tensor:
        # Rank all draws of the range at once: one draw per pair instead of P.
        first, last = int(key_blocks[0]), int(key_blocks[-1])
        start = first // self.out_of * self.out_of
        whole = torch.arange(start, last // self.out_of * self.out_of + self.out_of)
        draws = self._draw(kv_head, query_blocks[:, None], whole).view(len(query_blocks), -1, self.out_of)
        chosen = draws.argsort(dim=-1, stable=True)[..., : self.num_blocks]
        seen = torch.zeros_like(draws, dtype=torch.bool).scatter_(-1, chosen, True)
        return seen.view(len(query_blocks), -1)[:, first - start : last + 1 - start]

    def _draw(self, kv_head: int, query_block: Tensor, key_block: Tensor) -> Tensor:
        """A random number per pair; of every P consecutive key blocks, those with the smallest numbers are visible."""
        seed = splitmix64(torch.tensor(self.seed, device=query_block.device))
        return splitmix64(splitmix64(splitmix64(seed ^ kv_head) ^ query_block) ^ key_block)


@dataclass(frozen=True, slots=True)
class Hierarchical(BlockRule):
    """All blocks at a distance below ``near``; up to ``near * factor^l`` blocks away, every ``factor^l``-th block.

    Level l = 1 to ``levels - 1`` starts where the previous one ends and keeps the last of every ``factor^l`` blocks.
    """

    near: int
    levels: int
    factor: int
    block_size: int

    def __repr__(self) -> str:
        return f"hierarchical({self.near}, levels={self.levels}, factor={self.factor}, block_size={self.block_size})"

    @property
    def entry(self) -> list[Any]:
        return ["hierarchical", self.near, self.levels, self.factor, self.block_size]

    @property
    def period(self) -> int:
        return self.factor ** (self.levels - 1) * self.block_size

    @property
    def reach(self) -> tuple[int, int]:
        distance = self.near * self.factor ** (self.levels - 1) * self.block_size - 1
        return distance, distance

    def sees_block(self, kv_head: int, num_kv_heads: int, query_block: Tensor, key_block: Tensor) -> Tensor:
        distance = (query_block - key_block).abs()
        seen = distance < self.near
        reach = self.near
        for level in range(1, self.levels):
            coarse = self.factor**level
            inside = (distance >= reach) & (distance < self.near * coarse)
            seen = seen | (inside & (key_block % coarse == coarse - 1))
            reach = self.near * coarse
        return seen

    def last_query(self, kv_head: int, num_kv_heads: int, key: Tensor) -> Tensor:
        block, size = key // self.block_size, self.block_size
        reach = torch.full_like(block, self.near)
        for level in range(1, self.levels):
            coarse = self.factor**level
            reach = torch.where(block % coarse == coarse - 1, self.near * coarse, reach)
        return (block + reach) * size - 1


@dataclass(frozen=True, slots=True)
class BlockMask(BlockRule):
    """A block mask ``[heads or 1, query blocks, key blocks]``, stored as bits in row-major order."""

    bits: bytes
    shape: tuple[int, int, int]
    block_size: int

    def __repr__(self) -> str:
        return f"from_block_mask(<bool {list(self.shape)}>, block_size={self.block_size})"

    @property
    def entry(self) -> list[Any]:
        return ["block_mask", base64.b64encode(self.bits).decode(), list(self.shape), self.block_size]

    @property
    def mask(self) -> Tensor:
        """bool ``[heads or 1, query blocks, key blocks]``."""
        return _unpacked(self.bits, self.shape)

    def kind(self, kv_head: int, num_kv_heads: int) -> Hashable:
        return 0 if self.shape[0] == 1 else kv_head

    def sees_block(self, kv_head: int, num_kv_heads: int, query_block: Tensor, key_block: Tensor) -> Tensor:
        of_head = self.mask[0 if self.shape[0] == 1 else kv_head].to(query_block.device)
        inside = (query_block < self.shape[1]) & (key_block < self.shape[2])
        return of_head[query_block.clamp(max=self.shape[1] - 1), key_block.clamp(max=self.shape[2] - 1)] & inside

    def last_query(self, kv_head: int, num_kv_heads: int, key: Tensor) -> Tensor:
        of_head = self.mask[0 if self.shape[0] == 1 else kv_head]
        numbers = torch.arange(1, self.shape[1] + 1).unsqueeze(-1)
        last = (of_head * numbers).amax(0)  # one past the last query block that sees each key block
        return last[(key // self.block_size).clamp(max=self.shape[2] - 1)] * self.block_size - 1

    def check(self, num_positions: int, num_kv_heads: int) -> None:
        if self.shape[0] != 1 and self.shape[0] != num_kv_heads:
            raise ValueError(
                f"the block mask has {self.shape[0]} heads, got a call with {num_kv_heads} key/value heads; a mask "
                "with 1 head applies to all"
            )
        covered = min(self.shape[1], self.shape[2]) * self.block_size
        if num_positions > covered:
            raise ValueError(
                f"the block mask covers {covered} positions ({self.shape[1]} x {self.shape[2]} blocks of "
                f"{self.block_size}), got {num_positions}; make a mask of {-(-num_positions // self.block_size)} blocks"
            )


@functools.lru_cache(maxsize=4)
def _unpacked(bits: bytes, shape: tuple[int, int, int]) -> Tensor:
    size = shape[0] * shape[1] * shape[2]
    packed = torch.frombuffer(bytearray(bits), dtype=torch.uint8)
    flat = (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return flat.view(-1)[:size].view(shape).bool()


def packed_mask(mask: Tensor) -> bytes:
    """A bool tensor as bytes, eight entries per byte, the first in the lowest bit."""
    flat = torch.nn.functional.pad(mask.reshape(-1).to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    packed = (flat << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8).contiguous()
    return bytes(packed.untyped_storage())


_RULES: dict[str, type[Rule]] = {
    "window": Window,
    "rectangles": Rectangles,
    "strided_blocks": StridedBlocks,
    "random_blocks": RandomBlocks,
    "hierarchical": Hierarchical,
    "block_mask": BlockMask,
}


def rule_from_entry(name: str, *values: Any) -> Rule:
    """The rule with this :attr:`Rule.entry`."""
    if name == "rectangles":
        return Rectangles(tuple(tuple(rectangle) for rectangle in values[0]))
    if name == "block_mask":
        bits, shape, block_size = values
        return BlockMask(base64.b64decode(bits), tuple(shape), block_size)
    return _RULES[name](*values)
