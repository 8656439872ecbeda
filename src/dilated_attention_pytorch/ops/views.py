"""The operands of a partial as views ``[problems, problems, rows(, D)]``, by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from dilated_attention_pytorch.plan.geometry import Partial

from .operands import FactorName, Name, Operand, Operands, Rows


class PartialViews:
    """The operands of one step of a partial, each ``[problems, problems, rows(, D)]``."""

    def __init__(self, tensors: Mapping[Name | FactorName, Tensor]) -> None:
        self._tensors = dict(tensors)

    def __getitem__(self, name: Name | FactorName) -> Tensor:
        return self._tensors[name]

    def get(self, name: Name | FactorName) -> Tensor | None:
        """The operand of that name; None without it."""
        return self._tensors.get(name)

    def overwrite(self, name: Name, whole: Tensor) -> None:
        """Set an operand that is merged into."""
        self._tensors[name].copy_(whole)

    def add(self, name: Name, part: Tensor) -> None:
        """Add to an operand. Where several problems share a row (stride 0) their parts are summed."""
        total = self._tensors[name]
        for dim in (0, 1):
            if total.stride(dim) == 0 and total.shape[dim] > 1:
                part = part.sum(dim, keepdim=True)
                total = total.narrow(dim, 0, 1)
        total += part

    def split(self, step: int) -> Iterator[PartialViews]:
        """The same problems in steps of ``step`` along the first axis."""
        for start in range(0, next(iter(self._tensors.values())).shape[0], step):
            yield PartialViews({name: tensor[start : start + step] for name, tensor in self._tensors.items()})


class _Layout(NamedTuple):
    """Location of an operand's rows, in elements: a problem starts at ``start + sum(index * stride)``."""

    start: int
    strides: tuple[int, ...]
    """Strides by sequence, by every axis of the partial, and by query head of a key/value head."""
    row: int
    num_rows: int


def strided_views(partial: Partial, batch: int, ratio: int, operands: Operands) -> Iterator[PartialViews]:
    """Views of a partial's rows in place; if it has more than two problem axes, the shorter ones are looped over."""
    sizes = (batch, *(axis.size for axis in partial.axes), ratio)
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    inner, outer = order[:2], order[2:]
    layouts = {name: _layout(operand, partial, ratio) for name, operand in operands.items()}
    for indices in itertools.product(*(range(sizes[index]) for index in outer)):
        tensors = {}
        for name, (start, strides, row, num_rows) in layouts.items():
            tensor = operands[name].tensor
            offset = start + sum(i * strides[index] for i, index in zip(indices, outer, strict=True))
            tensors[name] = tensor.as_strided(
                (sizes[inner[0]], sizes[inner[1]], num_rows, *tensor.shape[3:]),
                (strides[inner[0]], strides[inner[1]], row, *tensor.stride()[3:]),
                offset,
            )
        yield PartialViews(tensors)


def _layout(operand: Operand, partial: Partial, ratio: int) -> _Layout:
    of_batch, of_row, of_head = operand.tensor.stride()[:3]
    start = int(operand.tensor.storage_offset())
    if operand.rows is Rows.REMOTE:
        axes = (axis.heads * of_head for axis in partial.axes)
        return _Layout(start, (of_batch, *axes, 0), of_row, partial.num_keys)
    is_query = operand.rows is Rows.QUERY
    of_kv_head, of_head = (ratio * of_head, of_head) if is_query else (of_head, 0)
    row, num_rows = (partial.query_row, partial.num_queries) if is_query else (partial.key_row, partial.num_keys)
    start += (row - operand.first_row) * of_row + (partial.head - operand.first_head) * of_kv_head
    axes = (axis.rows * of_row + axis.heads * of_kv_head for axis in partial.axes)
    return _Layout(start, (of_batch, *axes, of_head), partial.step * of_row, num_rows)
