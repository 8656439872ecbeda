"""Validation of the arguments of the functional API."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.precision import accumulation_dtype, is_cast

from .call import Call

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MOST_HEADS = 64
"""More heads than this, each with its own key/value head, and fewer rows: the axes are probably swapped."""


def check_call(call: Call) -> None:
    """Validate the arguments of :func:`attend` and :func:`attend_blocks`.

    Errors name the argument, the expectation and the value. The values of tensors are not read.
    """
    query, key = call.query, call.key
    _check_tensors(query, key, call.value)
    pattern, is_causal, scale, cu_seqlens, mask = (
        call.pattern,
        call.is_causal,
        call.scale,
        call.cu_seqlens,
        call.key_padding_mask,
    )
    if call.block_sizes:
        _check_blocks(call)
    elif not isinstance(pattern, Pattern):
        raise TypeError(
            "pattern must be a Pattern such as DilatedPattern([2048, 4096], [1, 2]), "
            f"got {pattern!r} of type {type(pattern).__name__}"
        )
    if not isinstance(is_causal, bool):
        check_switch("is_causal", is_causal)
    if scale is not None:
        check_scale("scale", scale)
    of_scores = accumulation_dtype(query.dtype)
    largest = torch.finfo(of_scores).max / 4
    if scale is not None and abs(scale) > largest:
        raise ValueError(f"scale must be at most {largest:.2g} in magnitude for scores in {of_scores}, got {scale!r}")
    if type(call.dropout_p) is not float or call.dropout_p != 0.0:
        check_dropout("dropout_p", call.dropout_p)
    query_offset, key_offset = call.query_offset, call.key_offset
    for name, offset in (("query_offset", query_offset), ("key_offset", key_offset)):
        if type(offset) is not int or offset < 0:
            _check_offset(name, offset)
    if isinstance(query_offset, Tensor):
        _check_query_start(call)
        query_offset = 0
    if mask is not None:
        _check_key_padding_mask(mask, key)
    num_queries, (_, num_keys, num_kv_heads, _) = query.shape[1], key.shape
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, query)
        if num_queries != num_keys or query_offset != 0 or key_offset != 0:
            raise ValueError(
                "cu_seqlens packs documents of self-attention, so query and key must cover the same rows starting at "
                f"position 0: got {num_queries} query rows at {query_offset} and {num_keys} key rows at {key_offset}; "
                "call attend per document for slabs"
            )
    if pattern is None:
        return
    is_zero_padded = False
    for group in pattern.groups:
        if group.heads is not None and len(group.heads) != num_kv_heads:
            raise ValueError(
                f"the pattern was restricted to other key/value heads than the call's {num_kv_heads}: {pattern}"
            )
        is_zero_padded = is_zero_padded or group.tail == "zero_padded"
    if pattern.rules:
        # Positions of packed documents are relative to the document; boundaries are checked where they are read.
        end = max(query_offset + num_queries, key_offset + num_keys) if cu_seqlens is None else 0
        for rule in pattern.rules:
            rule.check(end, num_kv_heads)
    if is_zero_padded:
        _check_zero_padded(query, key, query_offset, key_offset, mask)


def _check_offset(name: str, offset: object) -> None:
    if isinstance(offset, Tensor) and name == "query_offset":
        return
    if isinstance(offset, bool) or not isinstance(offset, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an integer position, got {offset!r} of type {type(offset).__name__}")
    if offset < 0:
        raise ValueError(f"{name} is the absolute position of the slab's first row, at least 0, got {offset}")


def _check_query_start(call: Call) -> None:
    """Validate a ``query_offset`` tensor and the options used with it; its value is not read."""
    query_start, query, key, pattern = call.query_offset, call.query, call.key, call.pattern
    key_offset = call.key_offset
    assert isinstance(query_start, Tensor)
    if pattern is None:
        raise TypeError(f"query_offset of block lists must be an integer position, got {query_start!r}")
    if query_start.dtype != torch.int64 or query_start.dim() != 0:
        raise TypeError(
            "query_offset must be an integer, or an int64 tensor without dimensions, got a tensor of "
            f"{query_start.dtype} of shape {tuple(query_start.shape)}"
        )
    if query_start.device != query.device:
        raise ValueError(
            f"query_offset, a tensor, must be on query's device {query.device}, got {query_start.device}; a position "
            "that the host knows is passed as an integer"
        )
    if not call.is_causal:
        raise NotImplementedError(
            "query_offset as a tensor is for decoding, where rows of the buffer behind the position are not seen: pass "
            "is_causal=True, or query_offset as an integer"
        )
    refused = {
        "cu_seqlens": call.cu_seqlens is not None,
        "dropout_p": call.dropout_p > 0.0,
        'tail="zero_padded"': any(group.tail == "zero_padded" for group in pattern.groups),
    }
    for name, is_given in refused.items():
        if is_given:
            raise NotImplementedError(
                f"query_offset as a tensor does not go with {name}: pass query_offset as an integer"
            )
    if query.shape[1] > key_offset + key.shape[1]:
        raise ValueError(
            "the rows of query must lie before the last of key, so that query_offset can be between 0 and key_offset + "
            f"M - N: got {query.shape[1]} rows of query, and {key.shape[1]} rows of key at {key_offset}"
        )


def check_scale(name: str, scale: float | None) -> None:
    """Raise unless ``scale`` is a finite number or None."""
    # Comparisons, since torch.compile traces math.isfinite of a number only while it is a constant.
    if scale is not None and not (_is_number(scale) and -math.inf < scale < math.inf):
        raise ValueError(f"{name} must be a finite number or None for 1 / sqrt(D), got {scale!r}")


def check_dropout(name: str, probability: float) -> None:
    """Raise unless ``probability`` is a number in [0, 1)."""
    if not _is_number(probability) or not 0.0 <= probability < 1.0:
        raise ValueError(f"{name} must be a probability of at least 0 and below 1, got {probability!r}")


def check_positive(name: str, number: float) -> None:
    """Raise unless ``number`` is a finite number above 0."""
    if not _is_number(number) or not 0.0 < number < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {number!r}")


def check_switch(name: str, switch: object) -> None:
    """Raise unless ``switch`` is True or False."""
    if not isinstance(switch, bool):
        raise TypeError(f"{name} must be True or False, got {switch!r} of type {type(switch).__name__}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions [batch, sequence, heads, head_dim], got shape {tuple(tensor.shape)}"
            )
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")
        if tensor.dtype != query.dtype and not is_cast(query, tensor):
            raise TypeError(
                f"query, key and value must have one dtype: query is {query.dtype}, got {name} {tensor.dtype}; "
                f"convert with {name}.to(query.dtype)"
            )
        if tensor.device != query.device:
            raise ValueError(
                f"query, key and value must be on one device: query is on {query.device}, got {name} on {tensor.device}"
            )
    if key.shape[:3] != value.shape[:3] or value.shape[3] == 0:
        raise ValueError(
            "key and value must have one shape [B, M, G] before their widths, which may differ and are at least 1: key "
            f"is {tuple(key.shape)}, got value {tuple(value.shape)}"
        )
    batch_size, _, num_heads, head_dim = query.shape
    key_batch_size, _, num_kv_heads, key_head_dim = key.shape
    if key_batch_size != batch_size:
        raise ValueError(f"query and key must have one batch size: query has {batch_size}, got key {key_batch_size}")
    if key_head_dim != head_dim or head_dim == 0:
        raise ValueError(
            "query and key must have one head_dim of at least 1 (the last dimension): "
            f"query has {head_dim}, got key {key_head_dim}"
        )
    if num_kv_heads == 0 or num_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            "the number of key/value heads must divide the number of query heads (layout [batch, sequence, heads, "
            f"head_dim]): got {num_heads} query heads and {num_kv_heads} key/value heads; for tensors "
            "[batch, heads, sequence, head_dim] call .transpose(1, 2)"
        )


def sequence_first(
    query: Tensor, key: Tensor, value: Tensor, heads_first: bool | None
) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value as ``[B, N, H, D]``, given as ``[B, H, N, D]`` if ``heads_first``.

    None also means ``[B, N, H, D]``, and is refused where the axes look swapped: more than 64 heads, each with its own
    key/value head, and from two rows to fewer rows than heads.

    Raises:
        TypeError: ``heads_first`` is not True, False or None.
        ValueError: the axes look swapped.
    """
    if heads_first is not None and not isinstance(heads_first, bool):
        raise TypeError(f"heads_first must be True, False or None, got {heads_first!r}")
    # Other shapes and types are refused by check_call.
    is_four_dimensional = True
    for tensor in (query, key, value):
        is_four_dimensional = is_four_dimensional and isinstance(tensor, Tensor) and tensor.dim() == 4
    if heads_first is False or not is_four_dimensional:
        return query, key, value
    if heads_first:
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    num_heads = query.shape[2]
    if num_heads > _MOST_HEADS and key.shape[2] == num_heads > max(query.shape[1], key.shape[1]) > 1:
        raise ValueError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} would be [batch, sequence, heads, head_dim] with "
            f"{query.shape[1]} rows and {num_heads} heads. If they are [batch, heads, sequence, head_dim], as in "
            f"scaled_dot_product_attention, pass heads_first=True. If {num_heads} heads are meant, pass "
            "heads_first=False"
        )
    return query, key, value


def check_order(segment_lengths: Sequence[int], dilation_rates: Sequence[int]) -> None:
    """Raise ValueError if a dilation rate exceeds its segment length: the two lists are probably swapped."""
    for length, rate in zip(segment_lengths, dilation_rates, strict=True):
        if rate > length:
            call = f"segment_lengths={list(dilation_rates)}, dilation_rates={list(segment_lengths)}"
            raise ValueError(
                "segment_lengths come first and dilation_rates second, and no rate of a module is larger than its "
                f"segment: got rate {rate} for segment length {length} in segment_lengths {list(segment_lengths)} and "
                f"dilation_rates {list(dilation_rates)}; other packages take them in the other order: write {call} if "
                "that is meant. PatternAttention(DilatedPattern(segment_lengths, dilation_rates)) takes any rate"
            )


def _check_key_padding_mask(mask: Tensor, key: Tensor) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"key_padding_mask must be a bool tensor with True where a key is to be ignored, got {kind}")
    if mask.shape != key.shape[:2]:
        raise ValueError(
            f"key_padding_mask must have the shape [B, M] = {tuple(key.shape[:2])} of key, got {tuple(mask.shape)}"
        )
    if mask.device != key.device:
        raise ValueError(f"key_padding_mask must be on key's device {key.device}, got {mask.device}")


def check_cu_seqlens(cu_seqlens: Tensor, query: Tensor) -> None:
    """Raise unless ``cu_seqlens`` is a valid boundary tensor on a device compatible with ``query``'s."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32:
        kind = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens must be an int32 tensor [documents + 1], got {kind}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens must have one dimension of at least 2 boundaries, got shape {tuple(cu_seqlens.shape)}"
        )
    if not cu_seqlens.is_cpu and cu_seqlens.device != query.device:
        raise ValueError(f"cu_seqlens must be on the CPU or on query's device {query.device}, got {cu_seqlens.device}")


def _check_zero_padded(
    query: Tensor, key: Tensor, query_offset: int, key_offset: int, key_padding_mask: Tensor | None
) -> None:
    if query.shape[1] != key.shape[1] or query_offset != 0 or key_offset != 0:
        raise NotImplementedError(
            'tail="zero_padded" is defined for self-attention over a whole sequence: got '
            f"{query.shape[1]} query rows at {query_offset} and {key.shape[1]} key rows at {key_offset}; "
            'use tail="ragged" for slabs'
        )
    if key_padding_mask is not None:
        raise NotImplementedError(
            'tail="zero_padded" depends on the length of each sequence, which a key_padding_mask leaves open; '
            "pack the sequences with cu_seqlens instead"
        )


def check_documents(pattern: Pattern, boundaries: tuple[int, ...] | None, num_kv_heads: int) -> None:
    """Raise ValueError if a rule of the pattern is not defined for the longest document."""
    if boundaries is not None:
        longest = max(end - start for start, end in itertools.pairwise(boundaries))
        for rule in pattern.rules:
            rule.check(longest, num_kv_heads)


def documents_of(cu_seqlens: Tensor | None, num_rows: int) -> tuple[int, ...] | None:
    """The boundaries as integers.

    Raises:
        ValueError: they do not start at 0, decrease, or do not end at ``num_rows``.
    """
    if cu_seqlens is None:
        return None
    boundaries = tuple(cu_seqlens.tolist())
    if boundaries[0] != 0 or boundaries[-1] != num_rows:
        raise ValueError(
            f"cu_seqlens must run from 0 to the number of rows {num_rows}, got {boundaries[0]} to {boundaries[-1]}"
        )
    if any(end < start for start, end in itertools.pairwise(boundaries)):
        raise ValueError(f"cu_seqlens must not decrease, got {list(boundaries)}")
    return boundaries


def check_size(name: str, number: int, *, least: int = 1) -> None:
    """Raise unless ``number`` is an integer of at least ``least``."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{name} must be an integer, got {number!r} of type {type(number).__name__}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")


def _check_blocks(call: Call) -> None:
    """Validate block lists and gates, except the block numbers."""
    query, key, blocks, log_gates = call.query, call.key, call.blocks, call.log_gates
    for name, size in zip(("block_size", "query_block_size"), call.block_sizes, strict=True):
        check_size(name, size)
    query_block_size = call.block_sizes[1]
    if not isinstance(blocks, Tensor) or blocks.dtype != torch.int64:
        kind = blocks.dtype if isinstance(blocks, Tensor) else type(blocks).__name__
        raise TypeError(f"blocks must be an int64 tensor [B, G, query blocks, k] of block numbers, got {kind}")
    expected = (key.shape[0], key.shape[2], -(-query.shape[1] // query_block_size))
    if blocks.dim() != 4 or tuple(blocks.shape[:3]) != expected or blocks.shape[3] == 0:
        raise ValueError(
            f"blocks must have the shape [B, G, query blocks, k] = {[*expected, 'k >= 1']} for {query.shape[1]} query "
            f"rows in blocks of {query_block_size}, got {tuple(blocks.shape)}"
        )
    if blocks.device != query.device:
        raise ValueError(f"blocks must be on query's device {query.device}, got {blocks.device}")
    if log_gates is not None:
        if not isinstance(log_gates, Tensor) or not log_gates.is_floating_point():
            kind = log_gates.dtype if isinstance(log_gates, Tensor) else type(log_gates).__name__
            raise TypeError(f"log_gates must be a floating tensor of the shape of blocks, or None, got {kind}")
        if log_gates.shape != blocks.shape or log_gates.device != blocks.device:
            raise ValueError(
                f"log_gates must have the shape and device of blocks, {tuple(blocks.shape)} on {blocks.device}, got "
                f"{tuple(log_gates.shape)} on {log_gates.device}"
            )


def check_block_numbers(blocks: Tensor, num_keys: int, block_size: int) -> None:
    """Raise unless the block numbers of a CPU tensor are -1 or valid key blocks."""
    if blocks.is_cpu and blocks.numel():
        num_blocks, least, most = -(-num_keys // block_size), int(blocks.min()), int(blocks.max())
        if least < -1 or most >= num_blocks:
            raise ValueError(
                f"blocks must hold numbers of the {num_blocks} key blocks of {block_size} positions, or -1 for none, "
                f"got {least} to {most}"
            )
