"""Backward pass of partials: gradients under the merged output and log-sum-exp."""

from __future__ import annotations

from torch import Tensor

from dilated_attention_pytorch.kernels import native
from dilated_attention_pytorch.kernels import partial as kernels

from .operands import Name, Operand, Operands
from .work import Work, is_causal, is_zero_padding


def add_gradients(
    work: Work,
    grads: tuple[Operand, Operand, Operand],
    out: Tensor,
    lse: Tensor,
    rest: Tensor | None,
    grad_out: Tensor,
    grad_lse: Tensor | None,
) -> None:
    """Add the partials' gradients of query, key and value to ``grads``, in the accumulation dtype.

    ``out [B, N, H, D]`` and ``lse [B, N, H]`` are merged over all partials of all calls; ``lse`` is +inf in rows
    without a key. With ``rest``, ``(lse, rest)`` is a pair, see :class:`.products.Result`.
    """
    names: tuple[Name, ...] = ("grad_query", "grad_key", "grad_value")
    own: Operands = {"out": Operand(out), "lse": Operand(lse), "grad_out": Operand(grad_out)}
    own |= dict(zip(names, grads, strict=True))
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
            of_query, of_key, of_value = (grad.tensor for grad in grads)
            native.add_gradients(
                partial,
                work.for_native(),
                native.Merged(out, lse, grad_out, grad_lse),
                (of_query, of_key, of_value),
                of_grad_query=native.Origin(grads[0].first_row, grads[0].first_head),
                of_grad_keys=native.Origin(grads[1].first_row, grads[1].first_head),
            )
            continue
        operands = operands or {**work.operands(), **own}
        for views in work.views(partial, operands):
            parts = kernels.backward(
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
            )
            for name, part in zip(names, parts, strict=True):
                views.add(name, part)
