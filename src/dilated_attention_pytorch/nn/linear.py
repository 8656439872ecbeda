"""Linear layers whose large float32 products on a CPU take the faster of PyTorch's two routes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dilated_attention_pytorch.kernels.measured_choice import MeasuredChoice, measured_choice
from dilated_attention_pytorch.ops.derivatives import needs_dispatcher

VARIABLE = "DILATED_ATTENTION_LINEAR"
_FEWEST_ROWS = 1024
"""With fewer rows, a convolution spends its advantage on bringing the weight into its own layout."""
_LEAST_WIDTH = 256
"""Narrower products are outside the sizes that the measurement speaks for."""
_MEASURED_WIDTH = 768
"""Width of the measured product, on both sides; it has the fewest rows, and a convolution gains more from larger ones.
"""
_TOLERANCE = 1e-5
"""Relative to the largest number: sums of 1,024 products in float32, in another order, differ by about 1e-6."""
_EXACT = {"none", "ieee"}
"""Settings under which float32 products are computed in float32."""
_OWN_LINEAR = functional.linear
"""PyTorch's function, which DeepSpeed replaces where it divides weights among ranks."""


def project(layer: nn.Module, x: Tensor) -> Tensor:
    """``layer(x)``; for an ``nn.Linear`` without hooks on the route of :class:`Linear`.

    The layers of this package's models stay ``nn.Linear`` itself, since libraries that quantise models, such as
    bitsandbytes in transformers, replace layers of exactly this class.
    """
    if type(layer) is nn.Linear and _may_convolve(x, layer.weight, layer.bias) and not _is_hooked(layer):
        return _product(x, layer.weight, layer.bias)
    output: Tensor = layer(x)
    return output


class Linear(nn.Linear):
    """``x @ weight.T + bias``: :class:`torch.nn.Linear`, with the faster of two routes for large products.

    A product of at least 1,024 rows with float32 CPU tensors, 256 or more wide on both sides, is either
    ``functional.linear`` or a 1 x 1 convolution over the same memory: PyTorch computes the first by MKL and the second
    by oneDNN. The first such product of a process chooses, see :func:`linear_choice`. Other dtypes, devices, tensor
    subclasses, autocast, compilers, tracers and function transforms take ``functional.linear``.

    :func:`adopt` with ``fast_linear=True`` makes this the class of a model's linear layers. Tools that look for the
    class ``nn.Linear`` itself pass over this subclass.

    >>> from dilated_attention_pytorch.nn import Linear
    >>> Linear(64, 48)(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 48])
    """

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        weight, bias = self.weight, self.bias
        if _may_convolve(input, weight, bias):
            return _product(input, weight, bias)
        return functional.linear(input, weight, bias)


@functools.cache
def linear_choice(threads: int) -> MeasuredChoice:
    """The route of large float32 products on this CPU with this number of threads: "linear" or "convolution".

    ``DILATED_ATTENTION_LINEAR`` names it; otherwise it is measured once, in half a second, and kept, see
    :func:`measured_choice`. Random numbers are not drawn.

    Raises:
        ValueError: the variable names neither.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked in ROUTES:
        return MeasuredChoice(asked, {})
    if asked:
        raise ValueError(f"{VARIABLE} must be linear or convolution, got {asked!r}; without it the faster one is used")
    rows, width = _FEWEST_ROWS, _MEASURED_WIDTH
    # The call that measures may be in any state; an outer hook must not see these tensors.
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    ):
        generator = torch.Generator().manual_seed(0)
        shapes = ((rows, width), (width, width), (width,), (rows, width))
        *operands, grad = (torch.randn(s, generator=generator, dtype=torch.float32, device="cpu") for s in shapes)
        for operand in operands:
            operand.requires_grad_()

        def routine(name: str) -> tuple[Tensor, ...]:
            out = ROUTES[name](*operands)
            return out.detach(), *torch.autograd.grad(out, operands, grad)

        return measured_choice(
            "linear",
            {name: functools.partial(routine, name) for name in ROUTES},
            operations=6 * rows * width * width,
            tolerance=_TOLERANCE,
            threads=threads,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return ROUTES[linear_choice(torch.get_num_threads()).name](x, weight, bias)


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``functional.linear`` of contiguous rows as a convolution, over views of the same memory (channels last)."""
    width_out, width_in = weight.shape
    pixels = x.view(1, -1, 1, width_in).permute(0, 3, 1, 2)
    out = functional.conv2d(pixels, weight[:, :, None, None], bias)
    # Not a view: FSDP warns of a module that returns one.
    return torch.ops.aten._unsafe_view(out.permute(0, 2, 3, 1).contiguous(), (*x.shape[:-1], width_out))


ROUTES: dict[str, Callable[..., Tensor]] = {"linear": functional.linear, "convolution": _convolution}
"""The usual one first."""


def _is_hooked(layer: nn.Module) -> bool:
    """Whether a call of the layer does more than its class's forward, or another forward."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(hooks) or "forward" in layer.__dict__ or torch.nn.modules.module._has_any_global_hook()


def _may_convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a product is large, in plain float32 on the CPU, and observed by autograd alone."""
    # First: the compiler and its symbolic sizes.
    if torch.compiler.is_compiling() or weight.dim() != 2 or min(weight.shape) < _LEAST_WIDTH:
        return False
    if x.shape[-1] != weight.shape[1] or x.numel() < _FEWEST_ROWS * weight.shape[1]:
        return False
    operands = (x, weight) if bias is None else (x, weight, bias)
    one_dnn: Any = torch.backends.mkldnn
    return (
        all(operand.dtype == torch.float32 and operand.is_cpu for operand in operands)
        and x.is_contiguous()
        and weight.is_contiguous()
        and not needs_dispatcher(*operands, is_named=False)
        and not torch.is_autocast_enabled("cpu")
        and functional.linear is _OWN_LINEAR
        and bool(one_dnn.enabled)
        and {one_dnn.matmul.fp32_precision, one_dnn.conv.fp32_precision} <= _EXACT
    )
