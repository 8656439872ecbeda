"""Views of partials that list key blocks: their keys are gathered, a few problems at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dilated_attention_pytorch.plan.block_lists import BlockLists

from .operands import FactorName, Name, Operand, Operands, Role, Rows
from .views import PartialViews

_ELEMENTS_AT_ONCE = 1 << 19
"""Elements of gathered keys, and of scores, at a time on a CPU; they fit into its caches."""
_ELEMENTS_ELSEWHERE = 1 << 26
"""The same for other devices, which need more work per operation."""


def listed_views(partial: BlockLists, ratio: int, operands: Operands) -> Iterator[PartialViews]:
    """Every operand as ``[problems, 1, rows(, D)]``, a problem per query block and key/value head, a range at a time.

    The query heads of a key/value head become rows of one problem, ``ratio`` per row. ``"bias"``, of the scores, has
    the log-gates, and -inf where a key is not seen.
    """
    query, size = operands["query"].tensor, partial.block_size
    num_keys, num_listed = operands["key"].tensor.shape[1], partial.blocks.shape[3]
    columns = {name: _column(partial, operand) for name, operand in operands.items()}
    num_key_blocks = max(1, -(-num_keys // size))
    rows = torch.arange(num_key_blocks * size, device=query.device).view(-1, size)
    limit = _ELEMENTS_AT_ONCE if query.device.type == "cpu" else _ELEMENTS_ELSEWHERE
    step = max(1, limit // (num_listed * size * max(query.shape[3], partial.query_block_size * ratio)))
    blocks, query_blocks = partial.blocks.flatten(0, 2), partial.blocks.shape[2]
    gates = None if partial.log_gates is None else partial.log_gates.flatten(0, 2)
    for start in range(0, blocks.shape[0], step):
        problems = torch.arange(start, min(start + step, blocks.shape[0]), device=query.device)
        listed = blocks[start : start + step]
        present = listed.clamp(min=0)
        first = (problems // query_blocks * num_key_blocks).unsqueeze(1)
        some = _Problems(slice(start, start + len(problems)), (first + present).flatten(), len(problems))
        position = rows[present].flatten(1)
        is_hidden = (position >= num_keys) | (listed < 0).repeat_interleave(size, dim=1)
        bias = query.new_zeros(position.shape, dtype=operands["lse"].tensor.dtype)
        if gates is not None:
            bias = gates[start : start + step].to(bias.dtype).repeat_interleave(size, dim=1)
        bias = bias.masked_fill(is_hidden, float("-inf"))[:, None, None]
        if partial.is_causal:
            row = problems.unsqueeze(1) % query_blocks * partial.query_block_size + partial.query_offset
            row = row + torch.arange(partial.query_block_size, device=query.device)
            later = position[:, None] > row.repeat_interleave(ratio, dim=1).unsqueeze(-1)
            bias = bias.masked_fill(later.unsqueeze(1), float("-inf"))
        views = _ListedViews(columns, some, bias)
        yield views
        views.write_back()
    for column in columns.values():
        column.finish()


class _Problems(NamedTuple):
    """A range of problems."""

    number: slice
    key_blocks: Tensor
    """Listed key blocks of all sequences and heads, ``[problems * k]``."""
    num_problems: int


class _ListedViews(PartialViews):
    def __init__(self, columns: dict[Name | FactorName, _Column], some: _Problems, bias: Tensor) -> None:
        super().__init__({name: column.take(some) for name, column in columns.items()})
        self._columns, self._some = columns, some
        rows = self._tensors["query"].shape[2]
        self._tensors["bias"] = bias.expand(-1, -1, rows, -1)

    def add(self, name: Name, part: Tensor) -> None:
        self._columns[name].add(self._some, part)

    def overwrite(self, name: Name, whole: Tensor) -> None:
        self._tensors[name] = whole

    def write_back(self) -> None:
        """Store the query rows that were merged into."""
        for name, column in self._columns.items():
            if column.operand.role is Role.MERGED_INTO:
                column.stored[self._some.number] = self._tensors[name].to(column.stored.dtype)


class _Column:
    """One operand, stored problem by problem or block by block."""

    def __init__(self, partial: BlockLists, operand: Operand) -> None:
        self.partial = partial
        self.operand = operand
        stored = self.arranged(operand.tensor)
        self.stored = torch.zeros_like(stored) if operand.role is Role.ADDED_TO else stored

    def arranged(self, tensor: Tensor) -> Tensor:
        """The operand's rows, problem by problem or block by block."""
        raise NotImplementedError

    def take(self, some: _Problems) -> Tensor:
        """The operand of some problems."""
        return self.stored[some.number]

    def add(self, some: _Problems, part: Tensor) -> None:
        """Add to the operand of some problems."""
        self.stored[some.number] += part

    def finish(self) -> None:
        """Write what was merged or added to the operand."""
        if self.operand.role is Role.MERGED_INTO:
            self.operand.tensor.copy_(self.rows())
        elif self.operand.role is Role.ADDED_TO:
            self.operand.tensor.add_(self.rows())

    def rows(self) -> Tensor:
        """What is stored, in the operand's layout."""
        raise NotImplementedError


class _ListedQueryColumn(_Column):
    """``[problems, 1, rows * ratio(, D)]`` from ``[B, N, H(, D)]``; rows after the last one are filled."""

    def arranged(self, tensor: Tensor) -> Tensor:
        size, heads = self.partial.query_block_size, self.partial.blocks.shape[1]
        after = (0, 0) * (tensor.dim() - 2)
        padded = functional.pad(tensor, (*after, 0, -tensor.shape[1] % size), value=self.operand.fill)
        split = padded.unflatten(2, (heads, -1)).unflatten(1, (-1, size)).movedim(3, 1)
        self._split = split.shape
        return split.flatten(3, 4).flatten(0, 2).unsqueeze(1)

    def rows(self) -> Tensor:
        rows = self.stored.view(self._split).movedim(1, 3).flatten(3, 4).flatten(1, 2)
        return rows[:, : self.operand.tensor.shape[1]]


class _ListedKeyColumn(_Column):
    """``[B * G * key blocks, block_size(, D)]`` from ``[B, M, G(, D)]``; rows after the last one are zero."""

    def arranged(self, tensor: Tensor) -> Tensor:
        size, after = self.partial.block_size, (0, 0) * (tensor.dim() - 2)
        missing = max(1, -(-tensor.shape[1] // size)) * size - tensor.shape[1]
        padded = functional.pad(tensor, (*after, 0, missing)).transpose(1, 2)
        self._padded = padded.shape
        return padded.flatten(0, 1).unflatten(1, (-1, size)).flatten(0, 1)

    def take(self, some: _Problems) -> Tensor:
        taken = self.stored.index_select(0, some.key_blocks)
        return taken.view(some.num_problems, 1, -1, *self.stored.shape[2:])

    def add(self, some: _Problems, part: Tensor) -> None:
        self.stored.index_add_(0, some.key_blocks, part.reshape(-1, *self.stored.shape[1:]))

    def rows(self) -> Tensor:
        return self.stored.view(self._padded).transpose(1, 2)[:, : self.operand.tensor.shape[1]]


class _BlockColumn(_Column):
    """``[problems, k]`` from ``[B, G, query blocks, k]``; read for every key of a block, summed over them."""

    def arranged(self, tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 2)

    def take(self, some: _Problems) -> Tensor:
        return self.stored[some.number].repeat_interleave(self.partial.block_size, dim=1).unsqueeze(1)

    def add(self, some: _Problems, part: Tensor) -> None:
        self.stored[some.number] += part.flatten(1).unflatten(1, (-1, self.partial.block_size)).sum(-1)

    def rows(self) -> Tensor:
        return self.stored.view(self.operand.tensor.shape)


def _column(partial: BlockLists, operand: Operand) -> _Column:
    kinds: dict[Rows, type[_Column]] = {
        Rows.QUERY: _ListedQueryColumn,
        Rows.KEY: _ListedKeyColumn,
        Rows.BLOCKS: _BlockColumn,
    }
    return kinds[operand.rows](partial, operand)
