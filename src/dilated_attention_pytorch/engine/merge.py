"""In-place merge of partials, and handling of rows that saw no key."""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels.fused import MASKED
from dilated_attention_pytorch.kernels.products import Result


def merge_in_place(out: Tensor, lse: Tensor, rest: Tensor | None, partial: Result) -> None:
    """Merge one partial with finite log-sum-exp into ``out`` and ``lse``; either all log-sum-exps are pairs, or none.

    The two weights sum to 1, so that ``out`` is read and written once: ``O + (O_i - O) * sigmoid(L_i - L)``.
    """
    if rest is None:
        of_partial = partial.lse.to(lse.dtype)
        _mix(out, partial.out, torch.sigmoid(of_partial - lse))
        lse.copy_(torch.logaddexp(lse, of_partial))
        return
    assert partial.rest is not None
    highest = torch.maximum(lse, partial.lse)
    powers = [((top - highest) + low).exp2_() for top, low in ((lse, rest), (partial.lse, partial.rest))]
    total = powers[0] + powers[1]
    _mix(out, partial.out, powers[1] / total)
    lse.copy_(highest)
    torch.log2(total, out=rest)


def _mix(out: Tensor, partial_out: Tensor, weight: Tensor) -> None:
    out.lerp_(partial_out.to(out.dtype).expand(out.shape), weight.unsqueeze(-1))


def clear_dead_rows(out: Tensor, lse: Tensor) -> None:
    """Turn rows that saw only hidden keys into rows without a key: output 0 and log-sum-exp -inf."""
    is_dead = lse < MASKED / 2
    if is_dead.device.type != "cpu" or is_dead.any():  # elsewhere the check would wait for the device
        lse.masked_fill_(is_dead, float("-inf"))
        out.masked_fill_(is_dead.unsqueeze(-1), 0.0)


def without_infinities(lse: Tensor) -> Tensor:
    """Replace the -inf of rows without a key by +inf: ``exp(s - lse)`` is then 0, and the row has no gradient."""
    return lse.masked_fill(lse == float("-inf"), float("inf"))
