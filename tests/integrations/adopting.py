"""What the tests of adopted layers share: layers of ours, what they compute, and how it is compared."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.integrations import AdoptedDilatedAttention, adopt
from integrations.torchscale_layer import DilatedAttention


def adopted(theirs: DilatedAttention, **options: Any) -> AdoptedDilatedAttention:
    """A layer of ours with copies of their parameters."""
    ours = adopt(copy.deepcopy(theirs), **options)
    assert isinstance(ours, AdoptedDilatedAttention)
    return ours


def results(attention: nn.Module, x: Tensor, grad_out: Tensor, **options: Any) -> list[Tensor]:
    """Output, gradient of the input, and gradients of the parameters by name."""
    x = x.clone().requires_grad_()
    out, weights = attention(x, x, x, **options)
    assert weights is None
    parameters = [parameter for _, parameter in sorted(attention.named_parameters())]
    return [out, *torch.autograd.grad(out, [x, *parameters], grad_out)]


def assert_equal(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-10) -> None:
    """Equal to ``tolerance``, times the largest number where that is more than 1."""
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(1.0, float(b.detach().abs().max())))


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
