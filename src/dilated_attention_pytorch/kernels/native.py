"""One partial by the package's own CPU kernels, compiled for the machine at hand: see ``csrc/``.

The kernels read rows and heads where they lie, at whatever stride but the last, and merge into running results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.planning import Gathered, Partial

from .compilation import load
from .masks import Masks

KEYS_OF_WINDOW = 8192
"""Keys of which queries see more are merged window by window: results of a row are then written more than once."""
ROWS_OF_STREAM = 16
"""Query rows of a key/value head that are so few that keys are read row by row, and may lie anywhere."""
_NO_BOUND = 1 << 60


class Place(NamedTuple):
    """The first row and the first key/value head that a tensor begins with."""

    row: int
    head: int


WHOLE = Place(0, 0)


def is_written_once(partial: Partial | Gathered) -> bool:
    """Whether every row of the output is merged into once."""
    return isinstance(partial, Gathered) or partial.num_keys <= KEYS_OF_WINDOW


def merge_partial(
    partial: Partial | Gathered,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    masks: Masks,
    *,
    ratio: int,
    scale: float,
    of_out: Place = WHOLE,
    first_sequence: int = 0,
    is_remote: bool = False,
    seen_rows: Tensor | None = None,
) -> None:
    """Merge what the queries of a partial see into ``out`` and ``lse``, which is -inf where nothing was merged yet.

    Args:
        partial: which rows see which; without phantom keys.
        query: ``[B, N, H, D]``, float16, bfloat16 or float32; key, value: ``[B, M, G, D]``.
        out: ``[B, rows, heads, D]``, from the place ``of_out`` on. Float32; of the query's dtype if every row is
            written once.
        lse: float32 ``[B, N, H]``.
        masks: keys and pairs that are left out.
        ratio: query heads of a key/value head.
        scale: factor of the scores, not negative.
        first_sequence: of the whole batch, the sequence that operands begin with.
        is_remote: keys and values are the rows and heads of the partial alone, one row after the other.
        seen_rows: int64 ``[heads, count]``, the rows of remote keys that are seen, of every head; None is all of them.
            Of at most :data:`ROWS_OF_STREAM` queries of a key/value head, without dropout.
    """
    load()
    of_keys = Place(0, partial.head) if is_remote and isinstance(partial, Partial) else WHOLE
    geometry = _geometry(partial, query, is_remote=is_remote)
    if seen_rows is not None:
        assert isinstance(partial, Partial)
        assert partial.num_queries * ratio <= ROWS_OF_STREAM
        assert masks.seed is None
        num_heads, count = seen_rows.shape
        ends = torch.arange(1, num_heads + 1) * count
        numbers, heads, axes, *_ = geometry
        geometry = ([*numbers[:-1], 1], heads, axes, None, None, seen_rows.reshape(-1), ends)
    torch.ops.dilated_attention_native.attend(
        query, key, value, out, lse, [*of_out, *of_keys], ratio, *geometry, *_arguments(masks, key, first_sequence),
        scale,
    )  # fmt: skip


def add_gradients(
    partial: Partial | Gathered,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None,
    grads: tuple[Tensor, Tensor, Tensor],
    masks: Masks,
    *,
    ratio: int,
    scale: float,
    of_grad_query: Place = WHOLE,
    of_grad_keys: Place = WHOLE,
    first_sequence: int = 0,
    is_remote: bool = False,
) -> None:
    """Add a partial's gradients to those of query, key and value, float32, under the merged ``out`` and ``lse``.

    ``lse`` is an infinity of either sign in rows without a key.
    """
    load()
    of_keys = Place(0, partial.head) if is_remote and isinstance(partial, Partial) else WHOLE
    places = [*of_grad_query, *(of_keys if is_remote else of_grad_keys), *of_keys]
    torch.ops.dilated_attention_native.attend_backward(
        grad_out, query, key, value, out, lse, grad_lse, *grads, places, ratio,
        *_geometry(partial, query, is_remote=is_remote), *_arguments(masks, key, first_sequence), scale,
    )  # fmt: skip


class Listed(NamedTuple):
    """Key blocks that the query blocks of every head see, as the kernels read them; without -1 and gates of -inf."""

    block_size: int
    query_block_size: int
    last: int
    """How far after its own position the last key is that a query row sees, the first rows of both being at 0."""
    units: Tensor
    """Blocks of all lists, one list after the other, ascending in each."""
    ends: Tensor
    """Where each list ends."""
    gates: Tensor | None
    """float32, of every unit."""
    places: tuple[Tensor, Tensor]
    """Where the units come from: the order of blocks in their lists, and which of them are there."""

    def by_block(self, of_units: Tensor) -> Tensor:
        """One number a unit as one a listed block, ``[B, G, query blocks, k]``; 0 for those that are left out."""
        order, is_there = self.places
        ascending = of_units.new_zeros(order.shape)
        ascending[is_there] = of_units
        return torch.empty_like(ascending).scatter_(-1, order, ascending)


def listed(
    blocks: Tensor,
    log_gates: Tensor | None,
    *,
    block_size: int,
    query_block_size: int,
    is_causal: bool,
    query_offset: int,
) -> Listed:
    """The lists ``blocks [B, G, query blocks, k]`` and their log-gates as the kernels read them."""
    ascending, order = blocks.sort(dim=-1, stable=True)
    is_there, gates = ascending >= 0, None
    if log_gates is not None:
        gates = log_gates.float().gather(-1, order)
        is_there &= gates != -torch.inf
        gates = gates[is_there]
    return Listed(
        block_size, query_block_size, query_offset if is_causal else _NO_BOUND, ascending[is_there],
        is_there.sum(-1).flatten().cumsum(0), gates, (order, is_there),
    )  # fmt: skip


def merge_listed(
    lists: Listed, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, masks: Masks, *, scale: float
) -> None:
    """Merge what the query blocks see of their lists into ``out``, of the query's dtype, and ``lse``, -inf so far.

    Operands are those of :func:`merge_partial`, all of them whole. ``scale`` is positive, and no gate is larger in size
    than ``2**100`` times it.
    """
    if query.shape[1] == 0:
        return
    load()
    ratio = query.shape[2] // key.shape[2]
    torch.ops.dilated_attention_native.attend(
        query, key, value, out, lse, [*WHOLE, *WHOLE], ratio, *_geometry_of_lists(lists, query, key),
        *_arguments(masks, key, 0), scale, lists.gates,
    )  # fmt: skip


def add_listed_gradients(
    lists: Listed,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None,
    grads: tuple[Tensor, Tensor, Tensor],
    masks: Masks,
    *,
    scale: float,
) -> Tensor | None:
    """Add the gradients of query, key and value to ``grads``, float32; return those of the gates, one a unit."""
    grad_gates = None if lists.gates is None else torch.zeros_like(lists.gates)
    if query.shape[1] == 0:
        return grad_gates
    load()
    ratio = query.shape[2] // key.shape[2]
    torch.ops.dilated_attention_native.attend_backward(
        grad_out, query, key, value, out, lse, grad_lse, *grads, [*WHOLE, *WHOLE, *WHOLE], ratio,
        *_geometry_of_lists(lists, query, key), *_arguments(masks, key, 0), scale, lists.gates, grad_gates,
    )  # fmt: skip
    return grad_gates


def _geometry_of_lists(lists: Listed, query: Tensor, key: Tensor) -> tuple[Any, ...]:
    """As ``csrc/library.cpp`` reads it."""
    num_queries, num_keys = query.shape[1], key.shape[1]
    row_ends = (torch.arange(-(-num_queries // lists.query_block_size)) + 1) * lists.query_block_size
    unit = min(lists.block_size, max(1, num_keys))
    numbers = [query.shape[0], 0, 0, 0, num_keys, 1, 1, -_NO_BOUND, lists.last, unit]
    return numbers, list(range(key.shape[2])), [], None, row_ends.clamp_(max=num_queries), lists.units, lists.ends


def _geometry(partial: Partial | Gathered, query: Tensor, *, is_remote: bool) -> tuple[Any, ...]:
    """As ``csrc/library.cpp`` reads it."""
    sequences, unbounded = query.shape[0], (-_NO_BOUND, _NO_BOUND)
    if isinstance(partial, Gathered):
        lists = partial.lists
        offsets = [torch.arange(alike.rows_of_range) for alike in lists]
        rows = [(x.query_rows.unsqueeze(-1) + own).flatten(1) for x, own in zip(lists, offsets, strict=True)]
        units = [alike.units.sort(dim=1).values for alike in lists]
        num_keys = partial.num_units * partial.unit
        numbers = [sequences, 0, partial.first_key, 0, num_keys, 1, 1, *unbounded, partial.unit]
        return numbers, list(partial.heads), [], *_one_after_the_other(rows), *_one_after_the_other(units)
    low, high = partial.band or (-_NO_BOUND, 0 if partial.is_causal else _NO_BOUND)
    numbers = [sequences, partial.query_row, partial.key_row, partial.num_queries, partial.num_keys]
    axes = [
        number for axis in partial.axes for number in (axis.size, axis.rows, 0 if is_remote else axis.rows, axis.heads)
    ]
    step = 1 if is_remote else partial.step
    return [*numbers, partial.step, step, low, high, 0], [partial.head], axes, *(None,) * 4


def _one_after_the_other(lists: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Lists of lists as one, and where each ends."""
    sizes = torch.cat([torch.full((len(alike),), alike.shape[1]) for alike in lists])
    return torch.cat([alike.reshape(-1) for alike in lists]), sizes.cumsum(0)


def _arguments(masks: Masks, key: Tensor, first_sequence: int) -> tuple[Any, ...]:
    hidden = masks.hidden
    if hidden is not None and hidden.dim() == 2:
        hidden = hidden.unsqueeze(-1).expand(-1, -1, key.shape[2])
    return hidden, masks.seed, masks.dropout_p, [masks.query_offset, masks.key_offset, first_sequence]
