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
    """
    load()
    of_keys = Place(0, partial.head) if is_remote and isinstance(partial, Partial) else WHOLE
    torch.ops.dilated_attention_native.attend(
        query, key, value, out, lse, [*of_out, *of_keys], ratio, *_geometry(partial, query, is_remote=is_remote),
        *_arguments(masks, key, first_sequence), scale,
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
