"""Dense partials between picked rows: queries where they lie, keys that came from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels import aten, blockwise, native
from dilated_attention_pytorch.kernels.dropout import keep_factors
from dilated_attention_pytorch.planning import Block

from .merge import merge_in_place, merge_pairs_in_place


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys that all queries of a rectangle see, and where they come from."""

    key: Tensor
    """``[B, heads, rows, D]``; of any strides but the last, which is 1."""
    value: Tensor
    is_ignored: Tensor | None
    """bool ``[B, heads, rows]``, True = padding; keys and values are zero there."""


@dataclass(frozen=True, slots=True)
class Dropout:
    """Which pairs of a rectangle are dropped: by the seed, and by absolute rows."""

    seed: Tensor
    probability: float
    queries: Block
    keys: Block


def block_view(tensor: Tensor, block: Block, *, ratio: int = 1, index: int = 0) -> Tensor:
    """A block's rows ``[B, heads, count(, D)]`` of a tensor ``[B, rows, heads(, D)]``, without a copy.

    With ``ratio`` heads of the tensor for every key/value head: the index-th of each.
    """
    of_batch, of_row, of_head = tensor.stride()[:3]
    size = (tensor.shape[0], block.num_heads, block.count, *tensor.shape[3:])
    stride = (of_batch, block.skew * of_row + ratio * of_head, block.step * of_row, *tensor.stride()[3:])
    start = tensor.storage_offset() + block.row * of_row + (block.head * ratio + index) * of_head
    return tensor.as_strided(size, stride, start)


def merge_rectangle(
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    queries: Block,
    keys: Keys,
    *,
    ratio: int,
    scale: float,
    impl: str,
    dropout: Dropout | None,
    rest: Tensor | None,
) -> None:
    """Merge what the queries of a block see of ``keys`` into ``out [B, N, H, D]`` and ``lse [B, N, H]``.

    Both are in the accumulation dtype of ``query [B, N, H, D]``. ``ratio`` query heads share a key/value head,
    ``scale`` is not negative, ``impl`` is "aten", "native" or "triton". Dropout is computed by matrix products under
    all of them. With ``rest``, for large scores, it and ``lse`` are a pair, see :func:`merge_pairs_in_place`.
    """
    if impl == "native" and dropout is None and rest is None:
        native.merge_partial(
            _remote(queries, keys), query, *_by_rows(keys), out, lse, _masks(keys), ratio=ratio, scale=scale
        )
        return
    for index in range(ratio):
        q, out_view, lse_view = (block_view(x, queries, ratio=ratio, index=index) for x in (query, out, lse))
        rest_view = None if rest is None else block_view(rest, queries, ratio=ratio, index=index)
        part_rest = None if rest_view is None else torch.empty_like(rest_view)
        bias = _bias(keys, q)
        biases = () if bias is None else (blockwise.Bias(bias),)
        if dropout is not None:
            part, part_lse = blockwise.blockwise_forward(
                q, keys.key, keys.value, biases, is_causal=False, scale=scale, rest=part_rest, is_dropped=True
            )
            part = blockwise.blockwise_weighted_sum(
                q, keys.key, part_lse, keys.value, biases, _keep(dropout, q, ratio, index), is_causal=False,
                scale=scale, rest=part_rest,
            )  # fmt: skip
        elif rest is not None:
            part, part_lse = blockwise.blockwise_forward(
                q, keys.key, keys.value, biases, is_causal=False, scale=scale, rest=part_rest
            )
        elif impl == "triton":
            part, part_lse = _triton_forward(q, keys, scale)
        elif aten.is_fused(q, has_bias=bias is not None):
            part, part_lse = aten.fused_forward(q, keys.key, keys.value, bias, is_causal=False, scale=scale)
        else:
            part, part_lse = blockwise.blockwise_forward(q, keys.key, keys.value, biases, is_causal=False, scale=scale)
        if rest_view is None or part_rest is None:
            merge_in_place(out_view, lse_view, part, part_lse.to(lse_view.dtype))
        else:
            merge_pairs_in_place(out_view, (lse_view, rest_view), part, (part_lse, part_rest))


def add_rectangle_gradients(
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None,
    delta: Tensor | None,
    query: Tensor,
    queries: Block,
    keys: Keys,
    *,
    ratio: int,
    scale: float,
    impl: str,
    dropout: Dropout | None,
    rest: Tensor | None,
) -> None:
    """Add one rectangle's gradients under the merged ``out`` and ``lse`` (+inf in rows without a key).

    ``grad_query [B, N, H, D]`` and ``grad_key``, ``grad_value [B, heads, rows, D]`` are in the accumulation dtype.
    ``delta [B, N, H]`` is ``rowsum(grad_out * out) - grad_lse``, needed where that or dropout is: None otherwise. With
    ``rest``, it and ``lse`` are a pair, as in :func:`merge_rectangle`.
    """
    if impl == "native" and dropout is None and rest is None:
        rows = (grad_key.transpose(1, 2), grad_value.transpose(1, 2))
        native.add_gradients(
            _remote(queries, keys), grad_out, query, *_by_rows(keys), out, lse, grad_lse, (grad_query, *rows),
            _masks(keys), ratio=ratio, scale=scale,
        )  # fmt: skip
        return
    for index in range(ratio):
        views = [block_view(x, queries, ratio=ratio, index=index) for x in (query, grad_out, out, lse, grad_query)]
        q, grad_view, out_view, lse_view, grad_query_view = views
        bias = _bias(keys, q)
        is_plain = delta is None and dropout is None and rest is None
        if impl == "triton" and is_plain:
            parts = _triton_backward(grad_view, q, keys, out_view, lse_view, scale)
        elif is_plain and aten.is_fused(q, has_bias=bias is not None):
            parts = aten.fused_backward(
                grad_view, q, keys.key, keys.value, out_view, lse_view, bias, is_causal=False, scale=scale
            )
        else:
            if delta is None:
                of_rows = (grad_view.to(lse.dtype) * out_view.to(lse.dtype)).sum(-1)
            else:
                of_rows = block_view(delta, queries, ratio=ratio, index=index)
            parts = blockwise.blockwise_backward(
                grad_view, q, keys.key, keys.value, lse_view, of_rows, () if bias is None else (blockwise.Bias(bias),),
                None if dropout is None else _keep(dropout, q, ratio, index), is_causal=False, scale=scale,
                rest=None if rest is None else block_view(rest, queries, ratio=ratio, index=index),
            )  # fmt: skip
        for total, part in zip((grad_query_view, grad_key, grad_value), parts, strict=True):
            total += part


def _remote(queries: Block, keys: Keys) -> native.Remote:
    return native.Remote(
        queries.row, queries.step, queries.count, queries.head, queries.num_heads, queries.skew, keys.key.shape[2]
    )


def _by_rows(keys: Keys) -> tuple[Tensor, Tensor]:
    return keys.key.transpose(1, 2), keys.value.transpose(1, 2)


def _masks(keys: Keys) -> native.Masks:
    return native.Masks(None if keys.is_ignored is None else keys.is_ignored.transpose(1, 2))


def _bias(keys: Keys, query: Tensor) -> Tensor | None:
    if keys.is_ignored is None:
        return None
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return (keys.is_ignored.to(dtype) * aten.MASKED).unsqueeze(2).expand(-1, -1, query.shape[2], -1)


def _keep(dropout: Dropout, query: Tensor, ratio: int, index: int) -> blockwise.KeepFactors:
    """Dropout factors of a view of queries, by absolute rows: those of the same pairs in one call over everything."""
    device, queries, keys = query.device, dropout.queries, dropout.keys
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    places = torch.arange(queries.num_heads, device=device)
    batches = torch.arange(query.shape[0], device=device).view(-1, 1, 1, 1).expand(*query.shape[:3], 1)
    heads = ((queries.head + places) * ratio + index).view(1, -1, 1, 1).expand(*query.shape[:3], 1)

    def rows(block: Block) -> Tensor:
        steps = torch.arange(block.count, device=device) * block.step
        return block.row + places[:, None] * block.skew + steps

    query_rows = rows(queries)[None, :, :, None].expand(*query.shape[:3], 1)
    key_rows = rows(keys)[None, :, None, :].expand(query.shape[0], -1, -1, -1)

    def factors(place: blockwise.Place) -> Tensor:
        return keep_factors(
            dropout.seed, place.of_queries(batches), place.of_queries(heads), place.of_queries(query_rows),
            place.of_keys(key_rows), dropout.probability, dtype,
        )  # fmt: skip

    return factors


def _problems(keys: Keys) -> Iterator[tuple[slice, Tensor | None]]:
    """Heads that one launch takes: all of them, or one by one where each has padding of its own."""
    if keys.is_ignored is None:
        yield slice(None), None
        return
    for head in range(keys.key.shape[1]):
        yield slice(head, head + 1), keys.is_ignored[:, head]


def _triton_forward(query: Tensor, keys: Keys, scale: float) -> tuple[Tensor, Tensor]:
    from dilated_attention_pytorch.kernels.triton import launch

    parts = [
        launch.attend_rows(
            *(x[:, heads].transpose(1, 2) for x in (query, keys.key, keys.value)), scale=scale, key_padding_mask=ignored
        )
        for heads, ignored in _problems(keys)
    ]
    out, lse = (torch.cat(part, dim=2).transpose(1, 2) for part in zip(*parts, strict=True))
    # Merging takes finite numbers: a row that sees padding only weighs nothing.
    return out, lse.clamp(min=aten.MASKED)


def _triton_backward(
    grad_out: Tensor, query: Tensor, keys: Keys, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    from dilated_attention_pytorch.kernels.triton import launch

    parts = [
        launch.attend_rows_backward(
            *(x[:, heads].transpose(1, 2) for x in (query, keys.key, keys.value)),
            *(x[:, heads].transpose(1, 2).contiguous() for x in (out, lse, grad_out)),
            scale=scale, key_padding_mask=ignored,
        )
        for heads, ignored in _problems(keys)
    ]  # fmt: skip
    grad_query, grad_key, grad_value = (torch.cat(part, dim=2).transpose(1, 2) for part in zip(*parts, strict=True))
    return grad_query, grad_key, grad_value
