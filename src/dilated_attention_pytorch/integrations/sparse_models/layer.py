"""What the replaced layers of all families share."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from dilated_attention_pytorch.integrations.parts import check_parts
from dilated_attention_pytorch.patterns import DilatedPattern


class SparseLayer(nn.Module):
    """The submodule objects of a layer that is replaced, under their names and in their order.

    Args:
        replaced: the layer.
        parts: names of the submodules that it may have.
        num_heads: number of heads.
        dropout: probability of dropping an attention probability in training.

    Raises:
        NotReplaceable: it has unknown parts or hooks.
    """

    def __init__(self, replaced: Any, parts: Collection[str], *, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        check_parts(replaced, set(parts), set())
        for name, part in replaced.named_children():
            self.add_module(name, part)
        self.num_heads = num_heads
        self.dropout = dropout
        self.training = replaced.training

    @property
    def dropout_p(self) -> float:
        """The dropout of a call."""
        return self.dropout if self.training else 0.0

    def heads(self, project: nn.Module, states: Tensor) -> Tensor:
        """``[B, N, H, D]`` of the states ``[B, N, E]``."""
        projected: Tensor = project(states)
        return projected.unflatten(-1, (self.num_heads, -1))


def every_pair(*lengths: int) -> DilatedPattern:
    """The pattern in which every query of a call sees every key."""
    return DilatedPattern([max(lengths)], [1])


def check_no_weights(layer: str, output_attentions: bool | None) -> None:
    """Raise NotImplementedError if attention weights are requested."""
    if output_attentions:
        raise NotImplementedError(
            f"output_attentions must be False: the weights are never formed in a replaced {layer}, got "
            f"{output_attentions!r}; use the model as it was before replace_sparse_attention to read weights"
        )
