"""What is done to the scores of attention besides the scale: caps, biases and sinks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .call import Call
from .derivatives import is_recorded, needs_dispatcher

_LEAST_CAP, _MOST_CAP = torch.finfo(torch.float32).tiny, 1e30
"""Caps for which float32 holds a score divided by the cap. Smaller and larger ones give the same scores as these."""


@dataclass(frozen=True, eq=False)
class Scores:
    """Terms of the scores: a cap, biases by distance and by key, and a sink in the denominator.

        s[p, t] = cap(scale q[p] . k[t]) + b_h(t - p) + e[t],    cap(x) = softcap tanh(x / softcap),
        O[p] = sum_t c exp(s) v[t] / (exp(sink_h) + sum_t c exp(s)),    L[p] = log(exp(sink_h) + sum_t c exp(s))

    for query head h and the count c of the pattern. Positions p and t are absolute; in a packed document their
    difference is the same. Gradients reach the tensors: all are exact, also through the log-sum-exp. No tensor grows
    with N M: a bias by distance takes H (N + M - 1) numbers. An argument that is None adds nothing.

    Args:
        softcap: cap of the scaled scores, positive (Gemma 2, arXiv 2408.00118).
        sinks: ``[H]``, logits of a key with value 0 that every query of the head sees (gpt-oss, arXiv 2508.10925). A
            row without a key has output 0 and ``L = sink_h``.
        slopes: ``[H]``, bias ``-slope_h |t - p|`` (ALiBi, arXiv 2108.12409), or ``-slope_h |x_t - x_p|`` with
            ``coordinates``.
        distance_bias: ``[H, 2 W + 1]``, bias ``distance_bias[h, clamp(t - p, -W, W) + W]``; see :meth:`t5`.
        key_bias: ``[B, M]`` or ``[B, M, G]``, bias of every key, per sequence and key/value head; also ``[1, M]`` or
            ``[B, M, 1]``, one for all of them. Finite: hide keys by ``key_padding_mask``.
        coordinates: ``[B, M, 2]``, coordinates x of the positions of the keys, among which the queries lie; slopes are
            then of Euclidean distances in the plane (TITAN, arXiv 2411.19666). They are finite; a row of NaN has no
            place, as a class token, and its pairs no bias. Rounded to the dtype of the scores, without a gradient.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, shape or range.

    >>> from dilated_attention_pytorch.ops import Scores
    >>> q = k = v = torch.randn(1, 100, 4, 8)
    >>> scores = Scores(softcap=50.0, sinks=torch.zeros(4), slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625]))
    >>> attend(q, k, v, DilatedPattern([16, 64], [1, 4]), is_causal=True, scores=scores).shape
    torch.Size([1, 100, 4, 8])
    """

    softcap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    distance_bias: Tensor | None = None
    key_bias: Tensor | None = None
    coordinates: Tensor | None = None

    def __post_init__(self) -> None:
        cap = self.softcap
        if cap is not None and (isinstance(cap, bool) or not isinstance(cap, (int, float)) or not 0.0 < cap < math.inf):
            raise ValueError(f"softcap must be a positive number, or None for no cap, got {cap!r}")
        for name, dims, shape in (
            ("sinks", (1,), "[H]"),
            ("slopes", (1,), "[H]"),
            ("distance_bias", (2,), "[H, 2 W + 1]"),
            ("key_bias", (2, 3), "[B, M] or [B, M, G]"),
        ):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise TypeError(f"{name} must be a floating tensor {shape}, got {kind}")
            if tensor.dim() not in dims:
                raise ValueError(f"{name} must have the shape {shape}, got {list(tensor.shape)}")
        self._check_coordinates()
        if self.distance_bias is not None and self.distance_bias.shape[1] % 2 == 0:
            raise ValueError(
                "distance_bias must have the shape [H, 2 W + 1], for the distances -W to W, got "
                f"{list(self.distance_bias.shape)}"
            )

    def _check_coordinates(self) -> None:
        places = self.coordinates
        if places is None:
            return
        if not isinstance(places, Tensor) or places.is_complex() or places.dtype == torch.bool:
            kind = places.dtype if isinstance(places, Tensor) else type(places).__name__
            raise TypeError(f"coordinates must be a tensor [B, M, 2] of real numbers, got {kind}")
        if places.dim() != 3 or places.shape[2] != 2:
            raise ValueError(f"coordinates must have the shape [B, M, 2], got {list(places.shape)}")
        if places.requires_grad:
            raise ValueError("coordinates have no gradient, got a tensor that requires one: pass coordinates.detach()")
        if self.slopes is None or self.distance_bias is not None:
            which = "no slopes" if self.slopes is None else "distance_bias"
            raise ValueError(
                "coordinates give slopes their distances, and distance_bias counts positions: pass slopes without "
                f"distance_bias, got {which}"
            )

    @classmethod
    def t5(cls, table: Tensor, max_distance: int = 128, *, is_bidirectional: bool) -> Scores:
        """The relative position bias of T5 (arXiv 1910.10683), from its table of buckets.

        Args:
            table: ``[buckets, H]``, such as the weight of T5's ``relative_attention_bias``.
            max_distance: all larger distances share the last bucket.
            is_bidirectional: half of the buckets are for keys after the query, as in T5's encoder; in its decoder,
                all are for keys up to the query.

        >>> Scores.t5(torch.randn(32, 8), is_bidirectional=True).distance_bias.shape
        torch.Size([8, 257])
        """
        if not isinstance(table, Tensor) or table.dim() != 2:
            shape = list(table.shape) if isinstance(table, Tensor) else type(table).__name__
            raise ValueError(f"table must be a tensor [buckets, H], got {shape}")
        buckets = table.shape[0]
        sides = 2 if is_bidirectional else 1
        exact = buckets // sides // 2
        if buckets % (2 * sides) or exact == 0 or max_distance <= exact:
            raise ValueError(
                f"table must have a multiple of {2 * sides} buckets, and max_distance more than {exact} positions, got "
                f"{buckets} buckets and max_distance {max_distance}"
            )
        distance = torch.arange(-max_distance, max_distance + 1, device=table.device)
        behind = distance.abs() if is_bidirectional else (-distance).clamp(min=0)
        # Half of the buckets hold one distance each, the others cover logarithmically growing ranges.
        far = torch.log(behind.float().clamp(min=1) / exact) / math.log(max_distance / exact) * exact
        bucket = torch.where(behind < exact, behind, (exact + far.long()).clamp(max=buckets // sides - 1))
        if is_bidirectional:
            bucket = bucket + (distance > 0) * (buckets // 2)
        return cls(distance_bias=table[bucket].T)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors, which may have gradients."""
        return self.sinks, self.slopes, self.distance_bias, self.key_bias

    @property
    def is_by_distance(self) -> bool:
        """Whether there is a bias by distance."""
        return self.slopes is not None or self.distance_bias is not None

    def bias_at(self, heads: Tensor, distances: Tensor, dtype: torch.dtype) -> Tensor:
        """The bias by distance of query heads and distances t - p, int64 of shapes that broadcast, in ``dtype``."""
        assert self.coordinates is None
        bias = torch.zeros((), dtype=dtype, device=distances.device)
        if self.slopes is not None:
            bias = -self.slopes.to(dtype)[heads] * distances.abs()
        if self.distance_bias is not None:
            most = self.distance_bias.shape[1] // 2
            bias = bias + self.distance_bias.to(dtype)[heads, distances.clamp(-most, most) + most]
        return bias

    def for_heads(self, heads: Sequence[int]) -> Scores:
        """The terms of some query heads; without the bias of keys and coordinates."""
        index = list(heads)
        parts = (None if x is None else x[index] for x in (self.sinks, self.slopes, self.distance_bias))
        return Scores(self.softcap, *parts)


def with_scores(call: Call, scores: Scores) -> Call:
    """A checked call with the terms of its scores as the kernels take them.

    Raises:
        TypeError, ValueError: ``scores`` does not fit the call.
    """
    check_scores(call, scores)
    key_bias, dtype = scores.key_bias, call.dtype
    if key_bias is not None:
        key_bias = key_bias.unsqueeze(-1) if key_bias.dim() == 2 else key_bias
        key_bias = key_bias.to(dtype).expand(*call.key.shape[:3])
    num_queries, num_keys = call.query.shape[1], call.key.shape[1]
    first, count = 1 - num_queries + call.key_offset - call.query_offset, num_queries + num_keys - 1
    coordinates, shift = scores.coordinates, None
    if coordinates is None:
        distance_bias = by_distance(scores, first, count, dtype, call.query.device)
    else:
        assert scores.slopes is not None
        coordinates, distance_bias = coordinates.to(dtype).mT.contiguous(), -scores.slopes.to(dtype).unsqueeze(1)
    is_far = not isinstance(first, Tensor) and not first <= 0 < first + count
    if distance_bias is not None and coordinates is None and is_far and count > 0:
        # A score would be rounded to the digits of a large bias: it is taken relative to that of the nearest key.
        shift = distance_bias[:, 0 if first > 0 else -1].detach()
        distance_bias = distance_bias - shift.unsqueeze(1)
    # Where graphs are captured or transformed, requires_grad does not say whether a gradient is needed.
    is_eager = not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())
    return call._replace(
        distance_bias=distance_bias,
        has_fixed_bias=is_eager and distance_bias is not None and not distance_bias.requires_grad,
        key_bias=key_bias,
        coordinates=coordinates,
        softcap=0.0 if scores.softcap is None else min(max(float(scores.softcap), _LEAST_CAP), _MOST_CAP),
        sinks=scores.sinks,
        shift=shift,
    )


def finished(
    out: Tensor, lse: Tensor, sinks: Tensor | None, shift: Tensor | None, *, is_own: bool = False
) -> tuple[Tensor, Tensor]:
    """The results of an operator, ``L + shift``, with the sinks ``[H]`` in the denominator.

    ``O sigmoid(L - sink)`` and ``log(exp(L) + exp(sink))``. ``is_own``: nobody else reads ``out``, which may change.
    """
    if shift is not None:
        lse = lse + shift
    if sinks is None:
        return out, lse
    sinks = sinks.to(lse.dtype)
    weight = torch.sigmoid(lse - sinks).unsqueeze(-1)
    if is_own and not needs_dispatcher(out, lse, sinks) and not is_recorded(out, lse, sinks):
        out *= weight  # new memory takes longer than the product
    else:
        out = (out * weight).to(out.dtype)
    return out, torch.logaddexp(lse, sinks)


def by_distance(
    scores: Scores, first: int | Tensor, count: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Biases ``[H, count]`` of the distances t - p from ``first`` on; None without any."""
    if not scores.is_by_distance:
        return None
    some = scores.distance_bias if scores.slopes is None else scores.slopes
    assert some is not None
    heads = torch.arange(some.shape[0], device=device).unsqueeze(1)
    return scores.bias_at(heads, torch.arange(count, device=device) + first, dtype)


def check_scores(call: Call, scores: Scores) -> None:
    """Raise unless ``scores`` fits the call."""
    if not isinstance(scores, Scores):
        raise TypeError(
            f"scores must be dilated_attention_pytorch.ops.Scores(...) or None, got {type(scores).__name__}"
        )
    batch, num_keys, kv_heads = call.key.shape[:3]
    heads, dtype = call.query.shape[2], call.dtype
    allowed: dict[str, list[list[int]]] = {
        "sinks": [[heads]],
        "slopes": [[heads]],
        "key_bias": [[batch, num_keys], [batch, num_keys, kv_heads], [1, num_keys], [batch, num_keys, 1]],
    }
    for name in ("sinks", "slopes", "distance_bias", "key_bias"):
        tensor = getattr(scores, name)
        if tensor is None:
            continue
        if tensor.device != call.query.device:
            raise ValueError(f"{name} of scores must be on query's device {call.query.device}, got {tensor.device}")
        if tensor.dtype == torch.float64 and dtype != torch.float64:
            raise TypeError(
                f"{name} of scores must not be float64 for scores in {dtype}: convert with {name}.to({dtype})"
            )
        shape = list(tensor.shape)
        if name == "distance_bias":
            if shape[0] != heads:
                raise ValueError(f"distance_bias of scores must be [H = {heads}, 2 W + 1], got {shape}")
        elif shape not in allowed[name]:
            expected = "[H]" if name != "key_bias" else "[B, M] or [B, M, G]"
            raise ValueError(f"{name} of scores must be {expected} = {allowed[name][0]}, got {shape}")
    if scores.coordinates is not None:
        _check_places(call, scores.coordinates)


def _check_places(call: Call, coordinates: Tensor) -> None:
    expected = [*call.key.shape[:2], 2]
    if coordinates.device != call.query.device or list(coordinates.shape) != expected:
        raise ValueError(
            f"coordinates of scores must be [B, M, 2] = {expected} on query's device {call.query.device}, got "
            f"{list(coordinates.shape)} on {coordinates.device}"
        )
    if isinstance(call.query_offset, Tensor):
        raise NotImplementedError("coordinates of scores need query_offset as an integer, got a tensor")
    first, num_queries = call.query_offset - call.key_offset, call.query.shape[1]
    if first < 0 or first + num_queries > call.key.shape[1]:
        raise ValueError(
            f"with coordinates, queries must lie at positions of keys, {call.key_offset} to "
            f"{call.key_offset + call.key.shape[1] - 1}: got {num_queries} queries from position {call.query_offset} on"
        )
