"""A linear product with weights that another module owns."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class Product(nn.Module):
    """``x @ weight.T + bias`` with weights that another module owns.

    A module of its own, so that a `torch.distributed.tensor.parallel` plan can set its input and output placements.
    """

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``[..., in]`` to ``[..., out]``; see :func:`torch.nn.functional.linear`."""
        return functional.linear(x, weight, bias)
