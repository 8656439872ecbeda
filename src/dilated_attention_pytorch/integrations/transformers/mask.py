"""The mask function registered with transformers: documents of key columns instead of an N x N mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .documents import UNWRITTEN, is_unread, seal, seal_single

MaskFunction = Callable[..., Any]

_READ_BY_THE_MODEL = frozenset(
    {
        "clvp_decoder",
        "clvp_encoder",
        "groupvit_text_model",
        "lasr_encoder",
        "lightglue",
        "mpt",
        "mvp",
        "siglip2_vision_model",
        "superglue",
        "table-transformer",
        "trocr",
        "xglm",
    }
)
"""Types of models whose code reads the shape or the values of the mask: theirs is one of every pair, of N M numbers."""


def gives_mask_of_pairs(config: Any) -> bool:
    """Whether the code of a model needs a mask with the values of every pair."""
    kind = getattr(config, "model_type", None)
    return kind in _READ_BY_THE_MODEL or (kind == "falcon" and config.alibi)


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
        local_size: window or chunk size of the rule; windows reach the attention function as ``sliding_window``, and
            chunks are read from the configuration.
        allow_is_causal_skip, dtype: for dense masks; ignored.
        allow_is_bidirectional_skip: given by transformers if attention is not causal.
        device: device of the mask.
        config: the model's configuration.

    Returns:
        the result of :func:`seal`, or of :func:`seal_single` if every row is one document without padding; for models
        whose code reads the mask, and for rules of their own, that of transformers' ``eager_mask``, which the attention
        function recognises or refuses.

    Raises:
        NotImplementedError: chunks of a sequence whose first tokens are not there.
    """
    chunk = getattr(config, "attention_chunk_size", None)
    if local_size is not None and local_size == chunk and kv_offset > 0:
        raise NotImplementedError(
            f"chunked attention (config.attention_chunk_size={chunk}) of cached tokens needs the whole sequence, and "
            "this cache dropped its first tokens: pass use_cache=False, or generate no further than one chunk"
        )
    # transformers applies "or_mask" last, for blocks of tokens that see each other both ways.
    has_rule = use_vmap or getattr(mask_function, "__name__", "") == "or_mask"
    if has_rule or gives_mask_of_pairs(config):
        from transformers.masking_utils import causal_mask_function, eager_mask

        mask: Tensor = eager_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,  # type: ignore[arg-type]  # a tensor from static caches
            kv_offset,
            mask_function or causal_mask_function,
            attention_mask,
            dtype or torch.float32,
            use_vmap=use_vmap,
            device=device,
        )
        return mask
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
