"""The sum of one tensor per rank, on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .communicator import Communicator
from .first_derivative import first_derivative, refuse_other_derivatives


@torch.compiler.disable
def sum_over_ranks(tensor: Tensor, communicator: Communicator) -> Tensor:
    """The sum of the ranks' equally shaped tensors, with the same bits on every rank.

    Its backward pass adds up the gradients of all ranks' results, so it needs every rank.

    Raises:
        NotImplementedError: derivatives other than the gradient are requested.
        RankFailure: the ranks' calls differ, or a rank died or does not respond.
    """
    refuse_other_derivatives(tensor)
    number = communicator.agree({"call": "sum", "shape": [*tensor.shape], "dtype": tensor.dtype})
    return _Sum.apply(tensor, communicator, 2 * number)


class _Sum(torch.autograd.Function):
    """See :func:`sum_over_ranks`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, communicator: Communicator, tag: int) -> Tensor:
        ctx.communicator, ctx.tag = communicator, tag
        return communicator.all_gather(tensor, tag=tag).sum(dim=0)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.communicator.all_gather(grad, tag=ctx.tag + 1).sum(dim=0), None, None
