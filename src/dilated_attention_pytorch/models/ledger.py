"""Which rows of a text a cache holds under one pattern, and in which slot: integers, shared by layers and sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns import DilationGroup, Pattern

_Position = TypeVar("_Position", int, Tensor)


class Piece(NamedTuple):
    """Stored rows that some rows of a slab see: one dense partial."""

    rows: slice
    """Rows of the slab."""
    heads: slice
    """Key/value heads."""
    places: Tensor
    """Flat places ``slot * G + head`` of the stored rows, ``[keys * heads]``, key by key."""
    num_keys: int


class LedgerStep(NamedTuple):
    """What a slab of new rows reads from the storage, and how the storage changes."""

    is_token: bool
    """The slab is one token: it is stored, then reads itself too, then dead rows go. A longer slab reads the storage
    as it was and sees its own rows by itself; then dead rows go, and what is alive of the slab is stored."""
    pieces: list[Piece]
    keep: Tensor | None
    """Flat places of the rows that stay, in their new order, ``[slots * G]``; None if all stay where they are."""
    source: Tensor | None
    """Flat places ``row * G + head`` in the slab of the rows to store; None is all of them. A rank that shares the
    text with others stores rows of its own only, so these may be none."""
    target: Tensor
    """Flat places ``slot * G + head`` that they get."""
    num_slots: int
    """Slots in use when they are stored."""


@dataclass(slots=True)
class _Kind:
    """Key/value heads that select alike in every group: they store the same positions in the same slots."""

    heads: list[int]
    positions: Tensor
    """Positions of the slots at the last rebuild, ascending; on the CPU."""
    appended: list[int] = field(default_factory=list)

    @property
    def num_slots(self) -> int:
        return self.positions.shape[0] + len(self.appended)


@dataclass(slots=True)
class _Class:
    """Heads with one residue and one shift in one group, and where the rows of their current segment are."""

    group: DilationGroup
    offset: int
    shift: int
    heads: slice
    members: list[int]
    index: Tensor
    """``[capacity, members]`` flat places; the first ``count`` rows are in use."""
    count: int = 0

    def rows_in(self, start: int, stop: int) -> tuple[int, int]:
        """First and number of the class's positions in ``[start, stop)``, in the segment of ``start``."""
        begin, end = self.group.segment_bounds(start, self.shift)
        return self.group.selected(begin, self.offset, start, min(end, stop))

    def seen_by(self, position: int) -> tuple[int, int]:
        """First and number of the class's positions before ``position`` in its segment."""
        begin, _ = self.group.segment_bounds(position, self.shift)
        return self.group.selected(begin, self.offset, max(begin, 0), position)

    def alive(self, following: int) -> Tensor:
        """The class's positions that a token at ``following`` or later in its segment can still see, ascending."""
        first, count = self.seen_by(following)
        return first + torch.arange(count) * self.group.dilation_rate

    def piece(self, row: int, num_rows: int) -> Piece:
        """The stored rows of the class as ``num_rows`` rows of a slab see them, the first of them ``row``."""
        rate = self.group.dilation_rate
        span = slice(row, row + (num_rows - 1) * rate + 1, rate)
        return Piece(span, self.heads, self.index[: self.count].view(-1), self.count)

    def append(self, places: Tensor) -> None:
        if self.count == self.index.shape[0]:
            most = -(-self.group.segment_length // self.group.dilation_rate)
            grown = self.index.new_empty(min(most, 2 * self.count + 16), len(self.members))
            grown[: self.count] = self.index
            self.index = grown
        self.index[self.count] = places
        self.count += 1


class Ledger:
    """The rows alive after ``seen`` tokens: those that a later token can still see.

    Row p of key/value head g is alive iff for some group p is selected and lies in the segment of position ``seen``,
    the next token's. A head holds at most ``sum_i ceil(min(w_i, seen) / r_i)`` of them, in the order of the text; a
    row that several groups see is held once.

    Where several ranks share a text, each holds the rows of its own positions only: blocks of :attr:`block_length`
    positions go round the ranks, whoever computed them.

    Args:
        pattern: the layers' pattern.
        num_kv_heads: number G of key/value heads.
        device: where index tensors live.
        rank, num_ranks: the rank that this ledger is of, and how many share the text.
    """

    def __init__(
        self, pattern: Pattern, num_kv_heads: int, device: torch.device, *, rank: int = 0, num_ranks: int = 1
    ) -> None:
        if pattern.rules:
            raise NotImplementedError(
                f"the bounded cache holds the rows of dilated patterns, got {pattern!r}; decode with attend and query_offset"
            )
        self.pattern = pattern
        self.num_kv_heads = num_kv_heads
        self.rank, self.num_ranks = rank, num_ranks
        self.seen = 0
        groups = pattern.groups
        self.block_length = _block_length([group.dilation_rate for group in groups], num_ranks)
        kinds: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for head in range(num_kv_heads):
            name = tuple((group.offset(head, num_kv_heads), group.shift(head)) for group in groups)
            kinds.setdefault(name, []).append(head)
        self._kinds = [_Kind(heads, torch.empty(0, dtype=torch.int64)) for heads in kinds.values()]
        self._kind_of = {head: kind for kind in self._kinds for head in kind.heads}
        self._classes: list[_Class] = []
        for group in groups:
            alike: dict[tuple[int, int], list[int]] = {}
            for head in range(num_kv_heads):
                alike.setdefault((group.offset(head, num_kv_heads), group.shift(head)), []).append(head)
            for (offset, shift), heads in alike.items():
                for run in _arithmetic_runs(heads):
                    members = list(range(num_kv_heads))[run]
                    index = torch.empty(0, len(members), dtype=torch.int64, device=device)
                    self._classes.append(_Class(group, offset, shift, run, members, index))
        self._lattices = list({(c.group.segment_length, c.shift): c for c in self._classes}.values())
        self._device = device

    @property
    def rows_per_head(self) -> list[int]:
        """Rows alive, for each key/value head."""
        return [self._kind_of[head].num_slots for head in range(self.num_kv_heads)]

    def positions(self, head: int) -> list[int]:
        """The positions alive for one key/value head, ascending: slot s holds the s-th."""
        kind = self._kind_of[head]
        return [*kind.positions.tolist(), *kind.appended]

    def max_slots(self) -> int:
        """No text needs more slots: ``sum_i ceil(w_i / r_i)``, of which a rank owns a block more than its part."""
        most = [-(-group.segment_length // group.dilation_rate) for group in self.pattern.groups]
        return sum(min(rows, rows // self.num_ranks + self.block_length) for rows in most)

    def places_by_rank(self) -> list[Tensor]:
        """Flat places ``position * G + head`` of the rows alive, rank by rank.

        A rank's come in the order in which its ledger stores them when all tokens seen are one slab.
        """
        places = torch.cat([
            positions * self.num_kv_heads + head
            for kind in self._kinds
            for positions in [self._alive(kind, self.seen)]
            for head in kind.heads
        ])  # fmt: skip
        owners = self._owner(places // self.num_kv_heads)
        return [places[owners == rank] for rank in range(self.num_ranks)]

    def advance(self, num_new: int) -> LedgerStep:
        """Take ``num_new`` more tokens: what they read, and what becomes of the storage after them."""
        start, stop = self.seen, self.seen + num_new
        self.seen = stop
        selecting = [(one, *rows) for one in self._classes if (rows := one.rows_in(start, stop))[1]]
        if num_new != 1:
            pieces = [one.piece(row - start, rows) for one, row, rows in selecting if one.count]
            keep, source, target = self._rebuild(start, stop)
            return LedgerStep(False, pieces, keep, source, target, self._num_slots())
        single, target = self._append(start, [one for one, _, _ in selecting])
        pieces, num_slots = [one.piece(0, 1) for one, _, _ in selecting if one.count], self._num_slots()
        crosses = any(
            one.group.segment_bounds(start, one.shift) != one.group.segment_bounds(stop, one.shift)
            for one in self._lattices
        )
        keep = self._rebuild(stop, stop)[0] if crosses else None
        return LedgerStep(True, pieces, keep, single, target, num_slots)

    def _num_slots(self) -> int:
        return max(kind.num_slots for kind in self._kinds)

    def _owner(self, position: _Position) -> _Position:
        """The rank that holds a position, or each of a tensor of them."""
        return position // self.block_length % self.num_ranks

    def _owned(self, positions: Tensor) -> Tensor:
        """Those of ``positions`` that this rank holds."""
        return positions if self.num_ranks == 1 else positions[self._owner(positions) == self.rank]

    def _append(self, position: int, selecting: list[_Class]) -> tuple[Tensor | None, Tensor]:
        """Store one token if it is this rank's: the classes that select it grow by a row."""
        if self._owner(position) != self.rank:
            nothing = torch.empty(0, dtype=torch.int64, device=self._device)
            return nothing, nothing
        stored = {head for one in selecting for head in one.members}
        places = [0] * self.num_kv_heads
        for kind in self._kinds:
            if kind.heads[0] in stored:
                for head in kind.heads:
                    places[head] = kind.num_slots * self.num_kv_heads + head
                kind.appended.append(position)
        target = torch.tensor(places, device=self._device)
        for one in selecting:
            one.append(target[one.heads])
        if len(stored) == self.num_kv_heads:
            return None, target
        source = torch.tensor(sorted(stored), dtype=torch.int64, device=self._device)
        return source, target[source]

    def _rebuild(self, start: int, stop: int) -> tuple[Tensor | None, Tensor, Tensor]:
        """Any number of tokens: what is alive at ``stop``, from what was alive at ``start`` and what is new."""
        kept, sources, targets = {}, [], []
        dies = False
        for kind in self._kinds:
            old = torch.cat([kind.positions, torch.tensor(kind.appended, dtype=torch.int64)])
            alive = self._owned(self._alive(kind, stop))
            stays, comes = torch.isin(old, alive).nonzero().squeeze(1), alive[alive >= start]
            dies = dies or len(stays) < len(old)
            kind.positions, kind.appended = torch.cat([old[stays], comes]), []
            slots = torch.arange(len(stays), len(stays) + len(comes))
            for head in kind.heads:
                kept[head] = stays
                sources.append((comes - start) * self.num_kv_heads + head)
                targets.append(slots * self.num_kv_heads + head)
        keep = None
        if dies:
            # Heads that keep fewer rows than another fill up with row 0, in slots that nothing reads before it is set.
            places = torch.zeros(max(map(len, kept.values())), self.num_kv_heads, dtype=torch.int64)
            for head, stays in kept.items():
                places[: len(stays), head] = stays * self.num_kv_heads + head
            keep = places.view(-1).to(self._device)
        for one in self._classes:
            rows = self._owned(one.alive(stop))
            slots_of = [torch.searchsorted(self._kind_of[head].positions, rows) for head in one.members]
            index = torch.stack(slots_of, dim=1) * self.num_kv_heads + torch.tensor(one.members)
            one.index, one.count = index.to(self._device), len(rows)
        return keep, torch.cat(sources).to(self._device), torch.cat(targets).to(self._device)

    def _alive(self, kind: _Kind, following: int) -> Tensor:
        """The positions of one kind that some group shows to a later token, ``following`` being the next one's."""
        classes = [one.alive(following) for one in self._classes if kind.heads[0] in one.members]
        return torch.unique(torch.cat(classes))


def _block_length(rates: list[int], num_ranks: int) -> int:
    """The shortest block of positions that gives every rank equally many rows of every dilation class.

    Blocks of b positions go round p ranks, so that the rows of a class, r apart, fall on all b p places that are
    congruent modulo ``gcd(r, b p)``. A block holds equally many of these wherever it begins iff that divides b: the
    shortest such b is the part of ``lcm(r_i)`` whose prime factors divide p.
    """
    multiple, block = math.lcm(*rates), 1
    while (factor := math.gcd(multiple // block, num_ranks)) > 1:
        block *= factor
    return block


def _arithmetic_runs(heads: list[int]) -> list[slice]:
    """Ascending head numbers as slices: runs with a constant step, greedily."""
    runs, index = [], 0
    while index < len(heads):
        step = heads[index + 1] - heads[index] if index + 1 < len(heads) else 1
        stop = index + 1
        while stop < len(heads) and heads[stop] - heads[stop - 1] == step:
            stop += 1
        runs.append(slice(heads[index], heads[stop - 1] + 1, step))
        index = stop
    return runs
