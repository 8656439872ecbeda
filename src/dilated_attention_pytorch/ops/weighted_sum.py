"""Weighted sums over attention probabilities, closed under differentiation.

For the merged probabilities P of all pairs (query p, key t) and a product f of pairwise factors, a weighted sum is

    sum_t P[p, t] f[p, t] x[t]    or, over the queries,    sum_p P[p, t] f[p, t] x[p].

The tangent of a score is such a factor, and so is the gradient of a probability. The scores are
``s = scale * q . k + e``, where ``e`` is the log-gate of the pair's block, if gates are given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import Function

from .call import NUM_TENSORS, Call

Axis = Literal["queries", "keys", "blocks"]
"""The axis of the result: one value per query, per key, or per listed block of a query block."""
_SIZE = len(Call._fields)


class Factor(NamedTuple):
    """A pairwise factor ``left[p] . right[t] + gates[block of the pair]``; None terms are left out."""

    left: Tensor | None
    """``[B, N, H, width]``"""
    right: Tensor | None
    """``[B, M, G, width]``"""
    gates: Tensor | None = None
    """``[B, G, query blocks, k]``"""


class Tangents(NamedTuple):
    """Tangents of query, key, value and log-gates; None = zero."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    log_gates: Tensor | None


def nestable(jvp: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a ``jvp(ctx, saved, *tangents)`` so that its own operations propagate the tangents of outer levels.

    PyTorch disables forward-mode AD inside ``jvp``, so that nested tangents would be 0.
    """

    @functools.wraps(jvp)
    def with_tangents(ctx: Any, *tangents: Any) -> Any:
        with forward_ad._set_fwd_grad_enabled(True):
            # Saved tensors already carry the tangents of this level, which are passed as arguments.
            saved = [None if x is None else forward_ad.unpack_dual(x).primal for x in ctx.saved_tensors]
            return jvp(ctx, saved, *tangents)

    return with_tangents


class WeightedSum(Function):
    """:func:`.operators.weighted_sum`: ``apply(axis, lse, values, *call, *factors)``; ``call.value`` is not read.

    ``lse`` is an independent variable here: P is ``exp(s - lse)``.
    """

    @staticmethod
    def forward(axis: Axis, lse: Tensor, values: Tensor | None, *arguments: Any) -> Tensor:
        operator = torch.ops.dilated_attention_pytorch.weighted_sum.default
        total: Tensor = operator(axis, values, arguments[_SIZE:], lse, *Call(*arguments[:_SIZE]).for_operator())
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.axis, lse, values, *arguments = inputs
        ctx.options = arguments[NUM_TENSORS:_SIZE]
        tensors = (lse, values, *arguments[:NUM_TENSORS], *arguments[_SIZE:])
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        lse, values, call, factors = _saved(ctx.saved_tensors, ctx.options)
        refuse_terms(call)
        if grad is None:
            return (None,) * (3 + _SIZE + 3 * len(factors))
        # The multiplier of each pair's term in <sum, gradient>.
        last = {
            "queries": Factor(grad, values),
            "keys": Factor(values, grad),
            "blocks": Factor(None, None, grad),
        }[ctx.axis]
        of_scores, (key, query, gates) = [*factors, last], (call.key, call.query, call.log_gates)
        is_needed = dict(zip(("lse", "values", *Call._fields), ctx.needs_input_grad[1:], strict=False))

        def total(
            axis: Axis, like: Tensor | None, values: Tensor | None, factors: list[Factor], scale: float = 1.0
        ) -> Tensor | None:
            if like is None:
                return None
            return (scale * weighted_sum(axis, call, lse, values, factors)).to(like.dtype)

        grads: dict[str, Tensor | None] = dict.fromkeys(is_needed)
        if is_needed["lse"]:
            of_rows = total("queries", lse, ones_of(key), of_scores)
            assert of_rows is not None
            grads["lse"] = -of_rows.squeeze(-1)
        if is_needed["values"]:
            grads["values"] = total("keys" if ctx.axis == "queries" else "queries", values, grad, factors)
        assert call.scale is not None
        if is_needed["query"]:
            grads["query"] = total("queries", query, key, of_scores, call.scale)
        if is_needed["key"]:
            grads["key"] = total("keys", key, query, of_scores, call.scale)
        if is_needed["log_gates"]:
            grads["log_gates"] = total("blocks", gates, None, of_scores)
        of_factors: list[Tensor | None] = []
        for index, factor in enumerate(factors):
            others = [*factors[:index], *factors[index + 1 :], last]
            of_factors += [
                total("queries", factor.left, factor.right, others),
                total("keys", factor.right, factor.left, others),
                total("blocks", factor.gates, None, others),
            ]
        return (None, *grads.values(), *of_factors)

    @staticmethod
    @nestable
    def jvp(ctx: Any, saved: list[Any], *tangents: Any) -> Tensor:
        lse, values, call, factors = _saved(saved, ctx.options)
        refuse_terms(call)
        _, of_lse, of_values, of_query, of_key, _, of_gates, *_ = tangents

        def total(values: Tensor | None, factors: list[Factor]) -> Tensor:
            return weighted_sum(ctx.axis, call, lse, values, factors)

        scores = moved_scores(call, Tangents(of_query, of_key, None, of_gates))
        if of_lse is not None:
            scores = less(scores, of_lse, ones_of(call.key))
        parts = [] if scores is None else [total(values, [*factors, scores])]
        if of_values is not None:
            parts.append(total(of_values, factors))
        for index, (factor, moved) in enumerate(zip(factors, factors_of(tangents[3 + _SIZE :]), strict=True)):
            of_factor = tangent_of(factor, moved)
            if of_factor is not None:
                parts.append(total(values, [*factors[:index], of_factor, *factors[index + 1 :]]))
        result = sum(parts)
        assert isinstance(result, Tensor)
        return result

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        return by_sequence(WeightedSum, 3, info.batch_size, in_dims, inputs)


def refuse_terms(call: Call) -> None:
    """Raise if derivatives other than the gradient are taken through terms of the scores.

    Raises:
        NotImplementedError: the scores have a cap or a bias.
    """
    if call.has_terms:
        raise NotImplementedError(
            "scores with a softcap, slopes, distance_bias or key_bias have gradients, but no second or forward-mode "
            'derivatives: attend with impl="reference", which is dense, or leave these terms out (sinks have all)'
        )


def _saved(tensors: Sequence[Any], options: Sequence[Any]) -> tuple[Tensor, Tensor | None, Call, list[Factor]]:
    lse, values, *rest = tensors
    return lse, values, Call(*rest[:NUM_TENSORS], *options), factors_of(rest[NUM_TENSORS:])


def by_sequence(
    function: type[Function], before: int, size: int, in_dims: tuple[int | None, ...], inputs: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Batching rule: ``function`` over ``size`` calls as one call over more sequences.

    Operands without a batch dimension (document boundaries, the dropout seed, which counts the sequences) have fewer
    than two dimensions. If one of them differs between the calls, or dropout is on, the calls run one after another;
    so they do with a bias by distance. ``before``: number of inputs before those of the call.
    """
    tensors = [(x, dim) for x, dim in zip(inputs, in_dims, strict=True) if isinstance(x, Tensor)]
    has_distance_bias = inputs[before + Call._fields.index("distance_bias")] is not None
    if has_distance_bias or any(
        x.dim() - (dim is not None) == 0 or (x.dim() == 2 and dim is not None) for x, dim in tensors
    ):
        results = [
            function.apply(
                *(
                    x.select(dim, number) if isinstance(x, Tensor) and dim is not None else x
                    for x, dim in zip(inputs, in_dims, strict=True)
                )
            )
            for number in range(size)
        ]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])

    def whole(x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor) or x.dim() == 1:
            return x
        return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    results = function.apply(*(whole(x, dim) for x, dim in zip(inputs, in_dims, strict=True)))
    if isinstance(results, Tensor):
        return results.unflatten(0, (size, -1)), 0
    return tuple(x.unflatten(0, (size, -1)) for x in results), (0,) * len(results)


def less(factor: Factor | None, number: Tensor, ones: Tensor) -> Factor:
    """The factor minus one number per query ``[B, N, H]``."""
    factor = factor or Factor(None, None)
    return Factor(_joined([factor.left, -number.unsqueeze(-1)]), _joined([factor.right, ones]), factor.gates)


def moved_scores(call: Call, moved: Tangents) -> Factor | None:
    """The tangent of the scores; None if it is zero."""
    assert call.scale is not None
    left, moved_left = (None if x is None else call.scale * x.to(call.dtype) for x in (call.query, moved.query))
    return tangent_of(Factor(left, call.key), Factor(moved_left, moved.key, moved.log_gates))


def tangent_of(factor: Factor, moved: Factor) -> Factor | None:
    """The tangent of a factor, given those of its terms; None if it is zero."""
    lefts = [moved.left, None if moved.right is None else factor.left]
    rights = [None if moved.left is None else factor.right, moved.right]
    found = Factor(_joined(lefts), _joined(rights), moved.gates)
    return None if found.left is None and found.gates is None else found


def _joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
    some = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(some, dim=-1) if len(some) > 1 else (some[0] if some else None)


def ones_of(key: Tensor) -> Tensor:
    return torch.ones_like(key[..., :1])


def weighted_sum(axis: Axis, call: Call, lse: Tensor, values: Tensor | None, factors: Sequence[Factor]) -> Tensor:
    """The sum of P times the factors, in the accumulation dtype; with dropout if ``call`` has a seed.

    ``values``: key values for a sum per query, query values for a sum per key, None for a sum per block.
    """
    flat = [tensor for factor in factors for tensor in factor]
    result: Tensor = WeightedSum.apply(axis, lse, values, *call._replace(value=call.key), *flat)
    return result


def factors_of(flat: Sequence[Any]) -> list[Factor]:
    return [Factor(*flat[start : start + 3]) for start in range(0, len(flat), 3)]
