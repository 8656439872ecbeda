"""One call, tile by tile: each tile of its plan is accumulated and rounded separately."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels.masks import Masks, ScoreTerms
from dilated_attention_pytorch.plan.block_lists import BlockLists
from dilated_attention_pytorch.plan.planner import CallShape, Tile, plan, tile_size
from dilated_attention_pytorch.precision import accumulation_dtype

from .call import Call
from .merge import without_infinities
from .operands import Role, Rows
from .partials import TermGradients, Work, add_gradients, add_weighted, merge_partials
from .validation import check_documents, documents_of

_NO_BOUND = 1 << 62


def shape_of(call: Call) -> CallShape:
    """The sizes and positions of a call under a pattern.

    Raises:
        ValueError: boundaries of documents that are wrong, or documents longer than a rule of the pattern is defined.
    """
    (batch, num_queries, num_heads, _), (_, num_keys, num_kv_heads, _) = call.query.shape, call.key.shape
    pattern, documents = call.pattern, None
    assert pattern is not None
    assert not isinstance(call.query_offset, Tensor)
    if call.cu_seqlens is not None:
        documents = documents_of(call.cu_seqlens, num_queries)
        check_documents(pattern, documents, num_kv_heads)
    sizes = (batch, num_queries, num_keys, num_heads, num_kv_heads)
    return CallShape(pattern, *sizes, call.query_offset, call.key_offset, call.is_causal, documents)


def tiles_of(call: Call, *, is_backward: bool = False, is_pair: bool = False) -> tuple[tuple[Tile, ...], int]:
    """The tiles of a call, and how many sequences of the batch are computed at a time.

    ``is_pair``: all partials are computed by matrix products, see :class:`.products.Result`.
    """
    query = call.query
    if query.numel() == 0:
        return (), 1
    if call.blocks is None:
        return _planned(shape_of(call), query.shape[3], query.dtype, call.impl.is_in_place and not is_pair, is_backward)
    size, query_size = call.block_sizes
    lists = BlockLists(call.blocks, call.log_gates, size, query_size, call.is_causal, call.first_query)
    return (Tile((0, query.shape[1]), (0, call.key.shape[1]), (0, call.key.shape[2]), (lists,)),), query.shape[0]


@functools.lru_cache(maxsize=128)
def _planned(
    shape: CallShape, head_dim: int, dtype: torch.dtype, is_in_place: bool, is_backward: bool
) -> tuple[tuple[Tile, ...], int]:
    """:func:`tiles_of` under a pattern.

    Tiles are bounded so that temporaries are small compared with the operands. The native kernels have no temporaries
    except accumulators of low-precision results; without these, the plan is a single tile.
    """
    num_rows = shape.batch_size * shape.num_queries * shape.num_heads
    size = tile_size(max(num_rows, shape.batch_size * shape.num_keys * shape.num_kv_heads), head_dim, dtype.itemsize)
    if is_in_place:
        is_small = not is_backward and num_rows <= size
        found = plan(shape, _NO_BOUND if is_small or dtype == torch.float32 else size, bands="whole")
    else:
        found = plan(shape, size)
    return found.tiles, found.batch_step


def _works(call: Call, *, is_backward: bool = False, is_pair: bool = False) -> Iterator[Work]:
    """The tiles of a call, for a range of sequences of the batch each."""
    query, key, value, hidden = call.query, call.key, call.value, call.key_padding_mask
    tiles, step = tiles_of(call, is_backward=is_backward, is_pair=is_pair)
    assert call.scale is not None
    assert not isinstance(call.query_offset, Tensor)
    ratio = query.shape[2] // key.shape[2]
    of_masks = (call.dropout_seed, call.dropout_p, call.query_offset, call.key_offset)
    terms = None
    if call.softcap or call.distance_bias is not None or call.key_bias is not None:
        first_distance = call.key_offset - call.query_offset - query.shape[1] + 1
        terms = ScoreTerms(call.softcap, call.distance_bias, first_distance, call.key_bias, call.coordinates)
    for tile in tiles:
        if step >= query.shape[0]:
            masks = Masks(hidden, *of_masks)
            yield Work(tile.partials, query, key, value, ratio, call.scale, call.impl, masks, 0, tile, terms=terms)
            continue
        for start in range(0, query.shape[0], step):
            some = slice(start, start + step)
            masks = Masks(None if hidden is None else hidden[some], *of_masks)
            operands = (query[some], key[some], value[some], ratio, call.scale)
            of_some = terms
            if terms is not None:
                key_bias, places = (None if x is None else x[some] for x in (terms.key_bias, terms.coordinates))
                of_some = replace(terms, key_bias=key_bias, coordinates=places)
            yield Work(tile.partials, *operands, call.impl, masks, start, tile, terms=of_some)


def forward(call: Call, rest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output in the query's dtype and log-sum-exp in the accumulation dtype.

    Last dimensions are contiguous, and padded keys and values are zero. ``rest``, zeros shaped like the log-sum-exp,
    is for large scores: everything is computed by matrix products, and ``(lse, rest)`` becomes a pair, see
    :class:`.products.Result`.
    """
    query = call.query
    out = torch.zeros((*query.shape[:3], call.value.shape[3]), dtype=query.dtype, device=query.device)
    lse = torch.full(query.shape[:3], float("-inf"), dtype=accumulation_dtype(query.dtype), device=query.device)
    for work in _works(call, is_pair=rest is not None):
        accumulator = work.accumulator(out, Rows.QUERY, Role.MERGED_INTO)
        merge_partials(work, accumulator, work.of_batch(lse), None if rest is None else work.of_batch(rest))
        if accumulator.tensor.dtype != out.dtype:
            work.store(accumulator, out)
        del accumulator  # before that of the next tile is allocated
    return out, lse


def backward(
    call: Call, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, rest: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Gradients of :attr:`.Call.leaves` from the merged output and log-sum-exp alone.

    With ``rest``, ``(lse, rest)`` is the pair computed by :func:`forward`.
    """
    operands = ((call.query, Rows.QUERY), (call.key, Rows.KEY), (call.value, Rows.KEY))
    grads = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x, _ in operands]
    of_gates = None if call.log_gates is None else torch.zeros_like(call.log_gates, dtype=call.dtype)
    of_terms = TermGradients(
        *(
            None if x is None else torch.zeros(x.shape, dtype=x.dtype, device=x.device)
            for x in (call.distance_bias, call.key_bias)
        )
    )
    wanted = of_terms._replace(distance_bias=None) if call.has_fixed_bias else of_terms
    lse = without_infinities(lse)
    for work in _works(call, is_backward=True, is_pair=rest is not None):
        accumulators = [
            work.accumulator(grad, rows, Role.ADDED_TO) for grad, (_, rows) in zip(grads, operands, strict=True)
        ]
        of_rest, of_grad_lse = (None if x is None else work.of_batch(x) for x in (rest, grad_lse))
        add_gradients(
            work,
            accumulators,
            of_gates,
            work.of_batch(out),
            work.of_batch(lse),
            of_rest,
            work.of_batch(grad_out),
            of_grad_lse,
            wanted._replace(key_bias=None if wanted.key_bias is None else work.of_batch(wanted.key_bias)),
        )
        for accumulator, grad in zip(accumulators, grads, strict=True):
            if accumulator.tensor.dtype != grad.dtype:
                work.store(accumulator, grad)
        del accumulator, accumulators  # before those of the next tile are allocated
    if call.log_gates is not None and of_gates is not None:
        grads.append(of_gates.to(call.log_gates.dtype))
    return *grads, *(grad for grad in of_terms if grad is not None)


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
    for work in _works(call, is_pair=True):

        def of_batch(tensor: Tensor | None, work: Work = work) -> Tensor | None:
            return None if tensor is None else work.of_batch(tensor)

        add_weighted(
            work,
            work.of_batch(total),
            work.of_batch(lse),
            of_batch(rest),
            of_batch(values),
            [(of_batch(left), of_batch(right), of_batch(gates)) for left, right, gates in factors],
            axis=axis,
        )
    return total


def num_pairs(call: Call) -> int:
    """Query-key pairs that the kernels compute: those under the pattern, padded keys among them; with lists all of
    every list, -1 and keys after a query among them."""
    if call.blocks is not None:
        (tile,), _ = tiles_of(call)
        return tile.partials[0].num_pairs * call.ratio
    return plan(shape_of(call), _NO_BOUND).num_pairs
