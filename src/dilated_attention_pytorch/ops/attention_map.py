"""Attention probabilities of chosen queries over all keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels.reference import reference_probabilities
from dilated_attention_pytorch.kernels.select import Impl
from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.precision import accumulation_dtype, cast_by_autocast, without_autocast

from .attend import attend_checked
from .call import Call
from .host import with_positive_scale
from .implementations import IMPLEMENTATIONS
from .validation import check_call, check_documents, documents_of, sequence_first
from .weighted_sum import weighted_sum


def attention_map(
    query: Tensor,
    key: Tensor,
    pattern: Pattern,
    queries: Sequence[int] | Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    query_offset: int = 0,
    key_offset: int = 0,
    cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    heads_first: bool | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """The probabilities with which :func:`attend` weighs every key for chosen queries, per head.

    ``P[p, t] = c[p, t] exp(s[p, t] - L[p])`` with the count c, the score s and the log-sum-exp L of :func:`attend`:
    its output is ``O[p] = sum_t P[p, t] v[t]``. A row of P sums to 1; to 0 for a query without a key, and to less than
    1 under ``tail="zero_padded"``, where the rest belongs to the zero keys. Differentiable in ``query`` and ``key``.

    Chosen rows are computed from the definition, in O(R M) time and memory for R rows and M keys. Weighted sums of all
    rows (``queries`` of weights) take the plan and the kernels of :func:`attend`: the pairs of the pattern are computed
    once more, in memory linear in N and M.

    Args:
        query, key, pattern, is_causal, scale, query_offset, key_offset, cu_seqlens, key_padding_mask, heads_first:
            see :func:`attend`. A map has no dropout.
        queries: R query rows, counted in ``query`` from 0, as integers: one map each, of ``P[p]``. Or floating-point
            weights ``[R, N]`` or ``[B, R, N]`` of all query rows: one map each, of ``sum_p w[p] P[p]``; 1 / N
            everywhere is the mean over the queries.
        impl: the implementation that computes weighted sums, see :func:`attend`.

    Returns:
        ``[B, R, H, M]`` in float32, float64 for float64 inputs.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, shape, dtype, device or range.
        NotImplementedError: the named implementation does not support this call.

    >>> q, k = torch.randn(2, 1, 100, 4, 8).unbind()
    >>> pattern = DilatedPattern([16, 64], [1, 4])
    >>> attention_map(q, k, pattern, [0, 7]).shape  # of two queries
    torch.Size([1, 2, 4, 100])
    >>> mean = attention_map(q, k, pattern, torch.full((1, 100), 1 / 100))  # over all queries
    >>> mean.sum(-1)
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
    if isinstance(query_offset, Tensor):
        raise TypeError("query_offset of a map must be an integer position, got a tensor")
    query, key = cast_by_autocast(query, key)
    queries = _checked(queries, query)
    with without_autocast(query.device.type):
        if queries.is_floating_point():
            return _weighted(call._replace(query=query, key=key, value=key), queries)
        query, scale = with_positive_scale(query, scale)
        return _of_rows(call._replace(query=query, key=key, scale=scale), queries)


def _checked(queries: Sequence[int] | Tensor, query: Tensor) -> Tensor:
    """Rows int64 ``[R]``, or weights ``[B, R, N]`` in the accumulation dtype."""
    batch, num_rows = query.shape[:2]
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
    assert call.scale is not None
    if call.cu_seqlens is not None:
        check_documents(call.pattern, documents_of(call.cu_seqlens, call.query.shape[1]), call.key.shape[2])
    probabilities, _, _ = reference_probabilities(
        call.query[:, rows],
        call.key,
        call.pattern,
        rows + call.first_query,
        is_causal=call.is_causal,
        scale=call.scale,
        key_offset=call.key_offset,
        cu_seqlens=call.cu_seqlens,
        key_padding_mask=call.key_padding_mask,
    )
    return probabilities.transpose(1, 2)


def _weighted(call: Call, weights: Tensor) -> Tensor:
    """``sum_p w[p] P[p]`` for ``weights [B, R, N]``, ``[B, R, H, M]``."""
    heads, kv_heads = call.query.shape[2], call.key.shape[2]
    pattern, key = call.pattern, call.key
    assert pattern is not None
    if heads != kv_heads:  # a sum over the queries is one per key/value head
        serving = [head // (heads // kv_heads) for head in range(heads)]
        pattern, key = pattern.for_heads(serving, kv_heads), key[:, :, serving]
    call = call._replace(key=key, value=key, pattern=pattern)
    _, lse = attend_checked(call)
    query, scale = with_positive_scale(call.query, call.scale)
    call = call._replace(query=query, scale=scale, impl=IMPLEMENTATIONS["aten"])
    values = weights.transpose(1, 2).unsqueeze(2).expand(-1, -1, heads, -1)
    # [B, M, H, R]
    return weighted_sum("keys", call, lse, values, []).permute(0, 3, 2, 1)
