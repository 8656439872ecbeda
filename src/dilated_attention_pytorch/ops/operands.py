"""Operands of partials: tensors with their row space, origin and role."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from torch import Tensor

Name = Literal[
    "query",
    "key",
    "value",
    "out",
    "lse",
    "rest",
    "grad_out",
    "grad_lse",
    "grad_query",
    "grad_key",
    "grad_value",
    "total",
    "values",
    "key_bias",
    "sequences",
    "heads",
    "query_positions",
    "key_positions",
    "query_coordinates",
    "key_coordinates",
    "grad_gates",
    "grad_key_bias",
    "bias",
]
FactorName = tuple[Literal["left", "right", "gates"], int]
"""A term of a factor of a weighted sum."""


class Rows(Enum):
    """Row space of an operand: the rows and heads that it holds."""

    QUERY = "of the queries"
    KEY = "of the keys, where all query heads of a group share one head"
    REMOTE = "of the keys of one partial alone, which came from elsewhere"
    BLOCKS = "of listed key blocks, one number each"


class Role(Enum):
    """What a partial does with an operand."""

    READ = "read"
    MERGED_INTO = "merged into"
    """Query rows only; a partial that is the first to touch its rows overwrites them."""
    ADDED_TO = "added to"


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor ``[B, rows, heads(, D)]`` and the first row and key/value head that it holds."""

    tensor: Tensor
    rows: Rows = Rows.QUERY
    role: Role = Role.READ
    first_row: int = 0
    first_head: int = 0
    fill: float = 0.0
    """Value of rows after the last one, where a query block is ragged."""


Operands = dict[Name | FactorName, Operand]
