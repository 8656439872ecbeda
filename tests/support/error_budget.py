"""Bounds on the error of low-precision arithmetic, derived from its operations; no constant is tuned.

``u`` is half the spacing of the storage dtype (bfloat16: 2**-8), ``a`` that of the accumulation dtype (float32).
A sum of n products in the accumulation dtype is off by at most ``n a`` times the sum of their absolute values.
Values are rounded to storage three times on the way to an output: the probabilities (or dS) before their product with
the values, the kernel's partial result, and the merged result. PyTorch's bfloat16 kernel on the CPU computes
exponentials by a short polynomial: 7.1e-5 relative at 16 keys and more, measured on the operator itself with D = 1.
Scores far apart have the probabilities 1 and 0 however they are rounded: that is what is known of large ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from support.drawn import DrawnCall


class Budget(NamedTuple):
    out: Tensor
    lse: Tensor
    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor


def budget(*operands: Any, **options: Any) -> Budget:
    """The bounds of :func:`budget_with_scores` without those of the scores' gradient."""
    return budget_with_scores(*operands, **options)[0]


def budget_with_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    counts: Tensor,
    scale: float,
    storage: torch.dtype,
    grad_lse: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> tuple[Budget, Tensor]:
    """Element-wise bounds on the absolute errors, from float64 operands with heads of k and v already repeated.

    ``softcap`` and ``bias [B or 1, H, N, M]``: terms of the scores. A cap does not enlarge errors; it is computed to
    8 roundings of its limit, and a bias to 4 of itself. The second result bounds the gradient of the scores as the
    softmax takes them, ``[B, H, N, M]``.
    """
    u = torch.finfo(storage).eps / 2
    a = torch.finfo(torch.float32).eps / 2
    num_queries, num_keys, head_dim = q.shape[1], k.shape[1], q.shape[3]

    def over_heads(x: Tensor) -> Tensor:
        return x.transpose(1, 2)

    q, k, v, g = (over_heads(x) for x in (q, k, v, grad_out))
    s = scale * q @ k.mT
    capped = torch.zeros_like(s) if softcap is None else torch.tanh(s / softcap)
    s = (s if softcap is None else softcap * capped) + (0.0 if bias is None else bias) + counts.log()
    dead = (counts == 0).all(-1, keepdim=True)
    p = torch.where(dead, 0.0, torch.softmax(s.masked_fill(dead, 0.0), -1))
    out = p @ v
    # Scores: D products, then the scaling, the subtraction of the maximum and the exponential.
    score_error = (head_dim + 8) * a * (abs(scale) * q.abs() @ k.abs().mT).amax(-1, keepdim=True)
    if softcap is not None:
        score_error = score_error + 8 * a * softcap
    if bias is not None:
        score_error = score_error + 4 * a * bias.abs().masked_fill(counts == 0, 0.0).amax(-1, keepdim=True)
    exponential = 2.0**-13 if storage == torch.bfloat16 else 4 * a
    # If two scores differ by more than their errors and the range of exp, the smaller has the probability 0.
    two = s.masked_fill(dead, 0.0).topk(min(2, num_keys), dim=-1).values
    is_apart = two[..., :1] - two[..., -1:] > 2 * score_error + 104 if num_keys > 1 else ~dead
    p_relative = 2 * (score_error.masked_fill(is_apart, 0.0) + exponential) + (num_keys + 32) * a
    spread = p @ v.abs()
    out_error = (p_relative + 3 * u + num_keys * a) * spread
    if bias is not None:
        # A partial whose keys are all far has a small weight in the merge, which is rounded as 1 less the other.
        out_error = out_error + 8 * a * v.abs().amax(-2, keepdim=True)
    lse = torch.where(dead, 0.0, s.masked_fill(dead, 0.0).logsumexp(-1, keepdim=True))
    lse_error = score_error + exponential + (num_keys + 32) * a + 4 * a * lse.abs()
    d_p = g @ v.mT
    value_dim = v.shape[3]
    delta = (g * out).sum(-1, keepdim=True)
    delta_error = (g.abs() * out_error).sum(-1, keepdim=True) + value_dim * a * (g.abs() * out.abs()).sum(-1, True)
    if grad_lse is not None:
        of_lse = grad_lse.transpose(1, 2).unsqueeze(-1)
        delta, delta_error = delta - of_lse, delta_error + a * of_lse.abs()
    d_s = p * (d_p - delta)
    d_s_error = p * (value_dim * a * g.abs() @ v.abs().mT + delta_error) + (p_relative + u) * d_s.abs()
    of_score = d_s_error
    if softcap is not None:
        slope = 1 - capped.square()
        slope_error = 2 * capped.abs() * score_error / softcap + 16 * a
        d_s, d_s_error = d_s * slope, d_s_error * slope + d_s.abs() * slope_error
    grad_q_error = abs(scale) * (d_s_error @ k.abs() + (2 * u + num_keys * a) * d_s.abs() @ k.abs())
    grad_k_error = abs(scale) * (d_s_error.mT @ q.abs() + (2 * u + num_queries * a) * d_s.abs().mT @ q.abs())
    grad_v_error = ((p_relative + 3 * u + num_queries * a) * p).mT @ g.abs()
    errors = (out_error, grad_q_error, grad_k_error, grad_v_error)
    out_error, grad_q_error, grad_k_error, grad_v_error = (over_heads(x) for x in errors)
    of_lse = lse_error.squeeze(-1).transpose(1, 2)
    return Budget(out_error, of_lse, grad_q_error, grad_k_error, grad_v_error), of_score


def parts_of_budget(
    call: DrawnCall, inputs: Sequence[Tensor], grad_out: Tensor, got: Sequence[Tensor], want: Sequence[Tensor]
) -> dict[str, float]:
    """The largest part that each result of a drawn call uses of its bound, by name; more than 1 is too much.

    ``inputs`` are query, key and value in the dtype of the call; ``got`` and ``want`` are out, lse with -inf as 0, and
    the gradients.
    """
    dtype = inputs[0].dtype
    q, k, v = (x.detach().double() for x in inputs)
    k, v = (x.repeat_interleave(call.ratio, 2) for x in (k, v))
    counts = call.counts()[0].repeat_interleave(call.ratio, 1).double()
    scale = 1 / math.sqrt(call.head_dim) if call.scale is None else call.scale
    bounds = budget(q, k, v, grad_out.double(), counts, scale, dtype)
    used = {}
    for name, x, y, bound in zip(Budget._fields, got, want, bounds, strict=True):
        if name in ("grad_key", "grad_value"):
            bound = bound.unflatten(2, (-1, call.ratio)).sum(3)
        # What lies below the smallest normal number of the dtype is lost whatever the algorithm.
        floor = torch.finfo(dtype).tiny * 64
        parts = (x.double() - y).abs() / (bound + floor)
        used[name] = parts.nan_to_num(nan=math.inf).max().item() if x.numel() else 0.0
    return used
