"""Bookkeeping of the rows that a cache holds under one pattern and of their slots, shared by layers and sequences."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.patterns.dilated import DilationGroup
from dilated_attention_pytorch.patterns.rules import NO_END

from .slots import KeyRange, Slots, arithmetic_runs

_Position = TypeVar("_Position", int, Tensor)


class VisibleKeys(NamedTuple):
    """Stored rows visible to some rows of a slab: one dense partial."""

    rows: slice
    """Rows of the slab."""
    heads: slice
    """Key/value heads."""
    indices: Tensor
    """Flat indices ``slot * G + head`` of the stored rows, ``[keys * heads]``, key-major."""
    num_keys: int


class KeysByHead(NamedTuple):
    """Stored rows that one token sees, all heads in one table."""

    indices: Tensor
    """Flat indices ``slot * G + head``, ``[G, keys]``; 0 where a head sees fewer rows than another."""
    is_absent: Tensor | None
    """bool ``[G, keys]``, True = no row; None = every head sees equally many."""


@dataclass(frozen=True, eq=False)
class CacheIndexStep:
    """What a slab of new rows reads from the storage, and how the storage changes."""

    is_token: bool
    """The slab is one token: it is stored, attends to the storage including itself, then dead rows are dropped. A
    longer slab attends to the old storage and to its own rows; then dead rows are dropped and its live rows stored."""
    visible_keys: list[VisibleKeys]
    key_ranges: list[KeyRange]
    """For a longer slab: stored rows visible under rules. For one token they are among ``visible_keys``."""
    keep: Tensor | None
    """Flat indices of the rows to keep, in their new order, ``[slots * G]``; None if all stay in place."""
    source: Tensor | None
    """Flat indices ``row * G + head`` in the slab of the rows to store; None = all. A rank that shares the sequence
    stores only its own rows, so there may be none."""
    target: Tensor
    """Flat indices ``slot * G + head`` of the slots to store them in."""
    num_slots: int
    """Number of slots in use after storing."""
    num_kv_heads: int

    @functools.cached_property
    def keys_by_head(self) -> KeysByHead:
        """``visible_keys`` of one token as one list per key/value head, for all layers with this pattern."""
        counts = [0] * self.num_kv_heads
        placed = []
        for keys in self.visible_keys:
            heads = range(self.num_kv_heads)[keys.heads]
            first = max(counts[head] for head in heads)
            placed.append((keys, first))
            for head in heads:
                counts[head] = first + keys.num_keys
        indices = self.target.new_zeros(self.num_kv_heads, max(counts))
        is_absent = torch.ones_like(indices, dtype=torch.bool)
        for keys, first in placed:
            columns = slice(first, first + keys.num_keys)
            indices[keys.heads, columns] = keys.indices.view(keys.num_keys, -1).T
            is_absent[keys.heads, columns] = False
        is_ragged = sum(keys.indices.numel() for keys in self.visible_keys) < indices.numel()
        return KeysByHead(indices, is_absent if is_ragged else None)


@dataclass(slots=True)
class _Class:
    """Heads with equal residue and shift in one group, and the slots of the rows of their current segment."""

    group: DilationGroup
    offset: int
    shift: int
    heads: slice
    members: list[int]
    index: Tensor
    """``[capacity, members]`` flat indices; the first ``count`` rows are in use."""
    count: int = 0

    def rows_in(self, start: int, stop: int) -> tuple[int, int]:
        """First position and number of positions of the class in ``[start, stop)``, in the segment of ``start``."""
        begin, end = self.group.segment_bounds(start, self.shift)
        return self.group.selected(begin, self.offset, start, min(end, stop))

    def seen_by(self, position: int) -> tuple[int, int]:
        """First position and number of positions of the class before ``position`` in its segment."""
        begin, _ = self.group.segment_bounds(position, self.shift)
        return self.group.selected(begin, self.offset, max(begin, 0), position)

    def alive(self, following: int) -> Tensor:
        """The class's positions visible to a token at ``following`` or later in its segment, ascending."""
        first, count = self.seen_by(following)
        return first + torch.arange(count) * self.group.dilation_rate

    def visible_keys(self, row: int, num_rows: int) -> VisibleKeys:
        """The stored rows of the class as a partial for ``num_rows`` rows of a slab, starting at ``row``."""
        rate = self.group.dilation_rate
        span = slice(row, row + (num_rows - 1) * rate + 1, rate)
        return VisibleKeys(span, self.heads, self.index[: self.count].view(-1), self.count)

    def append(self, indices: Tensor) -> None:
        if self.count == self.index.shape[0]:
            most = -(-self.group.segment_length // self.group.dilation_rate)
            grown = self.index.new_empty(min(most, 2 * self.count + 16), len(self.members))
            grown[: self.count] = self.index
            self.index = grown
        self.index[self.count] = indices
        self.count += 1


class CacheIndex:
    """The live rows after ``seen`` tokens: those that a later token can still attend to.

    Row p of key/value head g is live iff some group selects p and p lies in the segment of position ``seen`` (the next
    token's), or some rule makes it visible to a query from ``seen`` on (:meth:`HeadRule.last_query`). For groups, a
    head holds at most ``sum_i ceil(min(w_i, seen) / r_i)`` rows; for a window, the rows within its reach; for global
    tokens, these tokens; for blocks, all rows of blocks that a later block selects. A row that several groups and rules
    select is stored once and counted as often as it is selected.

    If several ranks share a sequence, each holds only the rows of its own positions: blocks of :attr:`block_length`
    positions are dealt to the ranks round-robin, whichever rank computed them.

    Args:
        pattern: the layers' pattern.
        num_kv_heads: number G of key/value heads.
        device: device of the index tensors.
        rank, num_ranks: this rank, and the number of ranks that share the sequence.

    Raises:
        NotImplementedError: the pattern has segments of unequal length.
    """

    def __init__(
        self, pattern: Pattern, num_kv_heads: int, device: torch.device, *, rank: int = 0, num_ranks: int = 1
    ) -> None:
        if any(group.boundaries is not None for group in pattern.groups):
            raise NotImplementedError(
                "a bounded cache needs segments of one length, and a SegmentedPattern has ragged ones: "
                f"got {pattern!r}; decode with attend and query_offset"
            )
        self.pattern = pattern
        self.num_kv_heads = num_kv_heads
        self.rank, self.num_ranks = rank, num_ranks
        self.seen = 0
        groups = pattern.groups
        self.block_length = _block_length([group.dilation_rate for group in groups], num_ranks)
        kinds: dict[tuple[Hashable, ...], list[int]] = {}
        for head in range(num_kv_heads):
            of_groups = [(group.offset(head, num_kv_heads), group.shift(head)) for group in groups]
            name = (*of_groups, *(rule.kind(head, num_kv_heads) for rule in pattern.rules))
            kinds.setdefault(name, []).append(head)
        self._kinds = [
            Slots(
                heads, num_kv_heads, [rule for rule in pattern.rules if rule.kind(heads[0], num_kv_heads) is not None]
            )
            for heads in kinds.values()
        ]
        self._kind_of = {head: kind for kind in self._kinds for head in kind.heads}
        self._classes: list[_Class] = []
        for group in groups:
            alike: dict[tuple[int, int], list[int]] = {}
            for head in range(num_kv_heads):
                alike.setdefault((group.offset(head, num_kv_heads), group.shift(head)), []).append(head)
            for (offset, shift), heads in alike.items():
                for run in arithmetic_runs(heads):
                    members = list(range(num_kv_heads))[run]
                    index = torch.empty(0, len(members), dtype=torch.int64, device=device)
                    self._classes.append(_Class(group, offset, shift, run, members, index))
        self._lattices = list({(c.group.segment_length, c.shift): c for c in self._classes}.values())
        self._device = device

    @property
    def rows_per_head(self) -> list[int]:
        """Number of live rows, per key/value head."""
        return [self._kind_of[head].num_rows for head in range(self.num_kv_heads)]

    def positions(self, head: int) -> list[int]:
        """Live positions of one key/value head, ascending."""
        positions: list[int] = self._kind_of[head].sorted_positions().tolist()
        return positions

    def max_slots(self) -> int:
        """Upper bound of the number of slots, ``sum_i ceil(w_i / r_i)``; a rank of several needs its part plus a block.

        A window needs its reach plus one; other rules are not bounded here.
        """
        most = [-(-group.segment_length // group.dilation_rate) for group in self.pattern.groups]
        for rule in self.pattern.rules:
            before, _ = rule.band(is_causal=True)
            most.append(NO_END if before is None else before + 1)
        return sum(min(rows, rows // self.num_ranks + self.block_length) for rows in most)

    def indices_by_rank(self) -> list[Tensor]:
        """Flat indices ``position * G + head`` of the live rows, per rank.

        In the order in which each rank's cache index stores them when all tokens come as one slab.
        """
        indices = torch.cat(
            [
                positions * self.num_kv_heads + head
                for kind in self._kinds
                for positions in [self._alive(kind, self.seen, torch.arange(self.seen))]
                for head in kind.heads
            ]
        )
        owners = self._owner(indices // self.num_kv_heads)
        return [indices[owners == rank] for rank in range(self.num_ranks)]

    def advance(self, num_new: int) -> CacheIndexStep:
        """Advance by ``num_new`` tokens: what they read, and how the storage changes."""
        start, stop = self.seen, self.seen + num_new
        self.seen = stop
        selecting = [(row_class, *rows) for row_class in self._classes if (rows := row_class.rows_in(start, stop))[1]]
        if num_new != 1:
            visible_keys = [
                row_class.visible_keys(row - start, rows) for row_class, row, rows in selecting if row_class.count
            ]
            # Ranks hold alternating blocks of positions; the gaps belong to other ranks.
            gap = (self.num_ranks - 1) * self.block_length + 1
            key_ranges = [
                key_range for kind in self._kinds for key_range in kind.key_ranges(start, stop, gap, self._device)
            ]
            keep, source, target = self._rebuild(start, stop)
            return CacheIndexStep(
                False, visible_keys, key_ranges, keep, source, target, self._num_slots(), self.num_kv_heads
            )
        single, target = self._append(start, [row_class for row_class, _, _ in selecting])
        visible_keys, num_slots = (
            [row_class.visible_keys(0, 1) for row_class, _, _ in selecting if row_class.count],
            self._num_slots(),
        )
        visible_keys += [row_class for kind in self._kinds for row_class in self._visible_under_rules(kind, start)]
        crosses = any(
            row_class.group.segment_bounds(start, row_class.shift)
            != row_class.group.segment_bounds(stop, row_class.shift)
            for row_class in self._lattices
        )
        keep = None
        if crosses:
            keep, _, _ = self._rebuild(stop, stop)
        else:
            for kind in self._kinds:
                kind.release(stop, functools.partial(self._alive_of_groups, kind, stop))
        return CacheIndexStep(True, visible_keys, [], keep, single, target, num_slots, self.num_kv_heads)

    def _visible_under_rules(self, kind: Slots, position: int) -> Iterator[VisibleKeys]:
        """Stored rows visible to a token under every rule, including itself if it is stored."""
        for rule in kind.rules:
            slots = kind.seen_by_rule(rule, position)
            if len(slots):
                for heads in arithmetic_runs(kind.heads):
                    yield VisibleKeys(slice(0, 1), heads, kind.indices(slots, heads).to(self._device), len(slots))

    def _num_slots(self) -> int:
        return max(kind.num_slots for kind in self._kinds)

    def _owner(self, position: _Position) -> _Position:
        """The rank that holds a position; elementwise for a tensor."""
        return position // self.block_length % self.num_ranks

    def _owned(self, positions: Tensor) -> Tensor:
        """The subset of ``positions`` that this rank holds."""
        return positions if self.num_ranks == 1 else positions[self._owner(positions) == self.rank]

    def _append(self, position: int, selecting: list[_Class]) -> tuple[Tensor | None, Tensor]:
        """Store one token if it is this rank's: the classes that select it grow by a row, and rules may keep it."""
        if self._owner(position) != self.rank:
            nothing = torch.empty(0, dtype=torch.int64, device=self._device)
            return nothing, nothing
        stored = {head for row_class in selecting for head in row_class.members}
        indices = [0] * self.num_kv_heads
        for kind in self._kinds:
            if kind.heads[0] in stored or kind.last_query_of(position) >= position:
                slot = kind.append(position)
                for head in kind.heads:
                    indices[head] = slot * self.num_kv_heads + head
                stored.update(kind.heads)
        target = torch.tensor(indices, device=self._device)
        for row_class in selecting:
            row_class.append(target[row_class.heads])
        if len(stored) == self.num_kv_heads:
            return None, target
        source = torch.tensor(sorted(stored), dtype=torch.int64, device=self._device)
        return source, target[source]

    def _rebuild(self, start: int, stop: int) -> tuple[Tensor | None, Tensor, Tensor]:
        """Any number of tokens: the live rows at ``stop``, from the live rows at ``start`` and the new rows."""
        kept, sources, targets = {}, [], []
        dies = False
        for kind in self._kinds:
            old = kind.positions
            # Only rules need every row as a candidate.
            candidates = torch.cat([old, torch.arange(start, stop)]) if kind.rules else old
            alive = self._owned(self._alive(kind, stop, candidates))
            stays, comes = torch.isin(old, alive).nonzero().squeeze(1), alive[alive >= start]
            stays = stays[old[stays].argsort()]
            dies = dies or not torch.equal(stays, torch.arange(len(old)))
            kind.refill(torch.cat([old[stays], comes]))
            slots = torch.arange(len(stays), len(stays) + len(comes))
            for head in kind.heads:
                kept[head] = stays
                sources.append((comes - start) * self.num_kv_heads + head)
                targets.append(slots * self.num_kv_heads + head)
        keep = None
        if dies:
            # Heads with fewer rows than another are filled with row 0, in slots that are not read before being set.
            indices = torch.zeros(max(map(len, kept.values())), self.num_kv_heads, dtype=torch.int64)
            for head, stays in kept.items():
                indices[: len(stays), head] = stays * self.num_kv_heads + head
            keep = indices.view(-1).to(self._device)
        for row_class in self._classes:
            rows = self._owned(row_class.alive(stop))
            slots_of = [torch.searchsorted(self._kind_of[head].positions, rows) for head in row_class.members]
            index = torch.stack(slots_of, dim=1) * self.num_kv_heads + torch.tensor(row_class.members)
            row_class.index, row_class.count = index.to(self._device), len(rows)
        return keep, torch.cat(sources).to(self._device), torch.cat(targets).to(self._device)

    def _alive(self, kind: Slots, following: int, candidates: Tensor) -> Tensor:
        """Positions that some group or rule makes visible from position ``following`` on, ascending.

        Rules consider only ``candidates``; negative ones are ignored.
        """
        by_rules = candidates[(candidates >= 0) & (kind.last_query(candidates) >= following)] if kind.rules else None
        of_groups = self._alive_of_groups(kind, following)
        return of_groups if by_rules is None else torch.unique(torch.cat([of_groups, by_rules]))

    def _alive_of_groups(self, kind: Slots, following: int) -> Tensor:
        classes = [row_class.alive(following) for row_class in self._classes if kind.heads[0] in row_class.members]
        return torch.unique(torch.cat(classes)) if classes else torch.empty(0, dtype=torch.int64)


def _block_length(rates: list[int], num_ranks: int) -> int:
    """The shortest block of positions that gives every rank equally many rows of every dilation class.

    Blocks of b positions are dealt to p ranks round-robin, so the rows of a class, r apart, visit all residues modulo
    ``b p`` that are congruent modulo ``gcd(r, b p)``. Each block holds equally many of them, wherever it begins, iff
    that divides b. The shortest such b is the part of ``lcm(r_i)`` whose prime factors divide p.
    """
    multiple, block = math.lcm(*rates), 1
    while (factor := math.gcd(multiple // block, num_ranks)) > 1:
        block *= factor
    return block
