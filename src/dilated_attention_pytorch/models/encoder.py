"""The bidirectional LongNet encoder."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dilated_attention_pytorch.ops import attend

from .blocks import LayerAttention, LongNetBlock
from .config import LongNetConfig, check_config
from .longnet import document_positions, tokens_of
from .padding import Run, attend_runs, check_rows_are_real, positions_of, real_runs
from .token_model import BlockStack


class LongNetEncoder(BlockStack):
    """Bidirectional encoder: embedding, L blocks with attention under a pattern, LayerNorm.

    The blocks of :class:`LongNetLM` (LongNet, arXiv 2307.02486, with MAGNETO's sub-LayerNorms, arXiv 2210.06423)
    without the causal mask: a position attends to all keys of its layer's pattern, before and after it.

    Args:
        config: sizes and options; ``vocab_size`` is that of the embedding. There is no output matrix, so
            ``tie_embeddings`` must stay True.
        has_embedding: whether there is a token embedding; without it the encoder takes only ``inputs_embeds``.
        gain: Xavier gain of MAGNETO's matrices; None = ``sqrt(log(2 L))`` for an encoder-only model.
        device, dtype: of the parameters.

    Raises:
        ValueError: ``tie_embeddings`` is False.
        NotImplementedError: the configuration has a field of a causal model, see :func:`check_causal_fields`.

    >>> from dilated_attention_pytorch.models import LongNetConfig, LongNetEncoder
    >>> encoder = LongNetEncoder(LongNetConfig(
    ...     embed_dim=32, num_layers=2, num_heads=4, segment_lengths=[16, 64], dilation_rates=[1, 4]
    ... ))
    >>> encoder(torch.randint(256, (2, 100))).shape
    torch.Size([2, 100, 32])
    """

    def __init__(
        self,
        config: LongNetConfig,
        *,
        has_embedding: bool = True,
        gain: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_config("config", config)
        if not config.tie_embeddings:
            raise ValueError("an encoder has no output matrix: leave tie_embeddings at True, got False")
        check_causal_fields(config, "layer_scale_lengths")
        blocks = (
            LongNetBlock(config, layer, gain=gain, device=device, dtype=dtype) for layer in range(config.num_layers)
        )
        self._make_stack(config, blocks, device, dtype, has_embedding=has_embedding)
        self.reset_embeddings()

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """The output of the last block after the final LayerNorm.

        Args:
            input_ids: integer ``[B, N]``, or None with ``inputs_embeds``.
            inputs_embeds: ``[B, N, E]`` instead of token embeddings, used as they are, unlike those of
                :class:`LongNetLM`; token embeddings are multiplied by ``sqrt(E)``.
            attention_mask: ``[B, N]``, 1 = real. The ones of a row must be contiguous: padding before, after, or both.
                Positions count from a row's first real token, so a padded row gives the same result as it does alone.
            cu_seqlens: int32 ``[documents + 1]`` boundaries of packed documents, see :func:`attend`.

        Returns:
            hidden states ``[B, N, E]``, 0 at padding.

        Raises:
            TypeError, ValueError: arguments of the wrong type or shape, both or neither of tokens and embeddings, or a
                row without real tokens.
            NotImplementedError: a mask with holes, or padding together with packed documents.
        """
        x = self._embedded(input_ids, inputs_embeds)
        rows = x.shape[1]
        runs = runs_of(attention_mask, x.shape[:2], "attention_mask")
        if runs is not None and cu_seqlens is not None:
            raise NotImplementedError(
                "attention_mask and cu_seqlens exclude each other: packed documents have no padding; pass one of them"
            )
        if runs is None:
            positions = document_positions(rows, cu_seqlens, x.device)
        else:
            positions = positions_of(runs, rows, [0] * len(runs), x.device)
        attend_layer: LayerAttention = functools.partial(self._attend, runs, cu_seqlens)
        x = self._through_blocks(x, positions, attend_layer)
        if runs is None:
            return x
        return x.masked_fill(~attention_mask.bool().unsqueeze(-1), 0.0)  # type: ignore[union-attr]

    def _embedded(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        tokens = tokens_of(input_ids, inputs_embeds, self.config.embed_dim)
        if inputs_embeds is not None:
            return inputs_embeds
        if self.embedding is None:
            raise ValueError(
                "this encoder was made without a token embedding (has_embedding=False): pass inputs_embeds, got "
                "input_ids"
            )
        return self.embedding(tokens) * math.sqrt(self.config.embed_dim)

    def _attend(
        self,
        runs: Sequence[Run] | None,
        cu_seqlens: Tensor | None,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float,
    ) -> Tensor:
        attend_rows = functools.partial(
            attend, pattern=self.patterns[layer], cu_seqlens=cu_seqlens, dropout_p=dropout_p, heads_first=False
        )
        return attend_runs(attend_rows, query, key, value, runs, runs)


def check_causal_fields(config: LongNetConfig, *more: str) -> None:
    """Raise NotImplementedError if a field is set that only causal language models support: ``shifted_keys``,
    ``key_convolution`` or one of ``more``."""
    for name in ("shifted_keys", "key_convolution", *more):
        value, default = getattr(config, name), LongNetConfig.__dataclass_fields__[name].default
        if value != default:
            raise NotImplementedError(
                f"{name} is supported by the causal LongNetLM only: leave it at {default} in an encoder and in a "
                f"decoder that attends to one, got {value}"
            )


def runs_of(mask: Tensor | None, shape: Sequence[int], name: str) -> list[Run] | None:
    """The column range of real tokens of every row; None if all tokens are real.

    Raises:
        NotImplementedError: the mask has holes.
        ValueError: the mask has the wrong shape, or a row has no real token.
    """
    if mask is None:
        return None
    if tuple(mask.shape) != tuple(shape):
        raise ValueError(f"{name} must have the shape {tuple(shape)} of what it masks, got {tuple(mask.shape)}")
    runs = real_runs(mask)
    check_rows_are_real(runs, name)
    return None if all(run == (0, shape[1]) for run in runs) else runs
