"""The attention function registered with transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dilated_attention_pytorch.models.longnet import check_equal_boundaries
from dilated_attention_pytorch.ops import Scores, attend
from dilated_attention_pytorch.patterns import DilatedPattern
from dilated_attention_pytorch.precision import cast_by_autocast
from dilated_attention_pytorch.tracing import require

from .bounded import cache_of
from .cached import attend_cached
from .config import check_no_window, layer_pattern, local_window_of_layer
from .distances import is_without_bias
from .documents import is_causal_seal, is_seal, is_unread, unseal
from .layers import is_causal_without_mask, keys_are_of_another, layer_of, note_attended, note_own
from .visibility import Visibility, both, visibility_of

_PASSED_BY = frozenset(
    {
        # transformers' TransformersKwargs; sizes that follow from the boundaries of documents
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "seq_idx",
        # models, generate, pipelines
        "cache_position",
        "deterministic",
        "logits_to_keep",
        "return_dict",
        "use_cache",
        # targets and the arguments of losses
        "end_positions",
        "ignore_index",
        "label",
        "label_ids",
        "labels",
        "loss_kwargs",
        "next_sentence_label",
        "reduction",
        "return_loss",
        "shift_labels",
        "start_positions",
        # what tokenizers and collators return about tokens
        "length",
        "mm_token_type_ids",
        "num_truncated_tokens",
        "offset_mapping",
        "overflow_to_sample_mapping",
        "overflowing_tokens",
        "special_tokens_mask",
        "token_type_ids",
    }
)
"""Keywords that reach every attention function through ``**kwargs`` of models, and that none of transformers' own reads
to compute attention. transformers has no list of them; a test compares this one with its sources."""

_REFUSED = {
    "sinks": "attention sinks that differ between queries, as in Inkling 2, are not computed",
    "block_indices": "keys are chosen by content, as in MiniMax M3, and a pattern goes by positions",
    "indices": "keys are chosen by content, as in DeepSeek V3.2, and a pattern goes by positions",
    "cache": "paged caches of continuous batching hold no sequence of rows",
    "block_table": "paged caches of continuous batching hold no sequence of rows",
    "output_attentions": "the N x N weights are never formed",
    "kernel_options": 'they are for kernels of "flex_attention"',
}


def dilated_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention under the layer's pattern, with the signature of transformers' attention functions.

    Args:
        module: the attention layer; its configuration holds the pattern.
        query: ``[B, H, N, D]``.
        key, value: ``[B, G, M, D]``, ``[B, G, M, Dv]``, cached and new rows.
        attention_mask: from :func:`documents_mask`, or of every pair, see :func:`visibility_of`.
        dropout: probability of dropping a merged probability.
        scaling: scale of the scores; None = ``1 / sqrt(D)``.
        is_causal: overrides the module's attribute; a mask overrides both.
        sliding_window: size of the layer's own window, in tokens.
        position_ids: ``[B, N]``, checked for packed rows that the mask does not cover.
        cu_seq_lens_q, cu_seq_lens_k: int32 boundaries of the documents of one packed row, instead of a mask.
        softcap: cap of the scaled scores; see :class:`Scores`.
        s_aux: ``[H]``, sinks of the heads; see :class:`Scores`.
        position_bias: ``[H, 2 W + 1]`` by distance, from :func:`bias_by_distance`.
        options: arguments of other implementations; any that may affect attention raises.

    Returns:
        ``[B, N, H, Dv]``, and None for the weights, which are never formed.

    Raises:
        NotImplementedError, ValueError, TypeError: an unsupported or invalid argument; the message names it.
    """
    note_attended(module)
    _check_options(options)
    scores = _scores(module, softcap, s_aux, position_bias)
    rule = None
    is_cross = keys_are_of_another(module) and not (attention_mask is not None and is_causal_seal(attention_mask))
    if attention_mask is not None and not is_cross:
        rule = visibility_of(attention_mask, query.shape[2], type(module).__name__)
        # Some models pass is_causal=False with a mask, because a dense mask would be causal itself.
        is_causal = rule.is_causal
    elif is_causal is None:
        is_causal = is_causal_without_mask(module)
    if is_cross:
        return _plain_attention(query, key, value, attention_mask, dropout, scaling, scores), None
    if cu_seq_lens_k is not None and cu_seq_lens_q is not None and layer_of(module)[1] in (None, 0):
        # Once for all layers, as it synchronises.
        check_equal_boundaries("cu_seq_lens_q and cu_seq_lens_k", cu_seq_lens_q, cu_seq_lens_k)
    return _attend(
        module,
        query,
        key,
        value,
        rule,
        scaling,
        dropout,
        scores,
        is_causal=is_causal,
        sliding_window=sliding_window,
        position_ids=position_ids,
        boundaries=cu_seq_lens_q,
    ), None


def attend_written_out(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Sequence[Tensor],
    slopes: Tensor | None,
    dropout: float,
    scaling: float,
    *,
    is_causal: bool,
) -> Tensor:
    """The attention of a module that computes its own, see :func:`write_under_pattern`; shapes as above.

    Without a mask a module's queries see every key, whatever the module says of itself.
    """
    note_attended(module)
    scores = None if slopes is None else Scores(slopes=slopes)
    user = type(module).__name__
    if keys_are_of_another(module):
        if len(masks) > 1:
            raise NotImplementedError(
                f'{user} has two masks for another sequence: use "sdpa" or "eager" for this model'
            )
        return _plain_attention(query, key, value, masks[0] if masks else None, dropout, scaling, scores)
    rule = None
    for mask in masks:
        rule = both(rule, visibility_of(mask, query.shape[2], user), user)
    is_causal = is_causal or query.shape[2] == 1 if rule is None else rule.is_causal
    window = local_window_of_layer(*layer_of(module))
    return _attend(
        module, query, key, value, rule, scaling, dropout, scores, is_causal=is_causal, sliding_window=window
    )


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Visibility | None,
    scaling: float | None,
    dropout: float,
    scores: Scores | None,
    *,
    is_causal: bool,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    boundaries: Tensor | None = None,
) -> Tensor:
    """Attention of a sequence to itself, under the pattern of the layer and the rule of its mask."""
    note_own(module)
    bounded = cache_of(key)
    num_columns = key.shape[2] if rule is None else rule.num_columns
    if key.shape[2] < num_columns and bounded is None:
        raise NotImplementedError(
            f"{type(module).__name__} passed {key.shape[2]} keys with a mask of {num_columns} columns, so which of "
            'them are there is not known: use "sdpa" for this model'
        )
    query, key, value = cast_by_autocast(*(tensor.transpose(1, 2) for tensor in (query, key, value)))
    # A static cache has columns that are not written yet.
    key, value = key[:, :num_columns], value[:, :num_columns]
    config, layer = layer_of(module)
    _check_heads(config, key.shape[2])
    if rule is not None and rule.window is not None:
        sliding_window = min(rule.window, sliding_window or rule.window)
    if sliding_window is None and layer is not None:
        check_no_window(config, layer)
    pattern = layer_pattern(config, layer, sliding_window, is_causal=is_causal)
    attends = functools.partial(
        attend, pattern=pattern, scale=scaling, dropout_p=dropout, scores=scores, heads_first=False
    )
    mask = None if rule is None else rule.documents
    if rule is not None and rule.prefix is not None:
        if bounded is not None:
            raise NotImplementedError(
                "a BoundedCache is for causal attention, and the mask has a prefix that sees itself: use the model's "
                "own cache"
            )
        return _attend_prefix(query, key, value, mask, rule.prefix, attends)
    if bounded is not None:
        cache, cached_layer = bounded
        options = (mask, scaling, dropout, scores)
        return cache.attend(cached_layer, query, key, value, pattern, *options, is_causal=is_causal)
    if not is_causal and query.shape[1] != num_columns:
        raise NotImplementedError(
            f"attention that is not causal is of a sequence to itself, got {query.shape[1]} queries and {num_columns} "
            f'keys in {type(module).__name__}: use "sdpa" for this model; attend takes rows at another rate, placed '
            "at the positions of the others (docs/definition.md)"
        )
    order = cu_seqlens = None
    if boundaries is not None:
        cu_seqlens = _given_documents(boundaries, query, num_columns, mask)
    elif mask is not None:
        if query.shape[1] != num_columns:
            return attend_cached(query, key, value, mask, pattern, scaling, dropout, scores)
        mask = mask.expand(len(query), -1)
        order = _padding_last(mask)
        if order is not None:
            query, key, value = (_rows(tensor, order) for tensor in (query, key, value))
            mask = mask.gather(1, order)
        assert rule is not None
        cu_seqlens = _boundaries(mask, is_packed=rule.is_packed)
    elif layer == 0 and position_ids is not None and query.shape[1] == num_columns:
        # Once for all layers, as it synchronises.
        _check_not_packed(position_ids)
    if cu_seqlens is None:
        offset = int(num_columns - query.shape[1])  # sizes are tensors under torch.jit.trace
        return attends(query, key, value, is_causal=is_causal, query_offset=offset)
    flat = [tensor.reshape(1, -1, *tensor.shape[2:]) for tensor in (query, key, value)]
    out = attends(*flat, is_causal=is_causal, cu_seqlens=cu_seqlens).unflatten(1, query.shape[:2])[0]
    return out if order is None else _rows(out, order.argsort(dim=1))


def _check_options(options: dict[str, Any]) -> None:
    for name, given in options.items():
        if given is None or given is False or name in _PASSED_BY:
            continue
        reason = _REFUSED.get(name, "an unknown argument of attention")
        raise NotImplementedError(
            f'attn_implementation="dilated" does not honour {name}: {reason}; got a {type(given).__name__}, use '
            '"sdpa" or "eager" for this model'
        )


def _check_heads(config: Any, num_kv_heads: int) -> None:
    """Raise if this process has only some heads: residues follow from a head's index among all."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    all_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if num_kv_heads != all_heads:
        raise NotImplementedError(
            f'attn_implementation="dilated" needs all {all_heads} key/value heads in one process, got {num_kv_heads}: '
            "split the model by FSDP in place of tensor parallelism"
        )


def _scores(
    module: nn.Module, softcap: float | None, sinks: Tensor | None, position_bias: Tensor | None
) -> Scores | None:
    """The terms of a call's scores; None for none."""
    if position_bias is not None and position_bias.dim() != 2:
        if not is_without_bias(module):
            raise NotImplementedError(
                f"{type(module).__name__} adds a bias of its own for every pair of queries and keys to the scores, got "
                f"{tuple(position_bias.shape)}, and only those that go by distance, as T5's, are computed: use "
                '"sdpa" or "eager" for this model'
            )
        position_bias = None
    if softcap is None and sinks is None and position_bias is None:
        return None
    return Scores(softcap=softcap, sinks=sinks, distance_bias=position_bias)


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    scores: Scores | None,
) -> Tensor:
    """Dense attention of every query to every key that the mask does not hide; shapes of the attention function."""
    if mask is not None:
        key, value = key[:, :, : mask.shape[3]], value[:, :, : mask.shape[3]]
    query, key, value = cast_by_autocast(query, key, value)
    if mask is not None and is_seal(mask):
        documents = unseal(mask)
        mask = None if documents is None else (documents >= 0)[:, None, None]
    if scores is not None:
        if mask is not None and (mask.dtype != torch.bool or mask.shape[1:3] != (1, 1)):
            raise NotImplementedError(
                f"keys of another sequence are hidden by padding where scores have caps, biases or sinks, got a mask "
                f'of shape {tuple(mask.shape)}: use "sdpa" or "eager" for this model'
            )
        return attend(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            DilatedPattern([max(query.shape[2], key.shape[2])], [1]),
            scale=scaling,
            key_padding_mask=None if mask is None else ~mask[:, 0, 0].expand(len(key), -1),
            dropout_p=dropout,
            scores=scores,
            heads_first=False,
        )
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    out = functional.scaled_dot_product_attention(
        query, key, value, mask, dropout_p=dropout, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2).contiguous()


def _attend_prefix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None,
    prefix: Tensor,
    attends: Callable[..., Tensor],
) -> Tensor:
    """Attention of a causal sequence of which the first tokens see each other both ways, ``[B, N, H, D]``.

    Args:
        prefix: int64 ``[B]``, the column behind the last token of the prefix.
        attends: :func:`attend` with the pattern and the options of the call.
    """
    num_rows, num_columns = query.shape[:2]
    real = query.new_ones(num_rows, num_columns, dtype=torch.bool) if documents is None else documents >= 0
    real = real.expand(num_rows, -1)
    out = query.new_zeros(*query.shape[:3], value.shape[3])
    for row, (columns, end) in enumerate(zip(real, prefix.expand(num_rows).tolist(), strict=True)):
        own = columns.nonzero().squeeze(1)
        first = int(columns[:end].sum())
        q, k, v = (tensor[row : row + 1, own] for tensor in (query, key, value))
        parts = [
            attends(q[:, part], k[:, seen], v[:, seen], is_causal=is_causal, query_offset=part.start)
            for part, seen, is_causal in (
                (slice(0, first), slice(0, first), False),
                (slice(first, len(own)), slice(0, len(own)), True),
            )
            if part.stop > part.start
        ]
        out[row, own] = torch.cat(parts, dim=1)[0]
    return out


def _given_documents(cu_seq_lens_q: Tensor, query: Tensor, num_columns: int, mask: Tensor | None) -> Tensor:
    if query.shape[0] != 1 or query.shape[1] != num_columns:
        raise ValueError(
            "cu_seq_lens_q gives the documents of one packed row without cached tokens: got "
            f"{query.shape[0]} rows of {query.shape[1]} queries and {num_columns} keys; pass use_cache=False"
        )
    if mask is not None:
        # Without a cache, transformers derives the same documents from position_ids.
        begins = functional.pad(mask[0, 1:] != mask[0, :-1], (1, 1), value=True)
        given = torch.isin(torch.arange(len(begins), device=begins.device), cu_seq_lens_q.to(begins.device))
        require(
            (begins == given).all(),
            ValueError,
            "cu_seq_lens_q must say what position_ids say, and comes without an attention_mask",
            lambda: f": got the boundaries {cu_seq_lens_q.tolist()} and {begins.nonzero().flatten().tolist()}",
        )
    return cu_seq_lens_q.int()


def _padding_last(documents: Tensor) -> Tensor | None:
    """The columns ``[B, N]`` of the real tokens of each row, then those of its padding.

    None where the host sees that the real tokens of every row are adjacent already.
    """
    real = documents >= 0
    if not is_unread(documents):
        runs = real[:, 0] + (real[:, 1:] & ~real[:, :-1]).sum(dim=1)
        if (runs <= 1).all():
            return None
    return (~real).int().argsort(dim=1, stable=True)


def _rows(tensor: Tensor, order: Tensor) -> Tensor:
    return torch.take_along_dim(tensor, order[:, :, None, None], dim=1)


def _boundaries(documents: Tensor, *, is_packed: bool) -> Tensor:
    """Boundaries of the documents of ``[B, N]`` in its flattened rows: int32.

    Padding forms documents of its own, which attend only to themselves. Where the host cannot count documents, some are
    empty: a row has real tokens and padding, or with ``is_packed`` one boundary per column, that of its document.
    """
    rows = torch.arange(documents.shape[0] + 1, device=documents.device) * documents.shape[1]
    begins = functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    column = torch.arange(documents.numel(), device=documents.device).view(documents.shape)
    if not is_unread(documents):
        starts = column[begins]
    elif is_packed:
        starts = torch.where(begins, column, 0).flatten().cummax(dim=0).values
    else:
        change = torch.where(begins & (column > rows[:-1, None]), column, rows[1:, None]).amin(dim=1)
        starts = torch.stack([rows[:-1], change], dim=1).flatten()
    return torch.cat([starts, rows[-1:]]).int()


def _check_not_packed(position_ids: Tensor) -> None:
    """Raise for packed rows that the mask does not cover: transformers detects them only without a cache."""
    if position_ids.dim() != 2 or position_ids.is_meta:
        return
    steps = position_ids.diff(dim=-1)
    follows = (steps == 1).all()
    words = "position_ids restart within a row: pass "
    if torch.compiler.is_compiling():
        torch._assert_async(follows, words + "cu_seq_lens_q, the boundaries of its documents, under torch.compile")
    elif not follows and (steps <= 0).any():
        raise ValueError(
            f"{words}use_cache=False and no attention_mask, so that transformers sees the documents of packed rows, or "
            "cu_seq_lens_q"
        )
    elif not follows:
        raise ValueError(
            "position_ids must rise by 1 from token to token, as a pattern's positions do, got a step of "
            f"{int(steps.max())}"
        )
