"""One partial by the package's own CPU kernels, compiled for the machine at hand: see ``csrc/``.

The kernels read rows and heads where they lie, at whatever stride but the last, and merge into running results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.planning import Gathered, Partial

from .compilation import load

KEYS_OF_WINDOW = 8192
"""Keys of which queries see more are merged window by window: results of a row are then written more than once."""
_NO_BOUND = 1 << 60


class Masks(NamedTuple):
    """What a call hides and drops."""

    hidden: Tensor | None
    """bool ``[B, M]``: keys that are as if they were not there."""
    seed: Tensor | None
    dropout_p: float
    query_offset: int
    key_offset: int
    first_sequence: int
    """Of the whole batch, the sequence that operands begin with."""


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
    scale: float,
    first_row: int,
    first_head: int,
) -> None:
    """Merge what the queries of a partial see into ``out`` and ``lse``, which is -inf where nothing was merged yet.

    Args:
        partial: which rows see which; without phantom keys.
        query: ``[B, N, H, D]``, float16, bfloat16 or float32; key, value: ``[B, M, G, D]``.
        out: ``[B, rows, heads, D]``, from ``first_row`` and ``first_head`` of the queries on. Float32; of the query's
            dtype if every row is written once.
        lse: float32 ``[B, N, H]``.
        masks: keys and pairs that are left out.
        scale: factor of the scores, not negative.
    """
    load()
    torch.ops.dilated_attention_native.attend(
        query, key, value, out, lse, [first_row, first_head], *_partial(partial, query), *_masks(masks), scale
    )


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
    scale: float,
    first: tuple[int, int, int],
) -> None:
    """Add the gradients of a partial to those of query, key and value, float32, under the merged ``out`` and ``lse``.

    ``first``: the query row, the key row and the key/value head that the gradients begin with.
    """
    load()
    torch.ops.dilated_attention_native.attend_backward(
        grad_out, query, key, value, out, lse, grad_lse, *grads, list(first), *_partial(partial, query), *_masks(masks),
        scale,
    )  # fmt: skip


def _partial(partial: Partial | Gathered, query: Tensor) -> tuple[Any, ...]:
    sequences = query.shape[0]
    if isinstance(partial, Gathered):
        lists = partial.lists
        offsets = [torch.arange(alike.rows_of_range) for alike in lists]
        rows = [(x.query_rows.unsqueeze(-1) + own).flatten(1) for x, own in zip(lists, offsets, strict=True)]
        units = [alike.units.sort(dim=1).values for alike in lists]
        geometry = [
            sequences, 0, partial.first_key, 0, partial.num_units * partial.unit, 1, -_NO_BOUND, _NO_BOUND, partial.unit
        ]  # fmt: skip
        return geometry, list(partial.heads), [], *_one_after_the_other(rows), *_one_after_the_other(units)
    low, high = partial.band or (-_NO_BOUND, 0 if partial.is_causal else _NO_BOUND)
    geometry = [
        sequences, partial.query_row, partial.key_row, partial.num_queries, partial.num_keys, partial.step, low, high, 0
    ]  # fmt: skip
    axes = [number for axis in partial.axes for number in (axis.size, axis.rows, axis.heads)]
    return geometry, [partial.head], axes, None, None, None, None


def _one_after_the_other(lists: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Lists of lists as one, and where each ends."""
    sizes = torch.cat([torch.full((len(alike),), alike.shape[1]) for alike in lists])
    return torch.cat([alike.reshape(-1) for alike in lists]), sizes.cumsum(0)


def _masks(masks: Masks) -> tuple[Any, ...]:
    places = [masks.query_offset, masks.key_offset, masks.first_sequence]
    return masks.hidden, masks.seed, masks.dropout_p, places
