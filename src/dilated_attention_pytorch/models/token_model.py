"""A stack of blocks after a token embedding, and an output matrix that may be one parameter with it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch.patterns import Pattern

from .blocks import LongNetBlock
from .config import LongNetConfig
from .rotary import position_terms


class BlockStack(nn.Module):
    """A token ``embedding``, ``blocks`` with the positions of their rows, and the LayerNorm after the last block."""

    config: LongNetConfig
    embedding: nn.Embedding | None

    def _make_stack(
        self,
        config: LongNetConfig,
        blocks: Iterable[LongNetBlock],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        *,
        has_embedding: bool = True,
    ) -> None:
        """Make the modules; ``blocks`` may be a generator, so that parameters are drawn in the order of the modules."""
        self.config = config
        self.patterns: tuple[Pattern, ...] = tuple(config.pattern(layer) for layer in range(config.num_layers))
        self.gradient_checkpointing = config.gradient_checkpointing
        self.checkpoint_function: Callable[..., Tensor] = functools.partial(checkpoint, use_reentrant=False)
        self.embedding = None
        if has_embedding:
            self.embedding = nn.Embedding(config.vocab_size, config.embed_dim, device=device, dtype=dtype)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(blocks)
        self.layernorm = nn.LayerNorm(config.embed_dim, eps=config.layernorm_eps, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw every parameter again, as when the model was made."""
        self.reset_embeddings()
        for block in self.blocks:
            assert isinstance(block, LongNetBlock)
            block.reset_parameters()
        self.layernorm.reset_parameters()

    def reset_embeddings(self) -> None:
        """Initialise the embedding with rows of expected squared norm 1.

        They are scaled by ``sqrt(E)``, so that a token enters the residual stream with the variance of a block's
        update.
        """
        if self.embedding is not None:
            nn.init.normal_(self.embedding.weight, std=1.0 / math.sqrt(self.config.embed_dim))

    def _through_blocks(self, x: Tensor, positions: Tensor, *operands: object) -> Tensor:
        """The last block's output after the LayerNorm, ``[B, N, E]``, of embedded rows at ``positions``.

        ``operands`` are those of a block after the rows and the terms of their positions.
        """
        config, head_dim = self.config, self.config.embed_dim // self.config.num_heads
        x = self.dropout(x)
        kinds = [(config.rope_theta_of(layer), config.scale_length_of(layer)) for layer in range(config.num_layers)]
        terms = {kind: position_terms(positions, head_dim, *kind, x.dtype) for kind in dict.fromkeys(kinds)}
        recomputes = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        for layer, (block, kind) in enumerate(zip(self.blocks, kinds, strict=True)):
            if recomputes and config.is_recomputed(layer):
                x = self.checkpoint_function(block, x, terms[kind], *operands)
            else:
                x = block(x, terms[kind], *operands)
        return self.layernorm(x)


class TokenModel(BlockStack):
    """A model with a token ``embedding`` and an output matrix ``head``; one parameter with ``tie_embeddings``.

    The two stay one parameter where PyTorch would give each module its own: in ``to_empty``, in conversions that
    replace parameters, and in ``load_state_dict(assign=True)``. A state dict holds the weight under both names, as
    those of transformers do; one without ``head.weight`` loads as well.
    """

    embedding: nn.Embedding
    head: nn.Linear

    def _make_head(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        width, vocab_size, is_tied = self.config.embed_dim, self.config.vocab_size, self.config.tie_embeddings
        self.head = nn.Linear(width, vocab_size, bias=False, device="meta" if is_tied else device, dtype=dtype)
        if is_tied:
            self.head.weight = self.embedding.weight
        self.reset_embeddings()

    def reset_embeddings(self) -> None:
        """Initialise embedding and output matrix with rows of expected squared norm 1; logits then have variance 1."""
        super().reset_embeddings()
        if isinstance(self.head, nn.Linear) and not self._is_tied():  # LongNetModel has no output matrix
            nn.init.normal_(self.head.weight, std=1.0 / math.sqrt(self.config.embed_dim))

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
