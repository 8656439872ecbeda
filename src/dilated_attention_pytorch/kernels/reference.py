"""The dense reference: one softmax over ``s + log c``. It shares no code with planning or the other kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.precision import accumulation_dtype


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    is_causal: bool,
    scale: float,
    query_offset: int,
    key_offset: int,
    cu_seqlens: Tensor | None,
    key_padding_mask: Tensor | None,
    keep_probability: Tensor | None,
    softcap: float = 0.0,
    distance_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    coordinates: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp directly from the definition, in O(N M) time and memory.

    ``keep_probability`` are the dropout factors of the merged probabilities, ``[B, H, N, M]``; for the last four see
    :class:`.call.Call`.
    """
    query_rows = torch.arange(query.shape[1], device=query.device) + query_offset
    probabilities, lse, seen = reference_probabilities(
        query,
        key,
        pattern,
        query_rows,
        is_causal=is_causal,
        scale=scale,
        key_offset=key_offset,
        cu_seqlens=cu_seqlens,
        key_padding_mask=key_padding_mask,
        softcap=softcap,
        distance_bias=distance_bias,
        key_bias=key_bias,
        coordinates=coordinates,
    )
    if keep_probability is not None:
        probabilities = probabilities * keep_probability.to(probabilities.dtype)
    v = _by_query_head(value.to(probabilities.dtype), query).masked_fill(~seen, 0.0)
    return torch.einsum("bhnm,bmhd->bnhd", probabilities, v).to(query.dtype), lse.transpose(1, 2)


def reference_probabilities(
    query: Tensor,
    key: Tensor,
    pattern: Pattern,
    query_rows: Tensor,
    *,
    is_causal: bool,
    scale: float,
    key_offset: int,
    cu_seqlens: Tensor | None,
    key_padding_mask: Tensor | None,
    softcap: float = 0.0,
    distance_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    coordinates: Tensor | None = None,
    first_row: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities ``c exp(s - L)`` of some rows, directly from the definition, in O(R M) time and memory.

    Args:
        query: ``[B, R, H, D]``.
        key: ``[B, M, G, D]``.
        pattern: attention pattern.
        query_rows: int64 ``[R]``, absolute positions of the queries, or their rows with ``cu_seqlens``.
        is_causal, scale, key_offset, cu_seqlens, key_padding_mask: see :func:`dilated_attention_pytorch.attend`.
        softcap, distance_bias, key_bias, coordinates: see :class:`.call.Call`.
        first_row: position of the first row of the whole query; None = that of the first of ``query_rows``.

    Returns:
        probabilities ``[B, H, R, M]``, log-sum-exp ``[B, H, R]``, both in the accumulation dtype, and bool
        ``[B, M, H, 1]``, the keys that any of the rows sees.
    """
    num_heads, num_kv_heads = query.shape[2], key.shape[2]
    dtype = accumulation_dtype(query.dtype)
    key_rows = torch.arange(key.shape[1], device=query.device) + key_offset
    count = _counts(pattern, query_rows, key_rows, num_kv_heads, cu_seqlens, is_causal=is_causal)
    count = count.repeat_interleave(num_heads // num_kv_heads, dim=0).expand(query.shape[0], -1, -1, -1)
    if key_padding_mask is not None:
        count = count.masked_fill(key_padding_mask[:, None, None, :], 0)
    seen = (count > 0).any(dim=2).transpose(1, 2).unsqueeze(-1)
    k = _by_query_head(key.to(dtype), query).masked_fill(~seen, 0.0)  # since 0 * NaN is NaN
    scores = scale * torch.einsum("bnhd,bmhd->bhnm", query.to(dtype), k)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if coordinates is not None:
        assert distance_bias is not None
        difference = coordinates[:, :, query_rows - key_offset, None] - coordinates.unsqueeze(2)
        distance = difference.square().sum(1).sqrt().nan_to_num(0.0)
        scores = scores + distance_bias.unsqueeze(-1) * distance.unsqueeze(1)
    elif distance_bias is not None:
        num_rows = distance_bias.shape[1] - key.shape[1] + 1
        rows = query_rows - (query_rows[:1] if first_row is None else first_row)
        scores = (
            scores + distance_bias[:, torch.arange(key.shape[1], device=rows.device) - rows[:, None] + num_rows - 1]
        )
    if key_bias is not None:
        scores = scores + key_bias.repeat_interleave(num_heads // num_kv_heads, 2).transpose(1, 2).unsqueeze(2)
    scores = scores + count.to(dtype).log()
    zero_pad_keys = _zero_pad_counts(pattern, query_rows, key_rows, num_kv_heads, cu_seqlens)
    if zero_pad_keys is not None and not is_causal:
        zero_pad_keys = zero_pad_keys.repeat_interleave(num_heads // num_kv_heads, dim=0).expand(scores.shape[:3])
        scores = torch.cat([scores, zero_pad_keys.to(dtype).log().unsqueeze(-1)], dim=-1)
    no_key = (scores == float("-inf")).all(dim=-1, keepdim=True)
    scores = torch.where(no_key, 0.0, scores)
    probabilities = torch.where(no_key, 0.0, torch.softmax(scores, dim=-1))[..., : key.shape[1]]
    return probabilities, torch.where(no_key.squeeze(-1), float("-inf"), torch.logsumexp(scores, dim=-1)), seen


def _by_query_head(tensor: Tensor, query: Tensor) -> Tensor:
    """Keys or values ``[B, M, G, D]`` by the query head that they serve, ``[B, M, H, D]``."""
    ratio = query.shape[2] // tensor.shape[2]
    return tensor if ratio == 1 else tensor.repeat_interleave(ratio, dim=2)


def _documents(rows: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Document of every absolute row, and its position there."""
    if cu_seqlens is None:
        return torch.zeros_like(rows), rows
    starts = cu_seqlens.to(rows.device, rows.dtype)
    document = torch.searchsorted(starts, rows, right=True) - 1
    return document, rows - starts[document]


def _counts(
    pattern: Pattern,
    query_rows: Tensor,
    key_rows: Tensor,
    num_kv_heads: int,
    cu_seqlens: Tensor | None,
    *,
    is_causal: bool,
) -> Tensor:
    query_document, query_positions = _documents(query_rows, cu_seqlens)
    key_document, key_positions = _documents(key_rows, cu_seqlens)
    count = pattern.counts(query_positions, key_positions, num_kv_heads, is_causal=is_causal)
    return count * (query_document[:, None] == key_document[None, :])


def _zero_pad_counts(
    pattern: Pattern, rows: Tensor, sequence_rows: Tensor, num_kv_heads: int, cu_seqlens: Tensor | None
) -> Tensor | None:
    """Number of zero keys that each of some rows of a sequence sees under ``tail="zero_padded"``, ``[G, R]``; None
    without any."""
    padded = [group for group in pattern.groups if group.tail == "zero_padded"]
    if not padded:
        return None
    document, positions = _documents(rows, cu_seqlens)
    document_of_all, position_of_all = _documents(sequence_rows, cu_seqlens)
    same_document = document[:, None] == document_of_all[None, :]
    lengths = same_document.sum(dim=1)
    zero_pad_keys = []
    for head in range(num_kv_heads):
        total = torch.zeros_like(rows)
        for group in padded:
            segment, selected = group.locate(positions, head, num_kv_heads)
            segment_of_all, selected_of_all = group.locate(position_of_all, head, num_kv_heads)
            mates = same_document & (segment[:, None] == segment_of_all[None, :]) & selected_of_all[None, :]
            filled = -(-lengths.clamp(max=group.segment_length) // group.dilation_rate)
            total += torch.where(selected, filled - mates.sum(dim=1), 0)
        zero_pad_keys.append(total)
    return torch.stack(zero_pad_keys)
