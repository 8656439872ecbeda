"""Checks that only first derivatives are taken of functions over several ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.ops.derivatives import is_transformed

_REFUSAL = (
    "attention over several ranks has a gradient and no other derivative: got {got}; compute it in one process "
    "(dilated_attention_pytorch.attend has derivatives of every order), on a sequence that fits there"
)


def refuse_other_derivatives(*tensors: Tensor | None) -> None:
    """Raise if derivatives other than the gradient are requested, before any communication.

    Raises:
        NotImplementedError: a tensor has a tangent, or a ``torch.func`` transform is active.
    """
    if is_transformed(*tensors):
        raise NotImplementedError(_REFUSAL.format(got="forward-mode tangents or a transform of torch.func"))


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a backward pass to raise, when it runs, if it is itself differentiated."""

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(_REFUSAL.format(got="create_graph=True, for a second one"))
        return backward(ctx, *grads)

    return checked
