"""The mask function registered with transformers: documents of key columns instead of an N x N mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .documents import UNWRITTEN, is_unread, seal, seal_single

MaskFunction = Callable[..., Any]


def documents_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    *,
    use_vmap: bool = False,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    config: Any = None,
) -> Tensor:
    """The documents of all key columns, with the signature of transformers' mask functions.

    Never None, which means "no mask" to a model that bypasses the attention interface and would then attend to
    everything. Packed rows are detected as transformers does: by position ids, without an attention mask and without a
    cache.

    Args:
        batch_size, q_length, kv_length, q_offset, kv_offset: sizes of the call, as transformers counts them.
        mask_function: transformers' visibility rule.
        attention_mask: bool ``[B, columns]``, True = real.
        use_vmap: set by transformers if the caller adds its own rule.
        local_size: window or chunk size of the rule; windows reach the attention function as ``sliding_window``.
        allow_is_causal_skip, dtype: for dense masks; ignored.
        allow_is_bidirectional_skip: given by transformers if attention is not causal.
        device: device of the mask.
        config: the model's configuration.

    Returns:
        the result of :func:`seal`, or of :func:`seal_single` if every row is one document without padding.

    Raises:
        NotImplementedError: a rule other than a window.
    """
    _check_rule(mask_function, use_vmap=use_vmap, local_size=local_size, config=config)
    is_causal = allow_is_bidirectional_skip is None
    unwritten = None
    if is_causal:
        written = q_offset - kv_offset + q_length
        if isinstance(q_offset, Tensor) or written != kv_length:
            # A static cache: the mask has one shape at all steps.
            unwritten = torch.arange(kv_length, device=device)[None] >= written
    if attention_mask is None:
        if unwritten is not None:
            return seal(unwritten.int() * UNWRITTEN, is_causal=is_causal)
        if is_causal and q_length == kv_length and not torch.compiler.is_compiling():
            documents = _packed_documents(mask_function, batch_size, q_length, torch.device(device))
            if documents is not None:
                return seal(documents, is_causal=is_causal, is_packed=True)
        return seal_single(kv_length, torch.device(device), is_causal=is_causal)
    if attention_mask.dim() != 2:
        raise NotImplementedError(
            "attention_mask must have the shape [batch, tokens] with 1 for a real token, got "
            f"{tuple(attention_mask.shape)}"
        )
    missing = kv_offset + kv_length - attention_mask.shape[1]
    real = functional.pad(attention_mask, (0, max(0, missing)))[:, kv_offset : kv_offset + kv_length]
    documents = real.int() - 1
    if unwritten is not None:
        documents = torch.where(unwritten, UNWRITTEN, documents)
    elif not is_unread(real) and real.all():
        return seal_single(kv_length, torch.device(device), is_causal=is_causal)
    return seal(documents, is_causal=is_causal)


def _check_rule(mask_function: MaskFunction | None, *, use_vmap: bool, local_size: int | None, config: Any) -> None:
    if use_vmap:
        raise NotImplementedError(
            'attn_implementation="dilated" has the model\'s causal, bidirectional or sliding-window mask under a '
            'pattern, and or_mask_function or and_mask_function asks for another rule: use "sdpa" or "eager" for it'
        )
    # transformers applies it last, and only for blocks with bidirectional attention.
    if getattr(mask_function, "__name__", "") == "or_mask":
        raise NotImplementedError(
            "block_sequence_ids lets tokens of a block see later ones, which a pattern by positions cannot say: use "
            'attn_implementation="sdpa" or "eager" for such inputs'
        )
    if local_size is not None and getattr(config, "attention_chunk_size", None) == local_size:
        raise NotImplementedError(
            f"chunked attention (config.attention_chunk_size={local_size}) is not honoured, and transformers makes its "
            'mask in every call of such a model: use "sdpa" or "eager" for this model, without a pattern'
        )


def _packed_documents(
    mask_function: MaskFunction | None, batch_size: int, num_columns: int, device: torch.device
) -> Tensor | None:
    """The document of every column, ``[B, columns]``; None if every row is one document.

    transformers encodes them only in its rule: it is asked whether each column sees the previous one, which holds
    within a document.
    """
    from transformers.masking_utils import causal_mask_function

    if mask_function is None or mask_function is causal_mask_function or num_columns == 1:
        return None
    rows = torch.arange(batch_size, device=device).unsqueeze(1)
    columns = torch.arange(1, num_columns, device=device).unsqueeze(0)
    follows: Tensor = mask_function(rows, torch.zeros_like(rows), columns, columns - 1)
    follows = follows.expand(batch_size, -1)
    if follows.all():
        return None
    return functional.pad((~follows).cumsum(dim=1), (1, 0)).int()
