"""The product with a weight that is kept elsewhere."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class Product(nn.Module):
    """``x @ weight.T + bias`` of weights that another module keeps.

    A module of its own, so that a plan of `torch.distributed.tensor.parallel` can say where ``x`` and the result lie.
    """

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``[..., in]`` to ``[..., out]``; see :func:`torch.nn.functional.linear`."""
        return functional.linear(x, weight, bias)
