"""Inputs that kernels cannot handle directly: scores too large for one log-sum-exp, and NaN or infinities.

Kernels multiply tiles, and a probability of 0 times NaN is NaN: a non-finite key would reach rows that do not see it.
The results are therefore checked for NaN, which costs next to nothing, and if there is any, they are combined from two
computations, one of them without the non-finite rows. This is done on the CPU only: elsewhere the check would wait for
the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from dilated_attention_pytorch.kernels import native
from dilated_attention_pytorch.precision import accumulation_dtype

from . import tiles
from .call import Call

_ELEMENTS_OF_NORMS = 1 << 18
"""Number of elements whose row norms are computed at a time."""
_SAFE_NORM = 2.0**-60
"""In rows with a larger norm, no square that matters underflows in float32."""
_LARGE_SCORE = 2.0**13


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """:func:`.tiles.forward` in which a NaN or an infinity in a key or value affects only the rows that see it."""
    out, lse = tiles.forward(call)
    if not _has_nan(out):
        return out, lse
    bad_keys, bad_values = _not_finite(call.key), _not_finite(call.value)
    if not (bad_keys.any() or bad_values.any()):
        return out, lse
    seen = _seen(call, torch.stack((bad_keys, bad_values), -1))
    clean_out, clean_lse = tiles.forward(
        call._replace(key=_without(call.key, bad_keys), value=_without(call.value, bad_values))
    )
    sees_any = seen.any(-1)
    return torch.where(sees_any.unsqueeze(-1), out, clean_out), torch.where(seen[..., 0], lse, clean_lse)


def backward(call: Call, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Tensor, ...]:
    """:func:`.tiles.backward` for scores of any size; a NaN or an infinity affects only gradients that depend on it.

    If scores are large, ``lse`` must cover exactly the keys of the call.
    """
    grads = _backward(call, out, lse, grad_out, grad_lse)
    if not _has_nan(*grads):
        return grads
    bad_keys = _not_finite(call.key) | _not_finite(call.value)
    bad_rows = _not_finite(call.query) | _not_finite(out) | _not_finite(grad_out) | lse.isnan() | (lse == float("inf"))
    if grad_lse is not None:
        bad_rows |= ~grad_lse.isfinite()
    if not (bad_keys.any() or bad_rows.any()):
        return grads
    bad_rows |= _seen(call, bad_keys.unsqueeze(-1)).squeeze(-1)
    clean = _backward(
        call._replace(
            query=_without(call.query, bad_rows),
            key=_without(call.key, bad_keys),
            value=_without(call.value, bad_keys),
        ),
        _without(out, bad_rows),
        lse.masked_fill(bad_rows, float("inf")),
        _without(grad_out, bad_rows),
        None if grad_lse is None else grad_lse.masked_fill(bad_rows, 0.0),
    )
    reached = _reached(call, bad_rows).unsqueeze(-1)
    is_bad = [bad_rows.unsqueeze(-1), reached, reached]
    if call.log_gates is not None:
        is_bad.append(_blocks_of(call, bad_rows))
    if call.distance_bias is not None:
        is_bad.append(torch.ones_like(call.distance_bias, dtype=torch.bool))  # it depends on all rows
    if call.key_bias is not None:
        is_bad.append(reached.squeeze(-1))
    return tuple(torch.where(*three) for three in zip(is_bad, grads, clean, strict=True))


def _backward(call: Call, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Tensor, ...]:
    rest = None
    if _has_large_scores(call, lse):
        # Probabilities sum to 1 only if the log-sum-exp is computed from the same scores: both are recomputed here.
        rest = torch.zeros_like(lse)
        out, lse = tiles.forward(call, rest)
    return tiles.backward(call, out, lse, grad_out, grad_lse, rest)


def weighted_sum(
    call: Call,
    lse: Tensor,
    values: Tensor | None,
    factors: Sequence[tuple[Tensor | None, Tensor | None, Tensor | None]],
    *,
    axis: str,
) -> Tensor:
    """:func:`.tiles.weighted_sum` for scores of any size. ``lse`` must cover exactly the keys of the call."""
    rest = None
    if _has_large_scores(call, lse):
        rest = torch.zeros_like(lse)
        _, lse = tiles.forward(call, rest)
    return tiles.weighted_sum(call, lse, values, factors, rest, axis=axis)


def largest_norm(rows: Tensor) -> float:
    """Largest norm of a row ``[..., D]`` on the CPU; 0 elsewhere, where the check would wait for the device.

    Rows that contain a NaN or an infinity are left out, as their results are not finite anyway. For rows whose squares
    overflow or underflow, the result is an upper bound, at most ``sqrt(D)`` times too large.
    """
    if rows.device.type != "cpu" or rows.numel() == 0:
        return 0.0
    # In parts, because low-precision rows are converted to a copy first.
    dim = max(range(rows.dim() - 1), key=lambda dim: rows.shape[dim])
    parts = rows.split(max(1, _ELEMENTS_OF_NORMS * rows.shape[dim] // rows.numel()), dim)
    return max(map(_largest_norm, parts))


def _largest_norm(rows: Tensor) -> float:
    norms = torch.linalg.vector_norm(rows, dim=-1, dtype=accumulation_dtype(rows.dtype))
    largest = float(norms.max())
    if _SAFE_NORM < largest < math.inf:
        return largest
    # A NaN, an infinity, or squares that overflow or underflow: use a bound that needs no squares.
    is_finite = rows.isfinite().all(dim=-1, keepdim=True)
    return float(rows.abs().where(is_finite, 0.0).max()) * math.sqrt(rows.shape[-1])


def has_large_scores(query_norm: float, key_norm: float, scale: float) -> bool:
    """Whether rows of at most these norms may have a score so large that one log-sum-exp loses the smaller terms.

    The relative error of ``exp(s - L)`` is the spacing of floating-point numbers at L. At the scores that count as
    large it is 2**-10 in float32, and 2**-39 in float64, which already exceeds the rounding error of results.
    """
    return query_norm * key_norm * abs(scale) > _LARGE_SCORE


def _has_large_scores(call: Call, lse: Tensor) -> bool:
    assert call.scale is not None
    score = largest_norm(call.query) * largest_norm(call.key) * call.scale
    score = min(score, call.softcap) if call.softcap else score
    if call.distance_bias is not None or call.key_bias is not None:
        # Biases may be large where no probability is: those of far keys. What counts is the log-sum-exp.
        score = max(score, native.largest_gate(lse))
    return has_large_scores(score + native.largest_gate(call.log_gates), 1.0, 1.0)


def _has_nan(*tensors: Tensor) -> bool:
    if tensors[0].device.type != "cpu":
        return False
    for tensor in tensors:  # noqa: SIM110 - a generator takes longer than the test itself
        if math.isnan(tensor.sum()):
            return True
    return False


def _not_finite(tensor: Tensor) -> Tensor:
    """Rows ``[B, N, H]`` that hold a NaN or an infinity."""
    return ~tensor.isfinite().all(-1)


def _without(tensor: Tensor, bad: Tensor) -> Tensor:
    """The tensor with bad rows replaced by zeros."""
    return tensor.masked_fill(bad.unsqueeze(-1), 0.0)


def _unweighted(call: Call) -> Call:
    """The call without dropout, finite gates and terms of the scores; it shows which row sees which key."""
    gates = call.log_gates
    if gates is not None:
        # A row sees a block iff its gate is not -inf; a small gate would hide that it does.
        gates = torch.zeros_like(gates).masked_fill(gates == float("-inf"), float("-inf"))
    call = call._replace(softcap=0.0, distance_bias=None, key_bias=None, coordinates=None)
    return call._replace(dropout_seed=None, dropout_p=0.0, log_gates=gates)


def _seen(call: Call, keys: Tensor) -> Tensor:
    """Which rows see any of the keys marked in ``keys [B, M, G, kinds]``, ``[B, N, H, kinds]``.

    If all scores are 0, the output is the fraction of marked keys.
    """
    marks = keys.float()
    query = marks.new_zeros(*call.query.shape[:3], keys.shape[3])
    return tiles.forward(_unweighted(call)._replace(query=query, key=marks * 0, value=marks))[0] > 0


def _reached(call: Call, rows: Tensor) -> Tensor:
    """Which keys ``[B, M, G]`` any of the marked rows ``[B, N, H]`` sees: those with a gradient of their values."""
    marks = rows.float().unsqueeze(-1)
    keys = marks.new_zeros(*call.key.shape[:3], 1)
    marked = _unweighted(call)._replace(query=marks * 0, key=keys, value=keys)
    out, lse = tiles.forward(marked)
    return tiles.backward(marked, out, lse, marks, None)[2].squeeze(-1) > 0


def _blocks_of(call: Call, rows: Tensor) -> Tensor:
    """Which log-gates depend on the marked rows ``[B, N, H]``: those of their query blocks."""
    assert call.blocks is not None
    batch, heads, query_blocks, _ = call.blocks.shape
    missing = -rows.shape[1] % call.block_sizes[1]
    padded = functional.pad(rows, (0, 0, 0, missing)).view(batch, query_blocks, call.block_sizes[1], heads, -1)
    return padded.any(-1).any(2).transpose(1, 2).unsqueeze(-1)
