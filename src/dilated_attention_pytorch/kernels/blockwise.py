"""One partial by matrix products, a few problems and query rows at a time: as many scores as the caches hold.

What no fused kernel does (dropout, gradients of the log-sum-exp), and on a CPU what its kernel is slower at. Takes the
same views as the fused kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .aten import MASKED


class Place(NamedTuple):
    """Some problems and query rows of views ``[problems, problems, rows(, D)]``."""

    axis: int
    one: int
    """Of this axis of problems one is taken."""
    some: slice | None
    """Of the other axis some; all without it."""
    rows: slice | None
    """Query rows; all without it."""

    def of_keys(self, view: Tensor) -> Tensor:
        """These problems of a view of keys, ``[problems, rows(, D)]``."""
        taken = view.select(self.axis, self.one)
        return taken if self.some is None else taken[self.some]

    def of_queries(self, view: Tensor) -> Tensor:
        """These problems and rows of a view of queries, ``[problems, rows(, D)]``."""
        taken = self.of_keys(view)
        return taken if self.rows is None else taken[:, self.rows]


KeepFactors = Callable[[Place], Tensor]
"""Dropout factors of a place: ``[problems, rows, keys]``."""

LOG2_E = math.log2(math.e)
"""Scores are multiplied by it, and powers of two taken: of numbers below -87 PyTorch's exp on a CPU is 50 to 180 times
slower than of others, its exp2 is not."""
MOST_BOUNDED = 24.0
"""Scores up to this in size need no maximum: sums of their powers, and quotients, stay far within float32."""
_SCORES_OF_A_CORE = 1 << 19
"""Scores that are held at a time for every core of a CPU: 2 MiB of float32."""
_MOST_SCORES = 1 << 21
"""The same for all cores together where dropout is drawn, whose 64-bit numbers are larger than the scores."""
_SCORES_ELSEWHERE = 1 << 22
"""The same for devices that want more work at a time."""
_ELEMENTS_OF_NORMS = 1 << 18
"""Elements of rows whose norms are taken at a time."""
_SAFE_NORM = 2.0**-60
"""Of rows with a larger norm no square that matters vanishes in float32."""


class Scratch:
    """Memory of intermediate results, kept from one step to the next: fresh pages cost as much as what fills them."""

    def __init__(self) -> None:
        self._kept: dict[object, Tensor] = {}

    def take(self, name: object, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Memory of that shape, on the device and in the dtype of ``like``; what was taken under the name is lost."""
        size, dtype = math.prod(shape), dtype or like.dtype
        kept = self._kept.get(name)
        if kept is None or kept.numel() < size or kept.dtype != dtype:
            kept = self._kept[name] = torch.empty(size, dtype=dtype, device=like.device)
        return kept[:size].view(shape)

    def cast(self, name: object, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor itself if it has that dtype, else a copy under the name."""
        return tensor if tensor.dtype == dtype else self.take(name, tuple(tensor.shape), tensor, dtype).copy_(tensor)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
        """``total += left @ right``, or without what was there before."""
        if left.dtype == total.dtype:
            torch.baddbmm(total, left, right, beta=0 if is_first else 1, out=total)
            return
        product = torch.bmm(left, right, out=self.take("product", tuple(total.shape), left))
        if is_first:
            total.copy_(product)
        else:
            total += product


class Bias(NamedTuple):
    """What is added to the scores of a run of keys: 0, or far below any score, so that no unit of scores matters."""

    values: Tensor
    """``[problems, problems, queries, keys of the run]``, any strides, in the accumulation dtype."""
    first_key: int = 0


def _places(query: Tensor, num_keys: int, *, most_scores: int | None = None) -> Iterator[Place]:
    """Problems and query rows with so few scores that they stay in the caches, and enough problems for every core."""
    first, second, num_queries = query.shape[:3]
    cores = torch.get_num_threads()
    limit = cores * _SCORES_OF_A_CORE if query.device.type == "cpu" else _SCORES_ELSEWHERE
    limit = min(limit, most_scores or limit)
    all_problems = max(first, second)
    most = max(1, limit // max(1, num_queries * num_keys) // cores) * cores
    problems = -(-_evenly(all_problems, most) // cores) * cores  # equally many for every core
    rows = _evenly(num_queries, max(1, limit // max(1, min(problems, all_problems) * num_keys)))
    for one in range(min(first, second)):
        for start in range(0, all_problems, problems):
            some = slice(start, start + problems) if problems < all_problems else None
            for row in range(0, num_queries, rows):
                part = slice(row, row + rows) if rows < num_queries else None
                yield Place(1 if first >= second else 0, one, some, part)


def _evenly(number: int, most: int) -> int:
    """The size of equal parts of a number, as few as have ``most`` or less."""
    return max(1, -(-number // max(1, -(-number // most))))


def _scores(
    query: Tensor, key: Tensor, biases: Sequence[Bias], place: Place, out: Tensor, *, is_causal: bool, scale: float
) -> Tensor:
    """Scaled, biased and masked scores of a place in units of log 2, in ``out [problems, rows, keys]``."""
    torch.baddbmm(
        out, place.of_queries(query).to(out.dtype), place.of_keys(key).mT, beta=0, alpha=scale * LOG2_E, out=out
    )
    for values, first_key in biases:
        out[..., first_key : first_key + values.shape[3]] += place.of_queries(values)
    if is_causal:
        rows = torch.arange(query.shape[2], device=query.device)[place.rows or slice(None)]
        later = torch.arange(key.shape[2], device=query.device) > rows.unsqueeze(-1)
        out.masked_fill_(later, float("-inf"))
    return out


def score_bounds(query: Tensor, key: Tensor, scale: float, *, is_causal: bool, offset: int) -> Tensor:
    """Bounds of the size of every query's scores, ``scale |q| max|k|`` over the keys that it may see, ``[B, N, H]``.

    Of a causal query only keys up to its own position count, so that what comes later changes nothing about it: the
    i-th query lies at the (i + offset)-th key. NaN where a number is none.
    """
    dtype = _accumulation_dtype(query)
    queries, keys = (torch.linalg.vector_norm(x, dim=-1, dtype=dtype) for x in (query, key))
    if keys.shape[1] == 0:
        return torch.zeros_like(queries)
    if is_causal:
        places = torch.arange(queries.shape[1], device=query.device) + offset
        largest = keys.cummax(dim=1).values[:, places.clamp(0, keys.shape[1] - 1)]
    else:
        largest = keys.amax(dim=1, keepdim=True)
    return queries.unflatten(2, (keys.shape[2], -1)).mul_(largest.unsqueeze(-1)).flatten(2).mul_(abs(scale))


def largest_norm(rows: Tensor) -> float:
    """The largest norm of a row ``[..., D]`` on the CPU; 0 elsewhere, where looking would wait for the device.

    Rows that hold a NaN or an infinity are left out: what is computed of them is not finite anyway. Of rows whose
    squares overflow or vanish it is a bound, ``sqrt(D)`` times as large at most.
    """
    if rows.device.type != "cpu" or rows.numel() == 0:
        return 0.0
    # Some at a time: of low precision they are copied first.
    dim = max(range(rows.dim() - 1), key=lambda dim: rows.shape[dim])
    parts = rows.split(max(1, _ELEMENTS_OF_NORMS * rows.shape[dim] // rows.numel()), dim)
    return max(map(_largest_norm, parts))


def _largest_norm(rows: Tensor) -> float:
    norms = torch.linalg.vector_norm(rows, dim=-1, dtype=_accumulation_dtype(rows))
    largest = float(norms.max())
    if _SAFE_NORM < largest < math.inf:
        return largest
    # A NaN, an infinity, or squares that overflow or vanish: a bound that takes none.
    is_finite = rows.isfinite().all(dim=-1, keepdim=True)
    return float(rows.abs().where(is_finite, 0.0).max()) * math.sqrt(rows.shape[-1])


def has_large_scores(query_norm: float, key_norm: float, scale: float, dtype: torch.dtype) -> bool:
    """Whether rows of at most these norms may have a score so large that one log-sum-exp loses what follows it.

    ``exp(s - L)`` is off by the spacing of numbers as large as L: 2**-10 from the scores on that count as large.
    ``dtype`` is that of the operands.
    """
    accumulation = torch.float64 if dtype == torch.float64 else torch.float32
    return query_norm * key_norm * abs(scale) > 2.0**-10 / torch.finfo(accumulation).eps


def _probabilities(scores: Tensor, lse: Tensor, rest: Tensor | None) -> Tensor:
    """``exp(s - lse)`` in place of scores in units of log 2; of the pair ``(lse, rest)`` where there is one."""
    if rest is None:
        scores.sub_((lse * LOG2_E).unsqueeze(-1))
    else:
        # Never more than 1, also where a library sums the products of equal rows in another order.
        scores.sub_(lse.unsqueeze(-1)).sub_(rest.unsqueeze(-1)).clamp_(max=0.0)
    return scores.exp2_()


def _accumulation_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def blockwise_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    biases: Sequence[Bias],
    *,
    is_causal: bool,
    scale: float,
    scratch: Scratch | None = None,
    results: tuple[Tensor, Tensor] | None = None,
    is_bounded: bool | Tensor = False,
    rest: Tensor | None = None,
    is_dropped: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one partial: ``results``, or new ones in the accumulation dtype.

    ``is_bounded``: no score of the query is larger in size than :data:`MOST_BOUNDED`, for all queries or by query, bool
    ``[problems, problems, queries]``. What is subtracted from scores before their powers are taken cancels; from
    bounded ones nothing is. The result of a query does not depend on what the others are.

    ``rest`` is for scores that :func:`has_large_scores` finds, none of which is bounded. A log-sum-exp in one number
    would lose what follows the largest of them, so that it is a pair in units of log 2: the largest score, in the
    place of the log-sum-exp, and in ``rest`` the logarithm of the sum of powers of what scores differ from it. Scores
    are then computed in the steps of the gradient (``is_dropped``: of that with dropout): both have the same to the
    last bit.
    """
    dtype, scratch = _accumulation_dtype(query), scratch or Scratch()
    key, value = scratch.cast("keys", key, dtype), scratch.cast("values", value, dtype)
    if results is None:
        shape = query.shape[:3]
        out, lse = (torch.empty(x, dtype=dtype, device=query.device) for x in ((*shape, value.shape[-1]), shape))
    else:
        out, lse = results
    for place in _places(query, key.shape[2], most_scores=_MOST_SCORES if is_dropped else None):
        into = place.of_queries(out)
        scores = scratch.take("scores", (*into.shape[:2], key.shape[2]), query, dtype)
        _scores(query, key, biases, place, scores, is_causal=is_causal, scale=scale)
        taken: Tensor | None = None
        of_place = place.of_queries(is_bounded) if isinstance(is_bounded, Tensor) else is_bounded
        if not (of_place.all() if isinstance(of_place, Tensor) else of_place):
            taken = scores.amax(dim=-1, keepdim=True)
            if isinstance(of_place, Tensor):
                taken.masked_fill_(of_place.unsqueeze(-1), 0.0)
            scores.sub_(taken)
        total = scores.exp2_().sum(dim=-1, keepdim=True)
        of_rows = torch.log(total, out=place.of_queries(lse).unsqueeze(-1))
        if biases:
            # A row that sees none of the keys has an output of 0 and, like one of masked scores, a finite log-sum-exp.
            of_rows.clamp_(min=MASKED)
            total.clamp_(min=torch.finfo(dtype).tiny)
        if rest is not None:
            assert taken is not None, "large scores have no bound"
            of_rows.copy_(taken)
            torch.log2(total, out=place.of_queries(rest).unsqueeze(-1))
        elif taken is not None:
            of_rows.add_(taken, alpha=1 / LOG2_E)
        torch.div(torch.bmm(scores, place.of_keys(value)), total, out=into)
    return out, lse


def blockwise_weighted_sum(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    values: Tensor,
    biases: Sequence[Bias],
    keep_factors: KeepFactors | None = None,
    factors: Sequence[tuple[Tensor, Tensor]] = (),
    *,
    is_causal: bool,
    scale: float,
    of_keys: bool = False,
    rest: Tensor | None = None,
) -> Tensor:
    """What one partial adds to ``sum_t P[p, t] f[p, t] values[t]``, ``P = exp(s - lse)`` the merged probabilities.

    f is the product of what dropout keeps and of ``factors``, each a pair of views of queries and of keys: their
    product by rows. With ``of_keys`` the values are the queries' and ``sum_p P[p, t] f[p, t] values[p]`` is added up.
    With ``rest``, it and ``lse`` are a pair, see :func:`blockwise_forward`.
    """
    dtype, scratch = _accumulation_dtype(query), Scratch()
    key = scratch.cast("keys", key, dtype)
    rights = [right.to(dtype) for _, right in factors]
    values = values.to(dtype)
    shape = (*(key if of_keys else query).shape[:3], values.shape[3])
    total = torch.empty(shape, dtype=dtype, device=query.device)
    for place in _places(query, key.shape[2], most_scores=None if keep_factors is None else _MOST_SCORES):
        of_place = place.of_queries(lse)
        shape = (*of_place.shape, key.shape[2])
        weights = scratch.take("weights", shape, query, dtype)
        _scores(query, key, biases, place, weights, is_causal=is_causal, scale=scale)
        _probabilities(weights, of_place, None if rest is None else place.of_queries(rest))
        if keep_factors is not None:
            weights *= keep_factors(place)
        for (left, _), right in zip(factors, rights, strict=True):
            product = scratch.take("factor", shape, query, dtype)
            weights *= torch.bmm(place.of_queries(left).to(dtype), place.of_keys(right).mT, out=product)
        if of_keys:
            is_first = place.rows is None or place.rows.start == 0
            scratch.add_product(place.of_keys(total), weights.mT, place.of_queries(values), is_first=is_first)
        else:
            place.of_queries(total).copy_(torch.bmm(weights, place.of_keys(values)))
    return total


def blockwise_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    delta: Tensor,
    biases: Sequence[Bias],
    keep_factors: KeepFactors | None,
    *,
    is_causal: bool,
    scale: float,
    product_dtype: torch.dtype | None = None,
    scratch: Scratch | None = None,
    totals: Sequence[Tensor] | None = None,
    rest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one partial under the merged ``lse``, in the accumulation dtype.

    ``dS = P * (keep * dP - delta)`` with ``delta = rowsum(dO * O) - dL``: the gradient of the log-sum-exp included.
    ``product_dtype`` is what P and dS are rounded to before they are multiplied, as fused kernels round them; the
    accumulation dtype without it. With ``scratch`` the gradients lie in it. With ``totals``, shaped like query, key and
    value, no two problems sharing a row, they are added there. With ``rest``, it and ``lse`` are a pair, see
    :func:`blockwise_forward`.
    """
    dtype, scratch = _accumulation_dtype(query), scratch or Scratch()
    rounded = product_dtype or dtype
    keys, values = scratch.cast("keys", key, dtype), scratch.cast("values", value, dtype)
    rounded_keys = scratch.cast("rounded keys", key, rounded)
    grad_query, grad_key, grad_value = totals or [
        scratch.take(f"gradient of the {name}", tuple(x.shape), x, dtype)
        for name, x in (("query", query), ("key", key), ("value", value))
    ]
    for place in _places(query, key.shape[2], most_scores=None if keep_factors is None else _MOST_SCORES):
        grad = place.of_queries(grad_out)
        shape = (*grad.shape[:2], key.shape[2])
        scores, grad_scores = (scratch.take(name, shape, query, dtype) for name in ("scores", "their gradient"))
        _scores(query, keys, biases, place, scores, is_causal=is_causal, scale=scale)
        probabilities = _probabilities(scores, place.of_queries(lse), None if rest is None else place.of_queries(rest))
        # Times the scale, with which the gradients of the scores reach those of queries and keys.
        torch.baddbmm(grad_scores, grad.to(dtype), place.of_keys(values).mT, beta=0, alpha=scale, out=grad_scores)
        dropped = probabilities
        if keep_factors is not None:
            factors = keep_factors(place)
            grad_scores *= factors
            dropped = probabilities * factors
        # In memory of its own the first query rows of these problems overwrite what lies there.
        is_first = totals is None and (place.rows is None or place.rows.start == 0)
        left = scratch.cast("rounded", dropped, rounded).mT
        scratch.add_product(place.of_keys(grad_value), left, grad.to(rounded), is_first=is_first)
        grad_scores.sub_((place.of_queries(delta) * scale).unsqueeze(-1)).mul_(probabilities)
        left, queries = scratch.cast("rounded", grad_scores, rounded), place.of_queries(query).to(rounded)
        scratch.add_product(place.of_keys(grad_key), left.mT, queries, is_first=is_first)
        scratch.add_product(place.of_queries(grad_query), left, place.of_keys(rounded_keys), is_first=totals is None)
    return grad_query, grad_key, grad_value
