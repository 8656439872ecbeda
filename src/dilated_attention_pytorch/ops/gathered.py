"""Problems whose keys lie in scattered blocks: their rows are gathered, a few problems at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.plan.gathered import Gathered, KeyLists

from .operands import FactorName, Name, Operand, Operands, Role, Rows
from .views import PartialViews

_GATHERED_ELEMENTS = 1 << 19
"""Elements of gathered keys at a time: few enough for a cache, enough for every core."""


def gathered_views(partial: Gathered, batch: int, ratio: int, operands: Operands) -> Iterator[PartialViews]:
    """Every operand as ``[problems, 1, rows(, D)]``; merged rows are written back before the next views are yielded.

    The query heads of a key/value head see the same keys and become rows of one problem, ``ratio`` per row.
    """
    query = operands["query"].tensor
    steps = [step for alike in partial.lists for step in _steps(alike, partial.unit * query.shape[-1], query.device)]
    for sequence in range(batch):
        for head in partial.heads:
            columns: dict[Name | FactorName, _QueryColumn | _KeyColumn] = {
                name: _QueryColumn(operand, sequence, head, ratio, is_first=partial.is_first)
                if operand.rows is Rows.QUERY
                else _KeyColumn(operand, partial, sequence, head)
                for name, operand in operands.items()
            }
            for step in steps:
                views = _GatheredViews(columns, step)
                yield views
                views.write_back()
            for column in columns.values():
                if isinstance(column, _KeyColumn):
                    column.finish()


class _Step(NamedTuple):
    """Some of the problems: their query rows and the units of their keys."""

    query_index: Tensor
    key_index: Tensor
    num_problems: int


def _steps(alike: KeyLists, elements_of_unit: int, device: torch.device) -> Iterator[_Step]:
    most = max(torch.get_num_threads(), _GATHERED_ELEMENTS // (alike.units.shape[1] * elements_of_unit))
    offsets = torch.arange(alike.rows_of_range)
    for rows, units in zip(alike.query_rows.split(most), alike.units.split(most), strict=True):
        index = (rows.unsqueeze(-1) + offsets).view(-1)
        yield _Step(index.to(device), units.reshape(-1).to(device), rows.shape[0])


class _GatheredViews(PartialViews):
    def __init__(self, columns: dict[Name | FactorName, _QueryColumn | _KeyColumn], step: _Step) -> None:
        super().__init__({name: column.take(step) for name, column in columns.items()})
        self._columns, self._step = columns, step

    def add(self, name: Name, part: Tensor) -> None:
        column = self._columns[name]
        if isinstance(column, _KeyColumn):
            column.add(self._step, part)
        else:
            self._tensors[name] += part

    def overwrite(self, name: Name, whole: Tensor) -> None:
        self._tensors[name] = whole.to(self._tensors[name].dtype)

    def write_back(self) -> None:
        """Store the query rows that were merged into or added to."""
        for name, column in self._columns.items():
            if isinstance(column, _QueryColumn):
                column.write_back(self._step, self._tensors[name])


class _QueryColumn:
    """The query rows of one sequence and the query heads of one key/value head."""

    def __init__(self, operand: Operand, sequence: int, head: int, ratio: int, *, is_first: bool) -> None:
        first = (head - operand.first_head) * ratio
        self._rows = operand.tensor[sequence, :, first : first + ratio]
        self._first_row = operand.first_row
        self._is_written = operand.role is not Role.READ
        self._is_overwritten = operand.role is Role.MERGED_INTO and is_first

    def take(self, step: _Step) -> Tensor:
        rows_of_problem = step.query_index.shape[0] // step.num_problems * self._rows.shape[1]
        shape = (step.num_problems, 1, rows_of_problem, *self._rows.shape[2:])
        if self._is_overwritten:
            return self._rows.new_empty(shape)
        return self._rows.index_select(0, step.query_index - self._first_row).view(shape)

    def write_back(self, step: _Step, tensor: Tensor) -> None:
        if self._is_written:
            rows = tensor.reshape(-1, *self._rows.shape[1:])
            self._rows.index_copy_(0, step.query_index - self._first_row, rows)


class _KeyColumn:
    """The key rows of one sequence and key/value head, unit by unit."""

    def __init__(self, operand: Operand, partial: Gathered, sequence: int, head: int) -> None:
        first = partial.first_key - operand.first_row
        stop = first + partial.num_units * partial.unit
        self._rows = operand.tensor[sequence, first:stop, head - operand.first_head]
        self._is_read = operand.role is Role.READ
        if self._is_read:
            self._units = self._rows.unflatten(0, (-1, partial.unit))
            if sum(alike.units.numel() for alike in partial.lists) > self._units.shape[0]:
                # One copy pays off if, on average, every unit is read more than once.
                self._units = self._units.contiguous()
        else:
            self._units = self._rows.new_zeros(self._rows.shape).unflatten(0, (-1, partial.unit))

    def take(self, step: _Step) -> Tensor:
        if not self._is_read:
            return self._units  # stands for the sum, which parts are only added to
        gathered = self._units.index_select(0, step.key_index)
        return gathered.view(step.num_problems, 1, -1, *self._rows.shape[1:])

    def add(self, step: _Step, part: Tensor) -> None:
        """Add one row for every key of every problem."""
        parts = part.reshape(step.key_index.shape[0], *self._units.shape[1:]).to(self._units.dtype)
        self._units.index_add_(0, step.key_index, parts)

    def finish(self) -> None:
        """Add the sums to the rows that they belong to."""
        if not self._is_read:
            self._rows += self._units.view(self._rows.shape)
