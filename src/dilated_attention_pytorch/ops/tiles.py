"""One call, tile by tile: each tile of its plan is accumulated and rounded separately."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels import native
from dilated_attention_pytorch.kernels.masks import Masks
from dilated_attention_pytorch.planning.block_lists import BlockLists
from dilated_attention_pytorch.planning.plan import CallShape, Tile, plan, tile_size

from .call import Call
from .merge import without_infinities
from .operands import Operand, Role, Rows
from .partials import add_gradients, add_weighted, merge_partials
from .validation import check_documents, documents_of
from .work import Work

_NO_BOUND = 1 << 62


def shape_of(call: Call) -> CallShape:
    """The sizes and positions of a call under a pattern.

    Raises:
        ValueError: boundaries of documents that are wrong, or documents longer than a rule of the pattern is defined.
    """
    pattern, documents = call.pattern, documents_of(call.cu_seqlens, call.query.shape[1])
    assert pattern is not None
    check_documents(pattern, documents, call.key.shape[2])
    batch, num_queries, num_heads, _ = call.query.shape
    _, num_keys, num_kv_heads, _ = call.key.shape
    sizes = (batch, num_queries, num_keys, num_heads, num_kv_heads)
    return CallShape(pattern, *sizes, call.first_query, call.key_offset, call.is_causal, documents)


def tiles_of(call: Call, *, is_backward: bool = False) -> tuple[tuple[Tile, ...], int]:
    """The tiles of a call, and how many sequences of the batch are computed at a time.

    Tiles are bounded so that temporaries are small compared with the operands. The native kernels have no temporaries
    except accumulators of low-precision results; without these, the plan is a single tile.
    """
    batch, num_queries, num_heads, head_dim = call.query.shape
    _, num_keys, num_kv_heads, _ = call.key.shape
    if call.query.numel() == 0:
        return (), 1
    if call.blocks is not None:
        size, query_size = call.block_sizes
        lists = BlockLists(call.blocks, call.log_gates, size, query_size, call.is_causal, call.first_query)
        return (Tile((0, num_queries), (0, num_keys), (0, num_kv_heads), (lists,)),), batch
    rows = batch * max(num_queries * num_heads, num_keys * num_kv_heads)
    size = tile_size(rows, head_dim, call.query.element_size())
    if call.impl == "native":
        is_small = not is_backward and batch * num_queries * num_heads <= size
        bound = _NO_BOUND if is_small or call.query.dtype == torch.float32 else size
        found = plan(shape_of(call), bound, bands="whole")
    else:
        found = plan(shape_of(call), size)
    return found.tiles, found.batch_step


@dataclass(frozen=True, slots=True)
class _Portion:
    """A tile of a call for a range of sequences of the batch."""

    call: Call
    tile: Tile
    batch: tuple[int, int]

    def work(self) -> Work:
        call, hidden = self.call, self.call.key_padding_mask
        masks = Masks(
            None if hidden is None else self.of_batch(hidden),
            call.dropout_seed,
            call.dropout_p,
            call.first_query,
            call.key_offset,
        )
        assert call.scale is not None
        query, key, value = (self.of_batch(x) for x in (call.query, call.key, call.value))
        return Work(self.tile.partials, query, key, value, call.ratio, call.scale, call.impl, masks, self.batch[0])

    def of_batch(self, tensor: Tensor) -> Tensor:
        """The portion's sequences of a tensor."""
        return tensor if self.batch == (0, tensor.shape[0]) else tensor[slice(*self.batch)]

    def region(self, tensor: Tensor, rows: Rows) -> Tensor:
        """The tile's rows and heads of a full tensor."""
        start, stop = self.tile.query_rows if rows is Rows.QUERY else self.tile.key_rows
        ratio = self.call.ratio if rows is Rows.QUERY else 1
        first, last = (head * ratio for head in self.tile.kv_heads)
        return self.of_batch(tensor)[:, start:stop, first:last]

    def accumulator(self, tensor: Tensor, rows: Rows, role: Role) -> Operand:
        """``tensor`` itself if it can accumulate in its own dtype, else zeros for the tile's part of it."""
        dtype, partials = self.call.dtype, self.tile.partials
        is_native = self.call.impl == "native"
        # If every partial is the first to touch its query rows, nothing is accumulated.
        is_written_once = rows is Rows.QUERY and all(
            partial.is_first and (not is_native or (role is Role.MERGED_INTO and native.is_written_once(partial)))
            for partial in partials
        )
        if tensor.dtype == dtype or is_written_once:
            return Operand(self.of_batch(tensor), rows, role)
        zeros = torch.zeros_like(self.region(tensor, rows), dtype=dtype, memory_format=torch.contiguous_format)
        first_row = (self.tile.query_rows if rows is Rows.QUERY else self.tile.key_rows)[0]
        return Operand(zeros, rows, role, first_row, self.tile.kv_heads[0])

    def store(self, operand: Operand, tensor: Tensor) -> None:
        """Round an accumulator into the tile's part of the full tensor; no-op if it accumulated there already."""
        if operand.tensor.dtype != tensor.dtype:
            self.region(tensor, operand.rows).copy_(operand.tensor)


def _portions(call: Call, *, is_backward: bool = False) -> Iterator[_Portion]:
    tiles, batch_step = tiles_of(call, is_backward=is_backward)
    for tile in tiles:
        for start in range(0, call.query.shape[0], batch_step):
            yield _Portion(call, tile, (start, min(start + batch_step, call.query.shape[0])))


def forward(call: Call, rest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output in the query's dtype and log-sum-exp in the accumulation dtype.

    Last dimensions are contiguous, and padded keys and values are zero. ``rest``, zeros shaped like the log-sum-exp,
    is for large scores: everything is computed by matrix products, and ``(lse, rest)`` becomes a pair, see
    :class:`.products.Result`.
    """
    query = call.query
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.full(query.shape[:3], float("-inf"), dtype=call.dtype, device=query.device)
    for portion in _portions(call if rest is None else call._replace(impl="aten")):
        accumulator = portion.accumulator(out, Rows.QUERY, Role.MERGED_INTO)
        of_rest = None if rest is None else portion.of_batch(rest)
        merge_partials(portion.work(), accumulator, portion.of_batch(lse), of_rest)
        portion.store(accumulator, out)
    return out, lse


def backward(
    call: Call, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, rest: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and, if given, log-gates, from the merged output and log-sum-exp alone.

    With ``rest``, ``(lse, rest)`` is the pair computed by :func:`forward`.
    """
    operands = ((call.query, Rows.QUERY), (call.key, Rows.KEY), (call.value, Rows.KEY))
    grads = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x, _ in operands]
    of_gates = None if call.log_gates is None else torch.zeros_like(call.log_gates, dtype=call.dtype)
    lse = without_infinities(lse)
    for portion in _portions(call if rest is None else call._replace(impl="aten"), is_backward=True):
        accumulators = [
            portion.accumulator(grad, rows, Role.ADDED_TO) for grad, (_, rows) in zip(grads, operands, strict=True)
        ]
        of_rest, of_grad_lse = (None if x is None else portion.of_batch(x) for x in (rest, grad_lse))
        add_gradients(
            portion.work(),
            accumulators,
            of_gates,
            portion.of_batch(out),
            portion.of_batch(lse),
            of_rest,
            portion.of_batch(grad_out),
            of_grad_lse,
        )
        for accumulator, grad in zip(accumulators, grads, strict=True):
            portion.store(accumulator, grad)
    if call.log_gates is None or of_gates is None:
        return tuple(grads)
    return *grads, of_gates.to(call.log_gates.dtype)


def weighted_sum(
    call: Call,
    lse: Tensor,
    values: Tensor | None,
    factors: Sequence[tuple[Tensor | None, Tensor | None, Tensor | None]],
    rest: Tensor | None = None,
    *,
    axis: str,
) -> Tensor:
    """A weighted sum over probabilities, see :mod:`.weighted_sum`, in the accumulation dtype; values are not read.

    P are the merged probabilities ``c exp(s - lse)``, with dropout if the call has it, and f is the product of the
    ``factors``, each ``left [B, N, H, width]`` times rows of ``right [B, M, G, width]`` plus ``gates`` like the blocks;
    None terms are left out. ``axis="queries"``: ``sum_t P[p, t] f[p, t] values[t]`` for every query p; ``"keys"``:
    ``sum_p P[p, t] f[p, t] values[p]`` for every key t; ``"blocks"``: the sum of P f for every listed block. With
    ``rest``, ``(lse, rest)`` is the pair computed by :func:`forward`.
    """
    like = {"queries": call.query, "keys": call.key, "blocks": call.blocks}[axis]
    assert like is not None
    shape = like.shape if values is None else (*like.shape[:3], values.shape[3])
    total = torch.zeros(shape, dtype=call.dtype, device=call.query.device)
    lse = without_infinities(lse)
    for portion in _portions(call._replace(impl="aten")):

        def of_batch(tensor: Tensor | None, portion: _Portion = portion) -> Tensor | None:
            return None if tensor is None else portion.of_batch(tensor)

        add_weighted(
            portion.work(),
            portion.of_batch(total),
            portion.of_batch(lse),
            of_batch(rest),
            of_batch(values),
            [(of_batch(left), of_batch(right), of_batch(gates)) for left, right, gates in factors],
            axis=axis,
        )
    return total
