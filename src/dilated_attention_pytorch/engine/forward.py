"""Forward pass of partials: their results are merged or summed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels import native, products
from dilated_attention_pytorch.kernels import partial as kernels
from dilated_attention_pytorch.kernels.products import LOG2_E, Result
from dilated_attention_pytorch.planning.geometry import Partial

from .merge import merge_in_place
from .operands import Operand, Operands, Role, Rows
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


def add_weighted(
    work: Work,
    total: Tensor,
    lse: Tensor,
    rest: Tensor | None,
    values: Tensor,
    factors: Sequence[tuple[Tensor, Tensor]],
    *,
    of_keys: bool,
) -> None:
    """Add ``sum_t P[p, t] f[p, t] values[t]`` over the partials, see :func:`.products.weighted_sum`.

    ``total`` is indexed by query, or by key with ``of_keys``; ``values`` then belong to the queries. Factors are
    ``left [B, N, H, width]`` and ``right [B, M, G, width]``.
    """
    by_query, by_key = Rows.QUERY, work.rows_of_keys
    operands = {
        **work.operands(),
        "lse": Operand(lse),
        "values": Operand(values, by_query if of_keys else by_key),
        "total": Operand(total, by_key if of_keys else by_query, Role.ADDED_TO),
    }
    if rest is not None:
        operands["rest"] = Operand(rest)
    for index, (left, right) in enumerate(factors):
        operands["left", index], operands["right", index] = Operand(left), Operand(right, by_key)
    for partial in work.partials:
        if is_zero_padding(partial):
            continue
        for views in work.views(partial, operands):
            part = products.weighted_sum(
                views["query"],
                views["key"],
                views["lse"],
                views.get("rest"),
                views["values"],
                [(views["left", index], views["right", index], None) for index in range(len(factors))],
                work.bias(partial, views),
                work.keep_factors(views),
                is_causal=is_causal(partial),
                scale=work.scale,
                of_keys=of_keys,
            )
            views.add("total", part)
