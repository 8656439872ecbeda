"""A token embedding and an output matrix that may be one parameter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from .blocks import Block
from .config import LongNetConfig


class TokenModel(nn.Module):
    """A model with a token ``embedding`` and an output matrix ``head``; one parameter with ``tie_embeddings``.

    The two stay one parameter where PyTorch would give each module its own: in ``to_empty``, in conversions that
    replace parameters, and in ``load_state_dict(assign=True)``. A state dict holds the weight under both names, as
    those of transformers do; one without ``head.weight`` loads as well.
    """

    config: LongNetConfig
    embedding: nn.Embedding
    blocks: nn.ModuleList
    layernorm: nn.LayerNorm
    head: nn.Linear

    def _make_head(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        width, vocab_size, is_tied = self.config.embed_dim, self.config.vocab_size, self.config.tie_embeddings
        self.head = nn.Linear(width, vocab_size, bias=False, device="meta" if is_tied else device, dtype=dtype)
        if is_tied:
            self.head.weight = self.embedding.weight
        self.reset_embeddings()

    def reset_parameters(self) -> None:
        """Draw every parameter anew, as when the model was made."""
        self.reset_embeddings()
        for block in self.blocks:
            assert isinstance(block, Block)
            block.reset_parameters()
        self.layernorm.reset_parameters()

    def reset_embeddings(self) -> None:
        """Initialise embedding and output matrix with rows of expected squared norm 1.

        As output matrix they give logits of variance 1. As embedding they are scaled by ``sqrt(E)``, so that a token
        enters the residual stream with the variance of a block's update.
        """
        std = 1.0 / math.sqrt(self.config.embed_dim)
        nn.init.normal_(self.embedding.weight, std=std)
        if isinstance(self.head, nn.Linear) and not self._is_tied():  # LongNetModel has no output matrix
            nn.init.normal_(self.head.weight, std=std)

    def _is_tied(self) -> bool:
        # Pruning, parametrizations and adapters move a module's parameter to another name or module.
        table = self.embedding._parameters.get("weight")
        return table is not None and self.head._parameters.get("weight") is table

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        was_tied = self._is_tied()
        super()._apply(fn, recurse)
        if was_tied:
            self.head.weight = self.embedding.weight
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        names = [f"{prefix}{module}.weight" for module in ("embedding", "head")]
        if self._is_tied() and names[0] in state_dict:
            table = state_dict[names[0]]
            head = state_dict.get(names[1], table)
            if table.shape == self.embedding.weight.shape and not _is_same(head, table):
                error_msgs.append(
                    f"{names[1]} differs from {names[0]}, but they are one parameter of this model: build it with "
                    "tie_embeddings=False"
                )
            if local_metadata.get("assign_to_params_buffers") and not isinstance(table, nn.Parameter):
                table = nn.Parameter(table, requires_grad=self.embedding.weight.requires_grad)
            if head.shape == table.shape:
                state_dict.update(dict.fromkeys(names, table))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _is_same(head: Tensor, table: Tensor) -> bool:
    """Whether two weights are equal in the less precise of their dtypes, as far as values are known.

    Weights of different shapes are left to the error of their sizes.
    """
    if head is table or head.is_meta or table.is_meta or head.shape != table.shape:
        return True
    dtype = min(head.dtype, table.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(head.to(dtype), table.to(dtype))
