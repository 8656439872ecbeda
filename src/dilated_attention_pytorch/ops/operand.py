"""Operands of partials: tensors, where a tile begins in them, and what is done with them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from dilated_attention_pytorch.planning import Partial


class Role(Enum):
    """What a partial does with an operand."""

    READ = "read"
    MERGED_INTO = "merged into"
    """Of queries; a partial that is the first to touch its rows overwrites them."""
    ADDED_TO = "added to"


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor ``[B, rows, heads]`` or ``[B, rows, heads, D]`` that begins at a tile's first row and first head."""

    tensor: Tensor
    first_row: int
    first_head: int
    by_query: bool
    """Rows and heads are the queries'; else the keys', where all query heads of a group share one head."""
    role: Role = Role.READ

    def rows_of(self, partial: Partial) -> tuple[int, int]:
        """First row and number of rows of a partial."""
        if self.by_query:
            return partial.query_row - self.first_row, partial.num_queries
        return partial.key_row - self.first_row, partial.num_keys


class Views:
    """The operands of one step of a partial, each ``[problems, problems, rows(, D)]``, in the order they were given."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    def overwrite(self, index: int, whole: Tensor) -> None:
        """Set the operand of that index."""
        self.tensors[index].copy_(whole)

    def holds_sum(self, index: int, dtype: torch.dtype) -> bool:
        """Whether the operand of that index is memory to add to in that dtype, a row of its own for every problem."""
        total = self.tensors[index]
        return total.dtype == dtype and all(total.stride(dim) > 0 or total.shape[dim] == 1 for dim in (0, 1))

    def add(self, index: int, part: Tensor) -> None:
        """Add to the operand of that index. Where several problems share a row (stride 0) their parts are summed."""
        total = self.tensors[index]
        for dim in (0, 1):
            if total.stride(dim) == 0 and total.shape[dim] > 1:
                part = part.sum(dim, keepdim=True)
                total = total.narrow(dim, 0, 1)
        total += part
