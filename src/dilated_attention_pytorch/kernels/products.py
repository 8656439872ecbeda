"""Matrix-product kernel for one partial, in blocks of problems and query rows whose scores fit into the caches.

Supports what no fused kernel does: dropout, gradients of the log-sum-exp and of a bias, scores of any magnitude,
weighted sums, any device. Takes the same views as the fused kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.precision import accumulation_dtype


class ScoreBlock(NamedTuple):
    """A block of problems and query rows of views ``[problems, problems, rows(, D)]``."""

    axis: int
    one: int
    """Fixed index along ``axis``, one of the two problem axes."""
    some: slice | None
    """Range along the other axis; None = all."""
    rows: slice | None
    """Query rows; None = all."""

    def of_keys(self, view: Tensor) -> Tensor:
        """This block's part of a view of keys, ``[problems, rows(, D)]``."""
        taken = view.select(self.axis, self.one)
        return taken if self.some is None else taken[self.some]

    def of_queries(self, view: Tensor) -> Tensor:
        """This block's part of a view of queries, ``[problems, rows(, D)]``."""
        taken = self.of_keys(view)
        return taken if self.rows is None else taken[:, self.rows]

    @property
    def is_first(self) -> bool:
        """Whether this block contains the first query row of its problems."""
        return self.rows is None or self.rows.start == 0


KeepFactors = Callable[[ScoreBlock], Tensor]
"""Dropout factors of a block: ``[problems, rows, keys]``."""


class BlockTerms(NamedTuple):
    """Terms of the scores besides the scale, masks and gates."""

    softcap: float = 0.0
    """Cap of the scaled scores; 0 = none."""
    distance_bias: Callable[[ScoreBlock], Tensor] | None = None
    """Bias of a block, ``[problems, rows, keys]``."""
    add_gradient: Callable[[ScoreBlock, Tensor], None] | None = None
    """Adds a block's gradient of the scores to that of the bias by distance."""


LOG2_E = math.log2(math.e)
"""Factor from natural to base-2 exponents: below -87, PyTorch's exp on a CPU takes 50 to 180 times as long as
elsewhere, and its exp2 does not."""
_SCORES_OF_A_CORE = 1 << 19
"""Scores held at a time per CPU core: 2 MiB in float32."""
_MOST_SCORES = 1 << 21
"""Scores held at a time on all cores with dropout, whose 64-bit random numbers are larger than the scores."""
_SCORES_ELSEWHERE = 1 << 22
"""Scores held at a time on other devices, which need more work per operation."""
_TAKING_VIEWS = ("cpu", "cuda", "meta")
"""Devices whose products read and write views, whatever the strides and the number of terms."""
_MOST_TERMS = 1 << 14
"""Terms of a sum of products on other devices."""


class Result(NamedTuple):
    """Result of a partial, in the accumulation dtype."""

    out: Tensor
    lse: Tensor
    """-inf for rows that see no key."""
    rest: Tensor | None = None
    """If set, ``lse + rest`` is the log-sum-exp in base 2: the largest score, and the logarithm of the sum of
    powers of the differences from it. A single number would lose the second part next to a large score."""


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    keep_factors: KeepFactors | None = None,
    terms: BlockTerms | None = None,
    *,
    is_causal: bool,
    scale: float,
    is_pair: bool = False,
) -> Result:
    """Output and log-sum-exp of one partial.

    Args:
        query: ``[problems, problems, N, D]``; key, value: ``[problems, problems, M, D]``, any strides.
        bias: added to the scores (-inf hides a key), ``[problems, problems, N, M]``, any strides, in the accumulation
            dtype.
        keep_factors: dropout factors of the probabilities.
        terms: terms of the scores; ``bias`` is added after the cap.
        is_causal: query i attends to the first i + 1 keys.
        scale: scale of the scores.
        is_pair: return the log-sum-exp as a pair. Scores are computed block by block as in :func:`backward`, so that
            both get bitwise equal scores.
    """
    dtype = accumulation_dtype(query.dtype)
    key, value = key.to(dtype), value.to(dtype)
    out = torch.empty(*query.shape[:3], value.shape[-1], dtype=dtype, device=query.device)
    lse = torch.empty(query.shape[:3], dtype=dtype, device=query.device)
    rest = torch.empty_like(lse) if is_pair else None
    for block in _score_blocks(query, key.shape[2], is_dropped=keep_factors is not None):
        scores = _scores(query, key, bias, terms, block, is_causal=is_causal, scale=scale)
        largest = scores.amax(dim=-1, keepdim=True)
        # A row that sees no key has the maximum -inf and a total of 0.
        safe = largest.masked_fill(largest == float("-inf"), 0.0)
        total = scores.sub_(safe).exp2_().sum(dim=-1, keepdim=True).clamp_(min=torch.finfo(dtype).tiny)
        if rest is None:
            block.of_queries(lse).copy_((total.log2() + largest).squeeze(-1) / LOG2_E)
        else:
            block.of_queries(lse).copy_(largest.squeeze(-1))
            block.of_queries(rest).copy_(total.log2().squeeze(-1))
        if keep_factors is not None:
            scores *= keep_factors(block)
        block.of_queries(out).copy_(_product(scores, block.of_keys(value)).div_(total))
    return Result(out, lse, rest)


def weighted_sum(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    rest: Tensor | None,
    values: Tensor | None,
    factors: Sequence[tuple[Tensor | None, Tensor | None, Tensor | None]],
    bias: Tensor | None = None,
    keep_factors: KeepFactors | None = None,
    terms: BlockTerms | None = None,
    *,
    is_causal: bool,
    scale: float,
    of_keys: bool = False,
) -> Tensor:
    """A partial's contribution to ``sum_t P[p, t] f[p, t] values[t]``, with the merged P = ``exp(s - lse)``.

    f is the product of the dropout factors and of ``factors``, each ``left[p] . right[t] + of_key[t]`` with None terms
    left out. With ``of_keys``, values belong to the queries and ``sum_p P[p, t] f[p, t] values[p]`` is accumulated;
    ``values=None`` stands for ones, ``[problems, problems, rows, 1]``. With ``rest``, ``(lse, rest)`` is a pair, see
    :class:`Result`.
    """
    dtype = accumulation_dtype(query.dtype)
    key = key.to(dtype)
    rows = query if of_keys else key
    values = rows.new_ones(*rows.shape[:3], 1, dtype=dtype) if values is None else values.to(dtype)
    casts = [[None if x is None else x.to(dtype) for x in factor] for factor in factors]
    total = torch.zeros(*(key if of_keys else query).shape[:3], values.shape[3], dtype=dtype, device=query.device)
    for block in _score_blocks(query, key.shape[2], is_dropped=keep_factors is not None):
        weights = _scores(query, key, bias, terms, block, is_causal=is_causal, scale=scale)
        _probabilities(weights, block, lse, rest)
        if keep_factors is not None:
            weights *= keep_factors(block)
        for left, right, of_key in casts:
            factor = None
            if left is not None and right is not None:
                factor = _product(block.of_queries(left), block.of_keys(right).mT)
            if of_key is not None:
                along = block.of_keys(of_key).unsqueeze(1)
                factor = along if factor is None else factor.add_(along)
            if factor is not None:
                weights *= factor
        if of_keys:
            _add_product(block.of_keys(total), weights.mT, block.of_queries(values))
        else:
            block.of_queries(total).copy_(_product(weights, block.of_keys(values)))
    return total


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    rest: Tensor | None,
    delta: Tensor,
    bias: Tensor | None = None,
    keep_factors: KeepFactors | None = None,
    terms: BlockTerms | None = None,
    *,
    is_causal: bool,
    scale: float,
    needs_bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key and value of one partial under the merged ``lse``, in the accumulation dtype.

    ``dS = P * (keep * dP - delta)`` with ``delta = rowsum(dO * O) - dL``, so the gradient of the log-sum-exp is
    included. With ``needs_bias``, the last result is the gradient of a per-key bias, ``sum_p dS[p, t] [problems,
    problems, M]``. With ``rest``, ``(lse, rest)`` is a pair, see :class:`Result`.
    """
    dtype = accumulation_dtype(query.dtype)
    key, value = key.to(dtype), value.to(dtype)
    grad_query, grad_key, grad_value = (
        torch.zeros(x.shape, dtype=dtype, device=query.device) for x in (query, key, value)
    )
    grad_bias = torch.zeros(key.shape[:3], dtype=dtype, device=query.device) if needs_bias else None
    for block in _score_blocks(query, key.shape[2], is_dropped=keep_factors is not None):
        rows, grad = block.of_queries(query).to(dtype), block.of_queries(grad_out).to(dtype)
        probabilities = _scores(query, key, bias, terms, block, is_causal=is_causal, scale=scale)
        _probabilities(probabilities, block, lse, rest)
        grad_scores = _product(grad, block.of_keys(value).mT)
        dropped = probabilities
        if keep_factors is not None:
            kept = keep_factors(block)
            grad_scores *= kept
            dropped = probabilities * kept
        _add_product(block.of_keys(grad_value), dropped.mT, grad)
        grad_scores.sub_(block.of_queries(delta).unsqueeze(-1)).mul_(probabilities)
        if grad_bias is not None:
            block.of_keys(grad_bias).add_(grad_scores.sum(1))
        if terms is not None:
            if terms.add_gradient is not None:
                terms.add_gradient(block, grad_scores)
            if terms.softcap:
                grad_scores *= _capped(query, key, block, terms.softcap, scale).square_().neg_().add_(1.0)
        _add_product(block.of_keys(grad_key), grad_scores.mT, rows, scale)
        _add_product(block.of_queries(grad_query), grad_scores, block.of_keys(key), scale)
    return grad_query, grad_key, grad_value, grad_bias


def _score_blocks(query: Tensor, num_keys: int, *, is_dropped: bool) -> Iterator[ScoreBlock]:
    """Blocks of problems and query rows whose scores fit into the caches, with enough problems for every core."""
    first, second, num_queries = query.shape[:3]
    cores = torch.get_num_threads()
    limit = cores * _SCORES_OF_A_CORE if query.device.type == "cpu" else _SCORES_ELSEWHERE
    limit = min(limit, _MOST_SCORES) if is_dropped else limit
    all_problems = max(first, second)
    most = max(1, limit // max(1, num_queries * num_keys) // cores) * cores
    problems = -(-_evenly(all_problems, most) // cores) * cores  # a multiple of the number of cores
    rows = _evenly(num_queries, max(1, limit // max(1, min(problems, all_problems) * num_keys)))
    for one in range(min(first, second)):
        for start in range(0, all_problems, problems):
            some = slice(start, start + problems) if problems < all_problems else None
            for row in range(0, num_queries, rows):
                part = slice(row, row + rows) if rows < num_queries else None
                yield ScoreBlock(1 if first >= second else 0, one, some, part)


def _evenly(number: int, most: int) -> int:
    """Part size when ``number`` is split evenly into the fewest parts of at most ``most``."""
    return max(1, -(-number // max(1, -(-number // most))))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right``, ``[problems, rows, columns]``.

    PyTorch's products for Metal (up to 2.13 at least) are wrong for operands with a stride of 0 (issue 180201 of
    pytorch/pytorch) and, on some chips, for sums of 32,767 and more terms (195163). Devices that are not known to be
    free of this multiply copies, and sum the products of parts.
    """
    if left.device.type in _TAKING_VIEWS:
        return torch.bmm(left, right)
    total, *others = (
        torch.bmm(columns.contiguous(), rows.contiguous())
        for columns, rows in zip(left.split(_MOST_TERMS, 2), right.split(_MOST_TERMS, 1), strict=True)
    )
    for part in others:
        total += part
    return total


def _add_product(total: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """Add ``scale * left @ right`` to a view.

    On Metal, PyTorch does not write products into views under macOS 14 (issue 104832, pull request 193385).
    """
    if total.device.type in _TAKING_VIEWS:
        total.baddbmm_(left, right, alpha=scale)
    else:
        total.add_(_product(left, right), alpha=scale)


def _capped(query: Tensor, key: Tensor, block: ScoreBlock, softcap: float, scale: float) -> Tensor:
    """``tanh(scale q . k / softcap)`` of a block, ``[problems, rows, keys]``."""
    return _products(query, key, block, scale).div_(softcap).tanh_()


def _products(query: Tensor, key: Tensor, block: ScoreBlock, scale: float) -> Tensor:
    rows, keys = block.of_queries(query).to(key.dtype), block.of_keys(key)
    if key.device.type not in _TAKING_VIEWS:  # on Metal, the factor 0 of `beta` does not hide a NaN (issue 187521)
        return _product(rows, keys.mT).mul_(scale)
    scores = torch.empty(*rows.shape[:2], keys.shape[1], dtype=key.dtype, device=key.device)
    torch.baddbmm(scores, rows, keys.mT, beta=0, alpha=scale, out=scores)
    return scores


def _scores(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    terms: BlockTerms | None,
    block: ScoreBlock,
    *,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """Scaled, capped, biased and masked scores of a block in base 2, ``[problems, rows, keys]``."""
    if terms is not None and terms.softcap:
        scores = _capped(query, key, block, terms.softcap, scale).mul_(terms.softcap * LOG2_E)
    else:
        scores = _products(query, key, block, scale * LOG2_E)
    if terms is not None and terms.distance_bias is not None:
        scores.add_(terms.distance_bias(block), alpha=LOG2_E)
    if bias is not None:
        scores.add_(block.of_queries(bias), alpha=LOG2_E)
    if is_causal:
        queries = torch.arange(query.shape[2], device=query.device)[block.rows or slice(None)]
        later = torch.arange(key.shape[2], device=query.device) > queries.unsqueeze(-1)
        scores.masked_fill_(later, float("-inf"))
    return scores


def _probabilities(scores: Tensor, block: ScoreBlock, lse: Tensor, rest: Tensor | None) -> None:
    """Replace base-2 scores by ``exp(s - lse)``, or by that of the pair ``(lse, rest)``."""
    of_rows = block.of_queries(lse).unsqueeze(-1)
    if rest is None:
        scores.sub_(of_rows * LOG2_E)
    else:
        # At most 1, even if a library sums the products of equal rows in a different order.
        scores.sub_(of_rows).sub_(block.of_queries(rest).unsqueeze(-1)).clamp_(max=0.0)
    scores.exp2_()
