"""The package's CPU kernels (``csrc/``) for one partial.

They read rows and heads in place, with any stride except the last, and merge into running results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dilated_attention_pytorch.plan.block_lists import AnyPartial, BlockLists
from dilated_attention_pytorch.plan.gathered import Gathered
from dilated_attention_pytorch.plan.geometry import Partial

from .compilation import load

KEYS_OF_WINDOW = 8192
"""Queries with more keys are merged in windows of this many; their rows are then written more than once."""
ROWS_OF_STREAM = 16
"""Up to this many query rows per key/value head, keys are streamed row by row and need not be contiguous."""
_MOST_GATE = 2.0**100
"""Bound of log-gates relative to the scale: the kernels divide gates by the scale, which must not overflow."""
_NO_BOUND = 1 << 60


class Origin(NamedTuple):
    """The first row and the first key/value head of a tensor."""

    row: int
    head: int


WHOLE = Origin(0, 0)


def factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the factors of matrix products with operands of ``dtype``, in which keys and values are packed.

    bfloat16 where the processor multiplies it, float32 otherwise (``csrc/vectors.h``).
    """
    multiplies = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.cpu._is_avx512_bf16_supported()
    return dtype if dtype == torch.bfloat16 and multiplies else torch.float32


class Sizes(NamedTuple):
    """Sizes of the kernels' buffers, from ``csrc/kernels.h``."""

    keys_of_window: int
    """Keys of a window, which are packed together."""
    packed_keys: int
    """Keys of a block of packed keys."""
    packed_bytes: int
    """Bytes of packed keys and values, unless one window of a domain has more."""
    alignment: int
    """The number of keys of a block is a multiple of this."""
    rows_of_chunk: int
    """Query rows that each thread packs in the backward pass."""


def sizes() -> Sizes:
    """The sizes that the compiled library was built with.

    Raises:
        BuildError: the library cannot be compiled or loaded.
    """
    load()
    with _disable_current_modes():  # fake tensors have no part in it
        return Sizes(*torch.ops.dilated_attention_native.sizes())


def largest_gate(log_gates: Tensor | None) -> float:
    """Magnitude of the largest finite log-gate on the CPU; 0 if there is none, and on other devices."""
    if log_gates is None or log_gates.numel() == 0 or log_gates.device.type != "cpu":
        return 0.0
    return float(log_gates.abs().masked_fill(~log_gates.isfinite(), 0.0).max())


def takes_gates(log_gates: Tensor | None, scale: float) -> bool:
    """Whether the kernels compute with these log-gates."""
    return log_gates is None or largest_gate(log_gates) < _MOST_GATE * scale


def is_written_once(partial: AnyPartial) -> bool:
    """Whether every output row is written exactly once."""
    return not isinstance(partial, Partial) or partial.num_keys <= KEYS_OF_WINDOW


class Terms(NamedTuple):
    """Terms of the scores besides the products: ``cap(scale q.k) + line[h, origin + j - i] + key_bias[j]``.

    With coordinates, ``line[h, 0]`` times the Euclidean distance of both rows replaces the number of the line. The
    fields are arguments of the kernels, in the order of ``csrc/library.cpp``.
    """

    softcap: float = 0.0
    """``cap(x) = softcap * tanh(x / softcap)``; 0 for no cap."""
    line: Tensor | None = None
    """float32 ``[H, n]``, contiguous: numbers by the distance of the query with index i and the key with index j of a
    partial. Indices count its queries and keys; those of queries whose rows are listed are the rows. With coordinates
    ``[H, 1]``: the bias of a unit of distance."""
    origin: int = 0
    """Index of the number of distance 0."""
    key_bias: Tensor | None = None
    """float32 ``[B, M, G]``, finite; its rows and heads are those of the keys."""
    coordinates: Tensor | None = None
    """float32 ``[B, 2, M]``, contiguous, of the rows of keys. A pair has no bias by distance where one is NaN."""
    first_query: int = 0
    """Row of the coordinates of query row 0."""


NO_TERMS = Terms()


class Operands(NamedTuple):
    """Operands and parameters that the kernels read."""

    query: Tensor
    """``[B, N, H, D]``, float16, bfloat16 or float32."""
    key: Tensor
    """``[B, M, G, D]``"""
    value: Tensor
    """``[B, M, G, Dv]``"""
    ratio: int
    """Query heads per key/value head."""
    options: tuple[Tensor | None, Tensor | None, float, list[int], float]
    """Hidden keys, bool ``[B, M, G]``; seed and probability of dropout; the positions of the first query and of the
    first key, and the index of the first sequence, which dropout depends on; and the positive scale of the scores."""
    is_remote: bool = False
    """Whether keys and values hold only the rows and heads of the partial, consecutively."""
    seen_rows: Tensor | None = None
    """int64 ``[heads, count]``: for every head, the visible rows of remote keys; None = all. For at most
    :data:`ROWS_OF_STREAM` queries per key/value head, without dropout and gradients."""
    terms: Terms | None = None
    """Terms of the scores besides the products of queries and keys; no line for remote keys."""


class Merged(NamedTuple):
    """Output and log-sum-exp, merged over all partials, and their gradients."""

    out: Tensor
    lse: Tensor
    """float32; an infinity of either sign in rows without a key."""
    grad_out: Tensor
    grad_lse: Tensor | None


def merge_partial(partial: AnyPartial, operands: Operands, out: Tensor, lse: Tensor, *, of_out: Origin = WHOLE) -> None:
    """Merge a partial's attention into ``out`` and ``lse``; ``lse`` is -inf where nothing was merged yet.

    Args:
        partial: the partial, without zero-padding keys.
        operands: operands of the call.
        out: ``[B, rows, heads, Dv]``, starting at ``of_out``. Float32; of the query's dtype if every row is
            written once.
        lse: float32 ``[B, N, H]``.
    """
    load()
    units = _units_of(partial) if isinstance(partial, BlockLists) else None
    geometry = _geometry(partial, units, operands)
    if operands.seen_rows is not None:
        assert isinstance(partial, Partial)
        assert partial.num_queries * operands.ratio <= ROWS_OF_STREAM
        assert operands.options[1] is None
        num_heads, count = operands.seen_rows.shape
        ends = torch.arange(1, num_heads + 1) * count
        numbers, heads, axes, *_ = geometry
        geometry = ([*numbers[:-1], 1], heads, axes, None, None, operands.seen_rows.reshape(-1), ends)
    origins = [*of_out, *(_origin_of_remote(partial) if operands.is_remote else WHOLE)]
    terms = operands.terms or NO_TERMS
    assert terms.line is None or (terms.line.is_contiguous() and not operands.is_remote)
    assert terms.coordinates is None or terms.coordinates.is_contiguous()
    rest = (*geometry, *operands.options, None if units is None else units.gates, *terms)
    torch.ops.dilated_attention_native.attend(*operands[:3], out, lse, origins, operands.ratio, *rest)


def add_gradients(
    partial: AnyPartial,
    operands: Operands,
    merged: Merged,
    grads: Sequence[Tensor],
    grad_gates: Tensor | None = None,
    grad_line: Tensor | None = None,
    grad_key_bias: Tensor | None = None,
    *,
    of_grad_query: Origin = WHOLE,
    of_grad_keys: Origin = WHOLE,
) -> None:
    """Add a partial's gradients under the merged output and log-sum-exp.

    Args:
        partial, operands: see :func:`merge_partial`.
        merged: the merged output and log-sum-exp, and their gradients.
        grads: float32 gradients of query, key and value; their first rows and heads are ``of_grad_query`` and
            ``of_grad_keys``.
        grad_gates: float32 gradients of the log-gates of block lists.
        grad_line: float32 gradients of the line of :class:`Terms`, contiguous; None = not needed.
        grad_key_bias: float32 gradients of the keys' bias, with its first row and head.
    """
    load()
    units = _units_of(partial) if isinstance(partial, BlockLists) else None
    of_keys = _origin_of_remote(partial) if operands.is_remote else WHOLE
    origins = [*of_grad_query, *(of_keys if operands.is_remote else of_grad_keys), *of_keys]
    out, lse, grad_out, grad_lse = merged
    tensors = (grad_out, *operands[:3], out, lse, grad_lse, *grads)
    gates = None if units is None else units.gates
    of_units = None if gates is None else torch.zeros_like(gates)
    terms = operands.terms or NO_TERMS
    assert terms.line is None or (terms.line.is_contiguous() and not operands.is_remote)
    assert terms.coordinates is None or terms.coordinates.is_contiguous()
    rest = [*_geometry(partial, units, operands), *operands.options, gates, *terms]
    rest += of_units, grad_line, grad_key_bias
    torch.ops.dilated_attention_native.attend_backward(*tensors, origins, operands.ratio, *rest)
    if units is not None and of_units is not None and grad_gates is not None:
        grad_gates += units.by_block(of_units)


class _Units(NamedTuple):
    """Key block lists of every head's query blocks in the kernels' format; without -1 and gates of -inf."""

    units: Tensor
    """Blocks of all lists concatenated, ascending within each list."""
    ends: Tensor
    """End of each list."""
    gates: Tensor | None
    """float32, one per unit."""
    order: Tensor
    """The order that sorts each list."""
    is_present: Tensor
    """Which of the sorted blocks are units."""

    def by_block(self, of_units: Tensor) -> Tensor:
        """Per-unit numbers as per-block numbers ``[B, G, query blocks, k]``; 0 for blocks that were left out."""
        ascending = of_units.new_zeros(self.order.shape)
        ascending[self.is_present] = of_units
        return torch.empty_like(ascending).scatter_(-1, self.order, ascending)


def _units_of(partial: BlockLists) -> _Units:
    ascending, order = partial.blocks.sort(dim=-1, stable=True)
    is_present, gates = ascending >= 0, None
    if partial.log_gates is not None:
        gates = partial.log_gates.float().gather(-1, order)
        is_present &= gates != -torch.inf
        gates = gates[is_present]
    return _Units(ascending[is_present], is_present.sum(-1).flatten().cumsum(0), gates, order, is_present)


def _geometry_of_lists(partial: BlockLists, units: _Units, operands: Operands) -> tuple[Any, ...]:
    """Arguments in the format of ``csrc/library.cpp``."""
    query, key = operands.query, operands.key
    num_queries, num_keys = query.shape[1], key.shape[1]
    row_ends = (torch.arange(-(-num_queries // partial.query_block_size)) + 1) * partial.query_block_size
    unit, last = min(partial.block_size, max(1, num_keys)), partial.query_offset if partial.is_causal else _NO_BOUND
    numbers = [query.shape[0], 0, 0, 0, num_keys, 1, 1, -_NO_BOUND, last, unit]
    return numbers, list(range(key.shape[2])), [], None, row_ends.clamp_(max=num_queries), units.units, units.ends


def _origin_of_remote(partial: AnyPartial) -> Origin:
    """The first row and head of keys that hold only those of the partial."""
    return Origin(0, partial.head) if isinstance(partial, Partial) else WHOLE


def _geometry(partial: AnyPartial, units: _Units | None, operands: Operands) -> tuple[Any, ...]:
    """Arguments in the format of ``csrc/library.cpp``."""
    if isinstance(partial, BlockLists):
        assert units is not None
        return _geometry_of_lists(partial, units, operands)
    sequences, unbounded = operands.query.shape[0], (-_NO_BOUND, _NO_BOUND)
    if isinstance(partial, Gathered):
        lists = partial.lists
        offsets = [torch.arange(alike.rows_of_range) for alike in lists]
        rows = [(x.query_rows.unsqueeze(-1) + own).flatten(1) for x, own in zip(lists, offsets, strict=True)]
        sorted_units = [alike.units.sort(dim=1).values for alike in lists]
        num_keys = partial.num_units * partial.unit
        numbers = [sequences, 0, partial.first_key, 0, num_keys, 1, 1, *unbounded, partial.unit]
        return numbers, list(partial.heads), [], *_one_after_the_other(rows), *_one_after_the_other(sorted_units)
    low, high = partial.band or (-_NO_BOUND, 0 if partial.is_causal else _NO_BOUND)
    numbers = [sequences, partial.query_row, partial.key_row, partial.num_queries, partial.num_keys]
    axes: list[int] = []
    for axis in partial.axes:
        axes += axis.size, axis.rows, 0 if operands.is_remote else axis.rows, axis.heads
    step = 1 if operands.is_remote else partial.step
    return [*numbers, partial.step, step, low, high, 0], [partial.head], axes, *(None,) * 4


def _one_after_the_other(lists: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Lists concatenated, and the end of each."""
    sizes = torch.cat([torch.full((len(alike),), alike.shape[1]) for alike in lists])
    return torch.cat([alike.reshape(-1) for alike in lists]), sizes.cumsum(0)
