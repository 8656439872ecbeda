"""Attention probabilities: maps of chosen queries over all keys, and their rollout over layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels.reference import reference_probabilities
from dilated_attention_pytorch.kernels.select import Impl
from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.precision import accumulation_dtype, cast_by_autocast, without_autocast

from .attend import attend_checked
from .call import WATCHERS, Call
from .host import with_positive_scale
from .implementations import IMPLEMENTATIONS
from .scores import Scores, finished, with_scores
from .validation import check_call, check_documents, documents_of, sequence_first
from .weighted_sum import weighted_sum

Queries = Sequence[int] | Tensor | Literal["mean"]
"""Rows ``[R]``, weights of all rows ``[R, N]`` or ``[B, R, N]``, or ``"mean"``: weights 1 / N."""


def attention_map(
    query: Tensor,
    key: Tensor,
    pattern: Pattern,
    queries: Queries,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    query_offset: int = 0,
    key_offset: int = 0,
    cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    scores: Scores | None = None,
    heads_first: bool | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """The probabilities with which :func:`attend` weighs every key for chosen queries, per head.

    ``P[p, t] = c[p, t] exp(s[p, t] - L[p])`` with the count c, the score s and the log-sum-exp L of :func:`attend`:
    its output is ``O[p] = sum_t P[p, t] v[t]``. A row of P sums to 1; to 0 for a query without a key, and to less than
    1 with sinks and under ``tail="zero_padded"``, where the rest belongs to the sink and to the zero keys.
    Differentiable in ``query`` and ``key``; maps of weights only without a cap and biases.

    Chosen rows are computed from the definition, in O(R M) time and memory for R rows and M keys. Weighted sums of all
    rows (``queries`` of weights) take the plan and the kernels of :func:`attend`: the pairs of the pattern are computed
    once more, in memory linear in N and M.

    Args:
        query, key, pattern, is_causal, scale, query_offset, key_offset, cu_seqlens, key_padding_mask, scores,
            heads_first: see :func:`attend`. A map has no dropout.
        queries: R query rows, counted in ``query`` from 0, as integers: one map each, of ``P[p]``. Or floating-point
            weights ``[R, N]`` or ``[B, R, N]`` of all query rows: one map each, of ``sum_p w[p] P[p]``. Or ``"mean"``:
            one map, with the weight 1 / N of every row.
        impl: the implementation that computes weighted sums, see :func:`attend`.

    Returns:
        ``[B, R, H, M]`` in float32, float64 for float64 inputs.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, shape, dtype, device or range.
        NotImplementedError: the named implementation does not support this call.

    >>> from dilated_attention_pytorch.ops import attention_map
    >>> q, k = torch.randn(2, 1, 100, 4, 8).unbind()
    >>> pattern = DilatedPattern([16, 64], [1, 4])
    >>> attention_map(q, k, pattern, [0, 7]).shape  # of two queries
    torch.Size([1, 2, 4, 100])
    >>> attention_map(q, k, pattern, "mean").sum(-1)
    tensor([[[1.0000, 1.0000, 1.0000, 1.0000]]])
    """
    query, key, _ = sequence_first(query, key, key, heads_first)
    call = Call(
        query,
        key,
        key,
        cu_seqlens=cu_seqlens,
        key_padding_mask=key_padding_mask,
        pattern=pattern,
        is_causal=is_causal,
        scale=scale,
        query_offset=query_offset,
        key_offset=key_offset,
        impl=impl,
    )
    check_call(call)
    return map_of_call(call if scores is None else with_scores(call, scores), queries)


def map_of_call(call: Call, queries: Queries) -> Tensor:
    """:func:`attention_map` of a checked call; without its dropout.

    Raises:
        NotImplementedError: the call selects blocks by content, or its first query position is a tensor.
    """
    if call.pattern is None or isinstance(call.query_offset, Tensor):
        what = "blocks selected by content" if call.pattern is None else "query_offset as a tensor"
        raise NotImplementedError(f"an attention map needs a pattern and query_offset as an integer, got {what}")
    query, key = cast_by_autocast(call.query, call.key)
    queries = _checked(queries, query)
    call = call._replace(query=query, key=key, value=key, dropout_seed=None, dropout_p=0.0)
    with without_autocast(query.device.type):
        return _weighted(call, queries) if queries.is_floating_point() else _of_rows(call, queries)


@contextmanager
def attention_maps(queries: Queries) -> Iterator[list[Tensor]]:
    """Collect the :func:`attention_map` of every call of attention within the context, in the order of the calls.

    Every model whose attention is this package's calls it once per layer; sequences with padding, and packed ones that
    a model splits, once each.

    Args:
        queries: see :func:`attention_map`; rows count within each call.

    Yields:
        a list, which grows by ``[B, R, H, M]`` per call.

    Raises:
        NotImplementedError: a call selects blocks by content, or splits its rows over ranks.

    >>> q = k = v = torch.randn(1, 100, 4, 8)
    >>> from dilated_attention_pytorch.ops import attention_maps
    >>> with attention_maps([0]) as maps:
    ...     out = attend(q, k, v, DilatedPattern([16, 64], [1, 4]))
    >>> torch.testing.assert_close(out[:, 0], torch.einsum("bhm,bmhd->bhd", maps[0][:, 0], v))
    """
    maps: list[Tensor] = []
    with _watching(lambda call: maps.append(map_of_call(call, queries))):
        yield maps


@contextmanager
def attention_calls() -> Iterator[list[Call]]:
    """Keep every call of attention within the context, in order, for :func:`attention_rollout`.

    The list holds the queries and keys of all calls; ``value`` of a call in it is its key.
    """
    calls: list[Call] = []
    with _watching(lambda call: calls.append(call._replace(value=call.key))):
        yield calls


def attention_rollout(calls: Sequence[Call], queries: Queries) -> Tensor:
    """Attention rollout: what reaches the outputs of chosen queries from every input row, through all layers.

    ``R = A_L ... A_2 A_1`` with ``A_l = (I + mean over heads of P_l) / 2``, where the identity stands for the residual
    connection (Abnar and Zuidema 2020, arXiv 2005.00928). The rows of R for ``queries`` are computed from the last
    layer to the first, without an N x N matrix. It ignores values, projections and feed-forward layers: it says along
    which paths information can flow, not what the model made of it.

    Args:
        calls: one call per layer over the same N rows, in the order of the layers, see :func:`attention_calls`.
        queries: see :func:`attention_map`.

    Returns:
        ``[B, R, N]`` in float32, float64 for float64 inputs.

    Raises:
        ValueError: ``calls`` is empty, or a call is not self-attention over as many rows as the first.
        NotImplementedError: see :func:`attention_maps`.

    >>> pattern = DilatedPattern([16, 64], [1, 4])
    >>> from dilated_attention_pytorch.ops import attention_calls, attention_rollout
    >>> with attention_calls() as calls:
    ...     for layer in range(3):
    ...         q = k = v = torch.randn(1, 100, 4, 8)
    ...         out = attend(q, k, v, pattern)
    >>> attention_rollout(calls, [0]).shape
    torch.Size([1, 1, 100])
    """
    if not calls:
        raise ValueError("calls must hold one call of attention per layer, got none")
    for call in calls:
        rows, offsets = (call.query.shape[:2], call.key.shape[:2]), (call.query_offset, call.key_offset)
        if rows[0] != rows[1] or offsets[0] != offsets[1] or rows[0] != calls[0].query.shape[:2]:
            raise ValueError(
                f"a rollout takes self-attention over the same rows in every layer, got {rows[0][1]} queries at "
                f"{offsets[0]} and {rows[1][1]} keys at {offsets[1]}; the first layer has {calls[0].query.shape[1]}"
            )
    weights = _checked(queries, calls[0].query)
    if not weights.is_floating_point():
        batch, num_rows = calls[0].query.shape[:2]
        weights = torch.nn.functional.one_hot(weights, num_rows).to(calls[0].dtype).expand(batch, -1, -1)
    for call in reversed(calls):
        weights = (weights + map_of_call(call, weights).mean(2)) / 2
    return weights


@contextmanager
def _watching(watch: Callable[[Call], None]) -> Iterator[None]:
    WATCHERS.append(watch)
    try:
        yield
    finally:
        WATCHERS.remove(watch)


def _checked(queries: Queries, query: Tensor) -> Tensor:
    """Rows int64 ``[R]``, or weights ``[B, R, N]`` in the accumulation dtype."""
    batch, num_rows = query.shape[:2]
    if isinstance(queries, str):
        if queries != "mean":
            raise ValueError(f'queries must be rows, weights of rows or "mean", got {queries!r}')
        return torch.full(
            (batch, 1, num_rows), 1.0 / num_rows, dtype=accumulation_dtype(query.dtype), device=query.device
        )
    chosen = torch.as_tensor(queries, device=query.device)
    if chosen.is_floating_point():
        if chosen.shape[-1:] != (num_rows,) or chosen.dim() not in (2, 3) or chosen.shape[:-2] not in ((), (batch,)):
            raise ValueError(
                f"weights of queries must be [R, N] or [B, R, N] for query [B, N, H, D] = {list(query.shape)}, got "
                f"{list(chosen.shape)}"
            )
        return chosen.to(accumulation_dtype(query.dtype)).expand(batch, *chosen.shape[-2:])
    if chosen.dim() != 1 or chosen.dtype == torch.bool or chosen.is_complex():
        raise TypeError(
            "queries must be the numbers of rows [R], or floating-point weights of all rows [R, N], got "
            f"{chosen.dtype} {list(chosen.shape)}"
        )
    outside = chosen[(chosen < 0) | (chosen >= num_rows)]
    if outside.numel():
        raise ValueError(f"queries must be rows 0 to {num_rows - 1} of query, got {int(outside[0])}")
    return chosen.to(torch.int64)


def _of_rows(call: Call, rows: Tensor) -> Tensor:
    """The maps of ``rows``, ``[B, R, H, M]``."""
    assert call.pattern is not None
    if call.cu_seqlens is not None:
        check_documents(call.pattern, documents_of(call.cu_seqlens, call.query.shape[1]), call.key.shape[2])
    query, scale = with_positive_scale(call.query[:, rows], call.scale)
    probabilities, lse, _ = reference_probabilities(
        query,
        call.key,
        call.pattern,
        rows + call.first_query,
        is_causal=call.is_causal,
        scale=scale,
        key_offset=call.key_offset,
        cu_seqlens=call.cu_seqlens,
        key_padding_mask=call.key_padding_mask,
        softcap=call.softcap,
        distance_bias=call.distance_bias,
        key_bias=call.key_bias,
        coordinates=call.coordinates,
        first_row=call.first_query,
    )
    probabilities, lse = probabilities.transpose(1, 2), lse.transpose(1, 2)
    return finished(probabilities, lse, call.sinks, call.shift)[0]


def _weighted(call: Call, weights: Tensor) -> Tensor:
    """``sum_p w[p] P[p]`` for ``weights [B, R, N]``, ``[B, R, H, M]``."""
    heads, kv_heads = call.query.shape[2], call.key.shape[2]
    pattern, key = call.pattern, call.key
    assert pattern is not None
    if heads != kv_heads:  # a sum over the queries is one per key/value head
        serving = [head // (heads // kv_heads) for head in range(heads)]
        pattern, key = pattern.for_heads(serving, kv_heads), key[:, :, serving]
    key_bias = None if call.key_bias is None else call.key_bias.repeat_interleave(heads // kv_heads, 2)
    outside = (call.sinks, call.shift)
    call = call._replace(key=key, value=key, pattern=pattern, key_bias=key_bias, sinks=None, shift=None)
    _, lse = attend_checked(call)
    query, scale = with_positive_scale(call.query, call.scale)
    call = call._replace(query=query, scale=scale, impl=IMPLEMENTATIONS["aten"])
    values, _ = finished(weights.transpose(1, 2).unsqueeze(2).expand(-1, -1, heads, -1), lse, *outside)
    # [B, M, H, R]
    return weighted_sum("keys", call, lse, values, []).permute(0, 3, 2, 1)
