"""Inputs that kernels cannot handle directly: scores too large for one log-sum-exp, and NaN or infinities.

Kernels multiply tiles, and a probability of 0 times NaN is NaN: a non-finite key would reach rows that do not see it.
The results are therefore checked for NaN, which costs next to nothing, and if there is any, they are combined from two
computations, one of them without the non-finite rows. This is done on the CPU only: elsewhere the check would wait for
the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from dilated_attention_pytorch.precision import accumulation_dtype

from . import call
from .call import Inputs

_ELEMENTS_OF_NORMS = 1 << 18
"""Number of elements whose row norms are computed at a time."""
_SAFE_NORM = 2.0**-60
"""In rows with a larger norm, no square that matters underflows in float32."""
_LARGE_SCORE = 2.0**13


class Computation(Protocol):
    """Attention that can be recomputed for other operands of the same call."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""

    def backward(
        self,
        operands: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Gradients of query, key and value, followed by any others."""

    def unweighted(self) -> Computation:
        """The same computation without dropout and finite gates; it shows which row sees which key."""

    def gradients_of(self, rows: Tensor) -> tuple[Tensor, ...]:
        """For each gradient after those of query, key and value: which elements depend on the marked rows."""


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """:func:`.call.forward`, except that a NaN or an infinity does not affect rows that do not see it."""
    return forward_around(_Plan(inputs), inputs.query, inputs.key, inputs.value)


def backward(
    inputs: Inputs, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`.call.backward` for scores of any size; a NaN or an infinity affects only gradients that depend on it.

    If scores are large, ``lse`` must cover exactly the keys of ``inputs``.
    """
    operands = (inputs.query, inputs.key, inputs.value)
    grads = backward_around(_Plan(inputs), operands, out, lse, grad_out, grad_lse)
    return grads[0], grads[1], grads[2]


def weighted_sum(
    inputs: Inputs, lse: Tensor, values: Tensor, factors: Sequence[tuple[Tensor, Tensor]], *, of_keys: bool
) -> Tensor:
    """:func:`.call.weighted_sum` for scores of any size. ``lse`` must cover exactly the keys of ``inputs``."""
    rest = None
    if _has_large_scores(inputs):
        rest = torch.zeros_like(lse)
        _, lse = call.forward(inputs, rest)
    return call.weighted_sum(inputs, lse, values, factors, rest, of_keys=of_keys)


@dataclass(frozen=True, slots=True)
class _Plan:
    inputs: Inputs

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return call.forward(replace(self.inputs, query=query, key=key, value=value))

    def backward(
        self,
        operands: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
    ) -> tuple[Tensor, ...]:
        query, key, value = operands
        inputs = replace(self.inputs, query=query, key=key, value=value)
        rest = None
        if _has_large_scores(inputs):
            # Probabilities sum to 1 only if the log-sum-exp is computed from the same scores: both are recomputed here.
            rest = torch.zeros_like(lse)
            out, lse = call.forward(inputs, rest)
        return call.backward(inputs, out, lse, grad_out, grad_lse, rest)

    def unweighted(self) -> _Plan:
        return _Plan(replace(self.inputs, dropout_seed=None, dropout_p=0.0))

    def gradients_of(self, rows: Tensor) -> tuple[Tensor, ...]:
        return ()


def forward_around(computation: Computation, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """``computation.forward`` in which a NaN or an infinity in a key or value affects only the rows that see it."""
    out, lse = computation.forward(query, key, value)
    if not _has_nan(out):
        return out, lse
    bad_keys, bad_values = _not_finite(key), _not_finite(value)
    if not (bad_keys.any() or bad_values.any()):
        return out, lse
    seen = _seen(computation, query, torch.stack((bad_keys, bad_values), -1))
    clean_out, clean_lse = computation.forward(query, _without(key, bad_keys), _without(value, bad_values))
    sees_any = seen.any(-1)
    return torch.where(sees_any.unsqueeze(-1), out, clean_out), torch.where(seen[..., 0], lse, clean_lse)


def backward_around(
    computation: Computation,
    operands: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
) -> tuple[Tensor, ...]:
    """``computation.backward`` in which non-finite numbers affect only the gradients that depend on them."""
    grads = computation.backward(operands, out, lse, grad_out, grad_lse)
    if not _has_nan(*grads):
        return grads
    query, key, value = operands
    bad_keys = _not_finite(key) | _not_finite(value)
    bad_rows = _not_finite(query) | _not_finite(out) | _not_finite(grad_out) | lse.isnan() | (lse == float("inf"))
    if grad_lse is not None:
        bad_rows |= ~grad_lse.isfinite()
    if not (bad_keys.any() or bad_rows.any()):
        return grads
    bad_rows |= _seen(computation, query, bad_keys.unsqueeze(-1)).squeeze(-1)
    clean = computation.backward(
        (_without(query, bad_rows), _without(key, bad_keys), _without(value, bad_keys)),
        _without(out, bad_rows),
        lse.masked_fill(bad_rows, float("inf")),
        _without(grad_out, bad_rows),
        None if grad_lse is None else grad_lse.masked_fill(bad_rows, 0.0),
    )
    reached = _reached(computation, key, bad_rows).unsqueeze(-1)
    is_bad = (bad_rows.unsqueeze(-1), reached, reached, *computation.gradients_of(bad_rows))
    return tuple(torch.where(*three) for three in zip(is_bad, grads, clean, strict=True))


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


def _has_large_scores(inputs: Inputs) -> bool:
    return has_large_scores(largest_norm(inputs.query), largest_norm(inputs.key), inputs.scale)


def _has_nan(*tensors: Tensor) -> bool:
    return tensors[0].device.type == "cpu" and any(math.isnan(tensor.sum()) for tensor in tensors)


def _not_finite(tensor: Tensor) -> Tensor:
    """Rows ``[B, N, H]`` that hold a NaN or an infinity."""
    return ~tensor.isfinite().all(-1)


def _without(tensor: Tensor, bad: Tensor) -> Tensor:
    """The tensor with bad rows replaced by zeros."""
    return tensor.masked_fill(bad.unsqueeze(-1), 0.0)


def _seen(computation: Computation, query: Tensor, keys: Tensor) -> Tensor:
    """Which rows see any of the keys marked in ``keys [B, M, G, kinds]``, ``[B, N, H, kinds]``.

    If all scores are 0, the output is the fraction of marked keys.
    """
    marks = keys.float()
    return computation.unweighted().forward(marks.new_zeros(*query.shape[:3], keys.shape[3]), marks * 0, marks)[0] > 0


def _reached(computation: Computation, key: Tensor, rows: Tensor) -> Tensor:
    """Which keys ``[B, M, G]`` any of the marked rows ``[B, N, H]`` sees: those with a gradient of their values."""
    marks = rows.float().unsqueeze(-1)
    unweighted, keys = computation.unweighted(), marks.new_zeros(*key.shape[:3], 1)
    out, lse = unweighted.forward(marks * 0, keys, keys)
    return unweighted.backward((marks * 0, keys, keys), out, lse, marks, None)[2].squeeze(-1) > 0
