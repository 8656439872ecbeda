"""In-place merge of partials."""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels.products import Result


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
