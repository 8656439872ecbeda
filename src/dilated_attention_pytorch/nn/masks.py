"""Conversion of the masks that PyTorch's modules pass."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from dilated_attention_pytorch.tracing import require


@overload
def ignored_keys(key_padding_mask: None) -> None: ...
@overload
def ignored_keys(key_padding_mask: Tensor) -> Tensor: ...
def ignored_keys(key_padding_mask: Tensor | None) -> Tensor | None:
    """A key padding mask as bool, True = ignore. Accepts the float form (-inf = ignore, 0 = keep) that
    ``nn.TransformerEncoderLayer`` produces.

    Raises:
        TypeError: the mask is not a tensor.
        ValueError: another float value, which would be an additive bias.
    """
    if key_padding_mask is None:
        return None
    _check_tensor("key_padding_mask", key_padding_mask)
    if not key_padding_mask.is_floating_point():
        return key_padding_mask
    # Some callers use the dtype's minimum instead of -inf.
    ignored = key_padding_mask <= torch.finfo(key_padding_mask.dtype).min / 2
    require(
        (ignored | (key_padding_mask == 0)).all(),
        ValueError,
        "a float key_padding_mask must hold only 0 (keep) and -inf (ignore): other values would bias scores, which "
        "attention under a pattern does not support; pass a bool mask with True = ignore",
    )
    return ignored


def check_no_weights(need_weights: bool) -> None:
    """Raise NotImplementedError if attention weights are requested."""
    if need_weights:
        raise NotImplementedError(
            "need_weights=True asks for N x M attention weights, which attention under a pattern never forms; pass "
            "need_weights=False, or use pattern.counts and attend_with_lse for a short sequence"
        )


def check_causal(attn_mask: Tensor, num_queries: int, num_keys: int) -> None:
    """Check that ``attn_mask`` is the causal mask: True or -inf after each query, False or 0 elsewhere.

    Raises:
        TypeError: it is not a tensor.
        NotImplementedError: it is any other mask.
    """
    _check_tensor("attn_mask", attn_mask)
    if attn_mask.dim() != 2 or attn_mask.shape[0] != num_queries or attn_mask.shape[1] != num_keys:
        raise NotImplementedError(
            f"{_OTHER_MASK}; expected a mask of shape {(num_queries, num_keys)}, got {tuple(attn_mask.shape)}"
        )
    later = torch.ones(num_queries, num_keys, dtype=torch.bool, device=attn_mask.device).triu(1)
    if attn_mask.is_floating_point():
        # Some callers use the dtype's minimum instead of -inf.
        holds = torch.where(later, attn_mask <= torch.finfo(attn_mask.dtype).min / 2, attn_mask == 0)
    else:
        holds = attn_mask == later
    require(holds.all(), NotImplementedError, f"{_OTHER_MASK}; got a mask that hides other keys or adds to scores")


_OTHER_MASK = (
    "attn_mask can only be the causal mask (True or -inf after each query, False or 0 elsewhere): the pattern says "
    "which keys a query attends to; pass is_causal=True for it, key_padding_mask for padding, cu_seqlens for packed "
    "documents, from_block_mask as the pattern for any other mask"
)


def _check_tensor(name: str, mask: object) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"{name} must be a tensor or None, got {mask!r}; the causal mask is is_causal=True, written by name"
        )
