"""Problems whose keys lie in blocks here and there: their rows are copied together, a few problems at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dilated_attention_pytorch.planning import Gathered

from .operand import Operand, Role

_GATHERED_ELEMENTS = 1 << 18
"""Elements of the keys that lie together at a time: small enough for a cache, enough for every core."""


def gathered_views(partial: Gathered, batch: int, ratio: int, operands: list[Operand]) -> Iterator[list[Tensor]]:
    """Every operand as ``[problems, 1, rows(, D)]``; what was changed is written back before the next are yielded.

    The query heads of a key/value head see the same keys: they are rows of one problem, ``ratio`` for every row.
    """
    step = max(torch.get_num_threads(), _GATHERED_ELEMENTS // (partial.num_keys * operands[0].tensor.shape[-1]))
    for sequence in range(batch):
        for head in partial.heads:
            columns = [
                _QueryColumn(operand, partial, sequence, head, ratio)
                if operand.by_query
                else _KeyColumn(operand, partial, sequence, head)
                for operand in operands
            ]
            for start in range(0, partial.query_rows.shape[0], step):
                some = slice(start, start + step)
                tensors = [column.take(some) for column in columns]
                yield tensors
                for column, tensor in zip(columns, tensors, strict=True):
                    column.give_back(some, tensor)
            for column in columns:
                column.finish()


class _QueryColumn:
    """The query rows of one sequence and the query heads of one key/value head."""

    def __init__(self, operand: Operand, partial: Gathered, sequence: int, head: int, ratio: int) -> None:
        first = (head - operand.first_head) * ratio
        self._rows = operand.tensor[sequence, :, first : first + ratio]
        self._first = partial.query_rows - operand.first_row
        self._offsets = torch.arange(partial.num_queries)
        self._role = operand.role
        self._is_overwritten = operand.role is Role.MERGED_INTO and partial.is_first

    def _index(self, some: slice) -> Tensor:
        index = (self._first[some].unsqueeze(1) + self._offsets).view(-1)
        return index.to(self._rows.device)

    def take(self, some: slice) -> Tensor:
        problems = self._first[some].shape[0]
        shape = (problems, 1, self._offsets.shape[0] * self._rows.shape[1], *self._rows.shape[2:])
        if self._is_overwritten:
            return self._rows.new_empty(shape)
        return self._rows.index_select(0, self._index(some)).view(shape)

    def give_back(self, some: slice, tensor: Tensor) -> None:
        if self._role is not Role.READ:
            index = self._index(some)
            self._rows.index_copy_(0, index, tensor.view(index.shape[0], *self._rows.shape[1:]))

    def finish(self) -> None:
        pass


class _KeyColumn:
    """The key rows of one sequence and key/value head, unit by unit in one piece of memory."""

    def __init__(self, operand: Operand, partial: Gathered, sequence: int, head: int) -> None:
        first = partial.first_key - operand.first_row
        assert first >= 0
        rows = operand.tensor[sequence, first:, head - operand.first_head]
        self._rows = rows[: rows.shape[0] // partial.unit * partial.unit]
        self._units = partial.key_units
        self._role = operand.role
        self._num_keys = partial.num_keys
        self._unit = partial.unit
        if operand.role is Role.READ:
            self._stored = self._rows.contiguous()
        else:
            self._stored = torch.zeros(self._rows.shape, dtype=self._rows.dtype, device=self._rows.device)

    def _index(self, some: slice) -> Tensor:
        return self._units[some].reshape(-1).to(self._rows.device)

    def take(self, some: slice) -> Tensor:
        shape = (self._units[some].shape[0], 1, self._num_keys, *self._rows.shape[1:])
        if self._role is Role.ADDED_TO:
            return self._rows.new_zeros(shape)
        of_unit = self._stored.view(self._stored.shape[0] // self._unit, -1)
        return of_unit.index_select(0, self._index(some)).view(shape)

    def give_back(self, some: slice, tensor: Tensor) -> None:
        if self._role is Role.ADDED_TO:
            of_unit = self._stored.view(self._stored.shape[0] // self._unit, -1)
            index = self._index(some)
            of_unit.index_add_(0, index, tensor.view(index.shape[0], -1))

    def finish(self) -> None:
        if self._role is Role.ADDED_TO:
            self._rows += self._stored
