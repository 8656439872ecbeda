"""The exact merge of partials: for callers, and in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import _register_namedtuple

from dilated_attention_pytorch.kernels.products import Result
from dilated_attention_pytorch.precision import accumulation_dtype


class AttentionOutput(NamedTuple):
    """An attention output with the log-sum-exp of its scores, which makes it mergeable.

    ``out`` is ``[B, N, H, D]``; ``lse`` is ``[B, N, H]``, float32 (float64 for float64), -inf where no key was seen.
    """

    out: Tensor
    lse: Tensor


# So that torch.export.save can write a program that returns it.
_register_namedtuple(AttentionOutput, serialized_type_name=f"{__name__}.AttentionOutput")


def merge(partials: Sequence[AttentionOutput | tuple[Tensor, Tensor]]) -> AttentionOutput:
    """Merge partials over the same queries into attention over the union of their keys. Differentiable.

    ``L = logsumexp_i L_i``, ``O = sum_i exp(L_i - L) O_i``; a row without a key in any partial has O = 0, L = -inf and
    zero gradient.

    Args:
        partials: at least one pair ``(out [B, N, H, D], lse [B, N, H])`` of equal shapes.

    Returns:
        ``AttentionOutput``: ``out`` in the dtype of the first partial's, ``lse`` float32 (float64 for float64).
        Sums are taken in the dtype of ``lse``.

    Raises:
        TypeError: the argument is not a list of pairs.
        ValueError: no partials, or shapes that differ.

    >>> halves = [AttentionOutput(torch.randn(2, 7, 3, 5), torch.randn(2, 7, 3)) for _ in range(2)]
    >>> merge(halves).out.shape
    torch.Size([2, 7, 3, 5])
    """
    if isinstance(partials, Tensor) or any(isinstance(partial, Tensor) or len(partial) != 2 for partial in partials):
        raise TypeError(
            "merge needs a list of pairs (out, lse) as attend_with_lse returns them, got "
            f"{[type(partial).__name__ for partial in partials]} in a {type(partials).__name__}"
        )
    if not partials:
        raise ValueError("merge needs at least one partial, got none")
    for index, (out, lse) in enumerate(partials):
        if out.shape != partials[0][0].shape or lse.shape != out.shape[:-1]:
            raise ValueError(
                "merge needs partials over the same queries, out [B, N, H, D] and lse [B, N, H]: partial 0 has out "
                f"{tuple(partials[0][0].shape)}, got partial {index} with out {tuple(out.shape)} and lse "
                f"{tuple(lse.shape)}"
            )
    dtype = accumulation_dtype(partials[0][0].dtype)
    all_lse = torch.stack([lse.to(dtype) for _, lse in partials])
    no_key = (all_lse == float("-inf")).all(dim=0)
    # A row without keys enters as zeros, so that its softmax and gradient stay finite; it is masked below.
    safe = torch.where(no_key, 0.0, all_lse)
    weights = torch.where(no_key, 0.0, torch.softmax(safe, dim=0))
    merged = sum(weight.unsqueeze(-1) * out.to(dtype) for weight, (out, _) in zip(weights, partials, strict=True))
    assert isinstance(merged, Tensor)
    total = torch.where(no_key, float("-inf"), torch.logsumexp(safe, dim=0))
    return AttentionOutput(merged.to(partials[0][0].dtype), total)


def merge_in_place(out: Tensor, lse: Tensor, rest: Tensor | None, partial: Result) -> None:
    """Merge one partial into ``out`` and ``lse``; either all log-sum-exps are pairs, or none.

    The two weights sum to 1, so that ``out`` is read and written once: ``O + (O_i - O) * sigmoid(L_i - L)``.
    """
    if rest is None:
        of_partial = partial.lse.to(lse.dtype)
        # Of a row that sees no key of either, the difference is NaN.
        weight = torch.sigmoid(of_partial - lse).masked_fill_(of_partial == float("-inf"), 0.0)
        _mix(out, partial.out, weight)
        lse.copy_(torch.logaddexp(lse, of_partial))
        return
    assert partial.rest is not None
    highest = torch.maximum(lse, partial.lse)
    safe = highest.masked_fill(highest == float("-inf"), 0.0)
    powers = [((top - safe) + low).exp2_() for top, low in ((lse, rest), (partial.lse, partial.rest))]
    total = (powers[0] + powers[1]).clamp_(min=torch.finfo(lse.dtype).tiny)
    _mix(out, partial.out, powers[1] / total)
    lse.copy_(highest)
    torch.log2(total, out=rest)


def _mix(out: Tensor, partial_out: Tensor, weight: Tensor) -> None:
    out.lerp_(partial_out.to(out.dtype).expand(out.shape), weight.unsqueeze(-1))


def without_infinities(lse: Tensor) -> Tensor:
    """Replace the -inf of rows without a key by +inf: ``exp(s - lse)`` is then 0, and the row has no gradient."""
    return lse.masked_fill(lse == float("-inf"), float("inf"))
