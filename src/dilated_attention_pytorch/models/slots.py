"""Cache slots of key/value heads that store the same positions, and their visibility under rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns.blocks import HeadRule

_FREE = -1


class KeyRange(NamedTuple):
    """Stored rows of consecutive positions whose visibility to the rows of a slab follows from rules."""

    rows: slice
    """Rows of the slab that may attend to them."""
    heads: slice
    """Key/value heads."""
    indices: Tensor
    """Flat indices ``slot * G + head`` of the stored rows, ``[positions * heads]``, position-major."""
    position: int
    """Position of the first."""
    is_absent: Tensor | None
    """bool ``[positions]``: positions that are not stored, whose ``indices`` mean nothing. None if all are stored."""


class Slots:
    """Key/value heads with equal visibility under every group and rule: they store the same positions in equal slots.

    Args:
        heads: the heads, ascending.
        num_kv_heads: number G of all key/value heads.
        rules: the rules that apply to these heads.
    """

    def __init__(self, heads: list[int], num_kv_heads: int, rules: Sequence[HeadRule]) -> None:
        self.heads = heads
        self.rules = tuple(rules)
        self.num_slots = 0
        """Number of slots up to the highest one used since :meth:`refill`."""
        self._num_kv_heads = num_kv_heads
        self._by_slot = torch.empty(0, dtype=torch.int64)
        self._last = torch.empty(0, dtype=torch.int64)
        self._free: list[int] = []

    @property
    def positions(self) -> Tensor:
        """The position in every slot, negative in free slots; on the CPU."""
        return self._by_slot[: self.num_slots]

    @property
    def num_rows(self) -> int:
        """Number of stored rows."""
        return self.num_slots - len(self._free)

    def sorted_positions(self) -> Tensor:
        """Stored positions, ascending."""
        positions = self.positions
        return positions[positions != _FREE].sort().values

    def last_query(self, positions: Tensor) -> Tensor:
        """The last query to which rules make each position visible, or an upper bound; negative = none."""
        last = torch.full_like(positions, -1)
        for rule in self.rules:
            last = torch.maximum(last, rule.last_query(self.heads[0], self._num_kv_heads, positions))
        return last

    def last_query_of(self, position: int) -> int:
        """:meth:`last_query` for one position."""
        return int(self.last_query(torch.tensor([position]))[0]) if self.rules else -1

    def refill(self, positions: Tensor) -> None:
        """Reassign slots: slot s holds the s-th of ``positions``, all others are free."""
        self._by_slot, self._last, self._free = positions, self.last_query(positions), []
        self.num_slots = len(positions)

    def append(self, position: int) -> int:
        """Assign a slot to one more position, a free one if possible; returns the slot."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = self.num_slots
            if slot == len(self._by_slot):
                more = torch.full((slot // 2 + 16,), _FREE)
                self._by_slot, self._last = torch.cat([self._by_slot, more]), torch.cat([self._last, more])
            self.num_slots += 1
        self._by_slot[slot] = position
        self._last[slot] = self.last_query_of(position)
        return slot

    def release(self, following: int, still_seen: Callable[[], Tensor]) -> None:
        """Free slots whose positions no rule makes visible from ``following`` on, except positions ``still_seen``."""
        if not self.rules:
            return
        positions = self.positions
        dead = (positions != _FREE) & (self._last[: self.num_slots] < following)
        if dead.any():
            dead &= ~torch.isin(positions, still_seen())
            for slot in dead.nonzero().squeeze(1).tolist():
                self._by_slot[slot] = _FREE
                self._free.append(slot)

    def seen_by_rule(self, rule: HeadRule, query: int) -> Tensor:
        """The slots visible to one query under a rule; no slot holds a position after the query's."""
        positions = self.positions
        seen = rule.sees(self.heads[0], self._num_kv_heads, torch.tensor(query), positions)
        return (seen & (positions != _FREE)).nonzero().squeeze(1)

    def indices(self, slots: Tensor, heads: slice) -> Tensor:
        """Flat indices ``slot * G + head`` for all ``slots`` and ``heads``."""
        members = torch.arange(self._num_kv_heads)[heads]
        return (slots.unsqueeze(1) * self._num_kv_heads + members).view(-1)

    def key_ranges(self, start: int, stop: int, largest_gap: int, device: torch.device) -> Iterator[KeyRange]:
        """Rows that rules may make visible to queries ``[start, stop)``; gaps up to ``largest_gap`` are bridged."""
        if not self.rules:
            return
        positions, slots = self.positions.sort()
        last = self.last_query(positions)
        is_seen = (positions != _FREE) & (last >= start)
        positions, slots, last = positions[is_seen], slots[is_seen], last[is_seen]
        if not len(positions):
            return
        ends = ((positions[1:] - positions[:-1]) > largest_gap).nonzero().squeeze(1) + 1
        parts = zip(*(tensor.tensor_split(ends) for tensor in (positions, slots, last)), strict=True)
        for run_positions, run_slots, run_last in parts:
            rows = slice(0, min(stop, int(run_last.max()) + 1) - start)
            first = int(run_positions[0])
            dense = run_slots.new_zeros(int(run_positions[-1]) + 1 - first)
            dense[run_positions - first] = run_slots
            is_absent = torch.ones(dense.shape, dtype=torch.bool)
            is_absent[run_positions - first] = False
            for heads in arithmetic_runs(self.heads):
                absent = is_absent.to(device) if is_absent.any() else None
                yield KeyRange(rows, heads, self.indices(dense, heads).to(device), first, absent)


def arithmetic_runs(heads: list[int]) -> list[slice]:
    """Ascending head indices as slices with a constant step, greedily."""
    runs, index = [], 0
    while index < len(heads):
        step = heads[index + 1] - heads[index] if index + 1 < len(heads) else 1
        stop = index + 1
        while stop < len(heads) and heads[stop] - heads[stop - 1] == step:
            stop += 1
        runs.append(slice(heads[index], heads[stop - 1] + 1, step))
        index = stop
    return runs
