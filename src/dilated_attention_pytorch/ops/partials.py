"""The passes over partials: attention that is merged, gradients and weighted sums that are added."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels import native, products
from dilated_attention_pytorch.kernels import partial as kernels
from dilated_attention_pytorch.kernels.products import LOG2_E, Result
from dilated_attention_pytorch.planning.geometry import Partial

from .merge import merge_in_place
from .operands import Name, Operand, Operands, Role, Rows
from .views import PartialViews
from .work import Work, is_causal, is_zero_padding


def merge_partials(work: Work, out: Operand, lse: Tensor, rest: Tensor | None = None) -> None:
    """Merge the partials' attention into ``out`` and ``lse``; ``lse`` is -inf where nothing was merged yet.

    With ``rest``, ``(lse, rest)`` is a pair, see :class:`Result`.
    """
    merged_into: Operands = {"query": Operand(work.query), "out": out, "lse": Operand(lse, role=Role.MERGED_INTO)}
    if rest is not None:
        merged_into["rest"] = Operand(rest, role=Role.MERGED_INTO)
    operands: Operands = {}
    for partial in work.partials:
        if is_zero_padding(partial):
            assert isinstance(partial, Partial)
            for views in work.views(partial, merged_into):
                _merge_zero_pad_keys(views, partial.zero_pad_keys)
            continue
        kernel = work.kernel(partial, is_pair=rest is not None)
        if kernel == "native":
            of_out = native.Origin(out.first_row, out.first_head)
            native.merge_partial(partial, work.for_native(), out.tensor, lse, of_out=of_out)
            continue
        assert work.seen_rows is None, "only the native kernels read listed rows"
        operands = operands or {**work.operands(), **merged_into}
        for views in work.views(partial, operands):
            result = kernels.forward(
                kernel,
                views["query"],
                views["key"],
                views["value"],
                work.bias(partial, views),
                work.keep_factors(views),
                is_causal=is_causal(partial),
                scale=work.scale,
                is_pair=rest is not None,
            )
            if not partial.is_first:
                merge_in_place(views["out"], views["lse"], views.get("rest"), result)
                continue
            views.overwrite("out", result.out)
            views.overwrite("lse", result.lse)
            if result.rest is not None:
                views.overwrite("rest", result.rest)


def _merge_zero_pad_keys(views: PartialViews, count: int) -> None:
    """Merge keys of score 0 and value 0."""
    lse, rest = views["lse"], views.get("rest")
    of_keys = torch.full_like(lse, float(count)).log_()
    out = torch.zeros((), dtype=lse.dtype, device=lse.device)
    if rest is None:
        merge_in_place(views["out"], lse, None, Result(out, of_keys))
    else:
        merge_in_place(views["out"], lse, rest, Result(out, torch.zeros_like(rest), of_keys * LOG2_E))


def add_gradients(
    work: Work,
    grads: Sequence[Operand],
    grad_gates: Tensor | None,
    out: Tensor,
    lse: Tensor,
    rest: Tensor | None,
    grad_out: Tensor,
    grad_lse: Tensor | None,
) -> None:
    """Add the partials' gradients of query, key and value to ``grads``, and those of log-gates to ``grad_gates``.

    ``out [B, N, H, D]`` and ``lse [B, N, H]`` are merged over all partials of all calls; ``lse`` is +inf in rows
    without a key. With ``rest``, ``(lse, rest)`` is a pair, see :class:`.products.Result`. Sums are in the accumulation
    dtype.
    """
    names: tuple[Name, ...] = ("grad_query", "grad_key", "grad_value")
    own: Operands = {
        "out": Operand(out),
        "lse": Operand(lse, fill=float("inf")),
        "grad_out": Operand(grad_out),
        **dict(zip(names, grads, strict=True)),
    }
    if grad_gates is not None:
        own["grad_gates"] = Operand(grad_gates, Rows.BLOCKS, Role.ADDED_TO)
    if rest is not None:
        own["rest"] = Operand(rest)
    if grad_lse is not None:
        own["grad_lse"] = Operand(grad_lse)
    assert work.seen_rows is None, "rows of a cache are read without a gradient"
    operands: Operands = {}
    for partial in work.partials:
        if is_zero_padding(partial):
            continue
        kernel = work.kernel(partial, is_pair=rest is not None, has_lse_gradient=grad_lse is not None)
        if kernel == "native":
            native.add_gradients(
                partial,
                work.for_native(),
                native.Merged(out, lse, grad_out, grad_lse),
                [grad.tensor for grad in grads],
                grad_gates,
                of_grad_query=native.Origin(grads[0].first_row, grads[0].first_head),
                of_grad_keys=native.Origin(grads[1].first_row, grads[1].first_head),
            )
            continue
        operands = operands or {**work.operands(), **own}
        for views in work.views(partial, operands):
            *parts, of_bias = kernels.backward(
                kernel,
                views["grad_out"],
                views.get("grad_lse"),
                views["query"],
                views["key"],
                views["value"],
                views["out"],
                views["lse"],
                views.get("rest"),
                work.bias(partial, views),
                work.keep_factors(views),
                is_causal=is_causal(partial),
                scale=work.scale,
                needs_bias=grad_gates is not None,
            )
            for name, part in zip(names, parts, strict=True):
                assert part is not None
                views.add(name, part)
            if of_bias is not None:
                views.add("grad_gates", of_bias)


def add_weighted(
    work: Work,
    total: Tensor,
    lse: Tensor,
    rest: Tensor | None,
    values: Tensor | None,
    factors: Sequence[tuple[Tensor | None, Tensor | None, Tensor | None]],
    *,
    axis: str,
) -> None:
    """Add ``sum P f values`` over the partials to ``total``, see :func:`.tiles.weighted_sum` for the arguments."""
    by_key = work.rows_of_keys
    rows_of = {"queries": (Rows.QUERY, by_key), "keys": (by_key, Rows.QUERY), "blocks": (Rows.BLOCKS, Rows.QUERY)}
    of_total, of_values = rows_of[axis]
    operands = {
        **work.operands(),
        "lse": Operand(lse, fill=float("inf")),
        "total": Operand(total, of_total, Role.ADDED_TO),
    }
    if values is not None:
        operands["values"] = Operand(values, of_values)
    if rest is not None:
        operands["rest"] = Operand(rest)
    for index, (left, right, gates) in enumerate(factors):
        if left is not None and right is not None:
            operands["left", index], operands["right", index] = Operand(left), Operand(right, by_key)
        if gates is not None:
            operands["gates", index] = Operand(gates, Rows.BLOCKS)
    for partial in work.partials:
        if is_zero_padding(partial):
            continue
        for views in work.views(partial, operands):
            part = products.weighted_sum(
                views["query"],
                views["key"],
                views["lse"],
                views.get("rest"),
                views.get("values"),
                [
                    (views.get(("left", index)), views.get(("right", index)), views.get(("gates", index)))
                    for index in range(len(factors))
                ],
                work.bias(partial, views),
                work.keep_factors(views),
                is_causal=is_causal(partial),
                scale=work.scale,
                of_keys=axis != "queries",
            )
            views.add("total", part)
