"""Modules and models have the derivatives that attention has: forward, and of second order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp

from dilated_attention_pytorch import MultiheadDilatedAttention
from dilated_attention_pytorch.models import LongNetLM
from dilated_attention_pytorch.nn import AdaptiveBlockAttention, DilatedAttention
from dilated_attention_pytorch.patterns import local_window
from models.wrapping import config

# PyTorch scripts functions of its own when first asked for a tangent.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

Parameters = dict[str, Tensor]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def attention() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Parameters that are projected to query, key and value."""
    q, k, v = draw(1, 19, 4, 5), draw(1, 19, 2, 5), draw(1, 19, 2, 5)
    module = nn.ModuleDict({"scale": nn.Linear(5, 5, dtype=torch.float64), "attention": DilatedAttention([7], [2])})
    return module, lambda m: m["attention"](*(m["scale"](x) for x in (q, k, v)), is_causal=True)


def multihead() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    x, padding = draw(2, 19, 12), torch.arange(19).expand(2, 19) > 15
    module = MultiheadDilatedAttention(12, 4, [5, 16], [1, 3], dtype=torch.float64)
    return module, lambda m: m(x, x, x, key_padding_mask=padding)[0]


def adaptive() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """The tangents of the gates are those of the scorer's parameters."""
    q, k, v = draw(1, 40, 4, 5), draw(1, 40, 2, 5), draw(1, 40, 2, 5)
    module = AdaptiveBlockAttention(
        4,
        5,
        num_kv_heads=2,
        block_size=8,
        blocks_per_query=3,
        scorer_dim=4,
        pattern=local_window(3),
        dtype=torch.float64,
    )
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module, lambda m: m(q, k, v, True)


def model() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """With rows that begin and end with padding, which are computed run by run."""
    ids, mask = torch.randint(29, (2, 19)), torch.ones(2, 19, dtype=torch.bool)
    mask[1, :6] = False
    return LongNetLM(config()).double(), lambda m: m(ids, attention_mask=mask)[mask]


CASES = {
    "DilatedAttention": attention,
    "MultiheadDilatedAttention": multihead,
    "AdaptiveBlockAttention": adaptive,
    "LongNetLM": model,
}


class _Loss(nn.Module):
    def __init__(self, module: nn.Module, compute: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.module, self.compute = module, compute

    def forward(self) -> Tensor:
        return self.compute(self.module).sin().sum()


@pytest.mark.parametrize("case", CASES)
def test_tangents_and_curvature_are_those_of_the_gradient(case: str) -> None:
    """The tangent is the gradient times the direction; of the second derivative, central differences of gradients."""
    module = _Loss(*CASES[case]())
    point = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    direction = {name: torch.randn_like(x) for name, x in point.items()}

    def loss(parameters: Parameters) -> Tensor:
        return functional_call(module, parameters, ())

    def moved(step: float) -> Parameters:
        return {name: x + step * direction[name] for name, x in point.items()}

    def times_direction(gradient: Parameters) -> Tensor:
        return sum(((x * direction[name]).sum() for name, x in gradient.items()), start=torch.zeros(()))

    gradient = grad(loss)(point)
    _, tangent = jvp(loss, (point,), (direction,))
    torch.testing.assert_close(tangent, times_direction(gradient), rtol=1e-9, atol=1e-9)
    _, forward_over_reverse = jvp(grad(loss), (point,), (direction,))
    leaves = {name: x.clone().requires_grad_() for name, x in point.items()}
    graph = torch.autograd.grad(loss(leaves), list(leaves.values()), create_graph=True)
    along = times_direction(dict(zip(leaves, graph, strict=True)))
    reverse_over_reverse = torch.autograd.grad(along, list(leaves.values()))
    step = 3e-6
    after, before = grad(loss)(moved(step)), grad(loss)(moved(-step))
    assert max(float(x.abs().max()) for x in forward_over_reverse.values()) > 1e-3
    for name, second in zip(leaves, reverse_over_reverse, strict=True):
        torch.testing.assert_close(forward_over_reverse[name], second, rtol=1e-8, atol=1e-8, msg=name)
        numerical = (after[name] - before[name]) / (2 * step)
        torch.testing.assert_close(second, numerical, rtol=1e-4, atol=1e-5, msg=name)
