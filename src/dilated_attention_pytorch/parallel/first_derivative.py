"""Functions of several ranks have their gradient, and no other derivative: those would need exchanges of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.ops.derivatives import is_transformed

_REFUSAL = (
    "over several ranks there is the gradient and no other derivative: got {got}; compute it in one process "
    "(dilated_attention_pytorch.attend has derivatives of every order), on a sequence that fits there"
)


def refuse_other_derivatives(*tensors: Tensor | None) -> None:
    """Raise where more than the gradient is asked for, before ranks exchange anything.

    Raises:
        NotImplementedError: a tensor has a tangent, or a transform of ``torch.func`` is under way.
    """
    if is_transformed(*tensors):
        raise NotImplementedError(_REFUSAL.format(got="forward-mode tangents or a transform of torch.func"))


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass that refuses to be differentiated in its turn, when it is run and not afterwards."""

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(_REFUSAL.format(got="create_graph=True, for a second one"))
        return backward(ctx, *grads)

    return checked
