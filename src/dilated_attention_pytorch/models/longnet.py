"""LongNet: a decoder-only language model over dilated attention, in torch alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch.nn.product import Product
from dilated_attention_pytorch.ops import attend
from dilated_attention_pytorch.patterns import Pattern

from .blocks import Block, LayerAttention
from .config import LongNetConfig
from .padding import Run, group_rows, positions_of, real_runs
from .rotary import rotary

if TYPE_CHECKING:
    from .cache import CacheStep, LongNetCache, PromptStep


class AttentionFunction(Protocol):
    """What a model attends with: :func:`attend`, or a function of the same arguments for this rank's rows."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pattern: Pattern,
        *,
        is_causal: bool,
        cu_seqlens: Tensor | None,
        dropout_p: float,
    ) -> Tensor:
        """See :func:`attend`."""
        ...


class LongNetLM(nn.Module):
    """Decoder-only language model: embedding, L blocks with dilated attention, LayerNorm, output matrix.

    LongNet (Ding et al. 2023, arXiv 2307.02486) with MAGNETO's sub-LayerNorms and initialisation (arXiv 2210.06423),
    rotary positions, a gated or GELU feed-forward and grouped-query heads.

    Args:
        config: sizes and options.
        attention: the attention function, :func:`attend` without it. It gets every block's query, key, value and
            pattern, so that where the rows live is decided outside the model. May be set later: ``model.attention``.
        device, dtype: of the parameters.

    >>> from dilated_attention_pytorch.models import LongNetConfig, LongNetLM
    >>> config = LongNetConfig(
    ...     embed_dim=32, num_layers=2, num_heads=4, segment_lengths=[16, 64], dilation_rates=[1, 4]
    ... )
    >>> model = LongNetLM(config)
    >>> model(torch.randint(256, (2, 100))).shape
    torch.Size([2, 100, 256])
    """

    def __init__(
        self,
        config: LongNetConfig,
        *,
        attention: AttentionFunction = attend,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.attention = attention
        self.patterns: tuple[Pattern, ...] = tuple(config.pattern(layer) for layer in range(config.num_layers))
        self.gradient_checkpointing = config.gradient_checkpointing
        self.checkpoint_function: Callable[..., Tensor] = functools.partial(checkpoint, use_reentrant=False)
        self.embedding = nn.Embedding(config.vocab_size, config.embed_dim, device=device, dtype=dtype)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(config, layer, device=device, dtype=dtype) for layer in range(config.num_layers)
        )
        self.layernorm = nn.LayerNorm(config.embed_dim, eps=config.layernorm_eps, device=device, dtype=dtype)
        self.head = (
            None
            if config.tie_embeddings
            else nn.Linear(config.embed_dim, config.vocab_size, bias=False, device=device, dtype=dtype)
        )
        self.out_proj = Product()
        self.reset_embeddings()

    def reset_embeddings(self) -> None:
        """Rows of expected squared length 1 for the embedding and the output matrix.

        As the output matrix they give logits of variance 1; as the embedding they are scaled by ``sqrt(E)``, so that
        a token enters the residual stream at the variance of what a block adds and is not drowned by the first one.
        """
        std = 1.0 / math.sqrt(self.config.embed_dim)
        nn.init.normal_(self.embedding.weight, std=std)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=std)

    def forward(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: LongNetCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Logits ``[B, N, V]`` for the token after each position: ``output_matrix(hidden_states(...))``.

        Args:
            input_ids: integer ``[B, N]``.
            attention_mask: ``[B, N]``, 1 = real. Every row's ones must be one run: padding before, after, or both.
                Positions count from a row's first real token, so a padded row gives exactly what it gives alone.
                The logits of padding mean nothing. With a cache, columns before the last N are past and not read.
            cu_seqlens: int32 ``[documents + 1]`` boundaries of documents packed along every row, see :func:`attend`;
                positions restart in every document.
            cache: keys and values of what came before ``input_ids``, brought up to date by the call.
            positions: rotary positions ``[N]`` or ``[B, N]`` of the rows, for a model whose attention function
                knows where its rows lie; counted from the first real token, or from the beginning of the document,
                without it.

        Returns:
            logits ``[B, N, V]`` in the parameters' (or autocast's) dtype.

        Raises:
            TypeError, ValueError: arguments of the wrong type or shape.
            NotImplementedError: a mask with holes, or arguments that do not go together.
        """
        hidden = self.hidden_states(
            input_ids, attention_mask=attention_mask, cu_seqlens=cu_seqlens, cache=cache, positions=positions
        )
        return self.logits(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """The output matrix: ``[..., E]`` to ``[..., V]``."""
        return self.out_proj(hidden, self.embedding.weight if self.head is None else self.head.weight, None)

    def hidden_states(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: LongNetCache | None = None,
        positions: Tensor | None = None,
        sequence_length: int | None = None,
    ) -> Tensor:
        """The last block's output after the final LayerNorm, ``[B, N, E]``; arguments as in :meth:`forward`.

        With ``sequence_length``, ``input_ids`` are this rank's rows of so many tokens, the first of a text: the ranks
        that share ``cache`` read it together, each its rows, and each gets the result for them.
        """
        _check_inputs(input_ids, attention_mask, cu_seqlens, cache, positions, sequence_length)
        batch, rows = input_ids.shape
        runs = None if attention_mask is None else real_runs(attention_mask[:, attention_mask.shape[1] - rows :])
        attend_layer: LayerAttention
        if cache is not None:
            self._check_inference(cache)
            step: CacheStep | PromptStep
            if sequence_length is None:
                step = cache.step(batch, rows, runs, input_ids.device)
            else:
                step = cache.prompt_step(batch, rows, sequence_length, input_ids.device)
            positions, attend_layer = step.positions, step.attend
        elif runs is not None and any(run != (0, rows) for run in runs):
            _check_rows_are_real(runs)
            positions = positions_of(runs, rows, [0] * batch, input_ids.device)
            attend_layer = functools.partial(self._attend_runs, runs)
        else:
            if positions is None:
                positions = document_positions(rows, cu_seqlens, input_ids.device)
            attend_layer = functools.partial(self._attend, cu_seqlens)
        x = self.dropout(self.embedding(input_ids) * math.sqrt(self.config.embed_dim))
        turn = rotary(positions, self.config.embed_dim // self.config.num_heads, self.config.rope_theta, x.dtype)
        recomputes = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        for layer, block in enumerate(self.blocks):
            if recomputes and self.config.is_recomputed(layer):
                x = self.checkpoint_function(block, x, turn, attend_layer)
            else:
                x = block(x, turn, attend_layer)
        return self.layernorm(x)

    def _check_inference(self, cache: LongNetCache) -> None:
        # Before the cache takes anything, so that the same cache serves the corrected call.
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "a cache has no gradient: call the model under torch.no_grad(), or without a cache"
            )
        if cache.patterns != self.patterns or cache.num_kv_heads != self.config.num_kv_heads:
            raise ValueError(
                "the cache was made for a model with other layers, patterns or key/value heads; "
                "make it from this model's configuration: LongNetCache(model.config)"
            )
        if self.attention is not attend:
            raise NotImplementedError(
                "a cache attends by itself, so the attention function that this model was given would not be called: "
                "call the model without a cache, or set model.attention = attend before (ranks are what a cache's "
                "share is for)"
            )
        if self.training and self.config.attention_dropout:
            raise NotImplementedError("a cache is for inference, without attention dropout: call model.eval() first")

    def _attend(
        self, cu_seqlens: Tensor | None, layer: int, query: Tensor, key: Tensor, value: Tensor, dropout_p: float
    ) -> Tensor:
        return self.attention(
            query, key, value, self.patterns[layer], is_causal=True, cu_seqlens=cu_seqlens, dropout_p=dropout_p
        )

    def _attend_runs(
        self, runs: Sequence[Run], layer: int, query: Tensor, key: Tensor, value: Tensor, dropout_p: float
    ) -> Tensor:
        """Rows with the same run share one call on that run; padding attends to nothing."""
        out = torch.zeros_like(query)
        for (start, stop), members in group_rows(runs).items():
            rows = torch.tensor(members, device=query.device)
            q, k, v = (tensor[rows, start:stop] for tensor in (query, key, value))
            out[rows, start:stop] = self._attend(None, layer, q, k, v, dropout_p)
        return out


def document_positions(rows: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """Positions ``[N]`` that start at 0 in every document."""
    places = torch.arange(rows, device=device)
    if cu_seqlens is None:
        return places
    starts = cu_seqlens.to(device, torch.int64)
    return places - starts[torch.searchsorted(starts, places, right=True) - 1]


def _check_inputs(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    cache: LongNetCache | None,
    positions: Tensor | None,
    sequence_length: int | None,
) -> None:
    if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            "input_ids must be an int64 or int32 tensor [batch, sequence] of token numbers, "
            f"got {input_ids.dtype} of shape {tuple(input_ids.shape)}"
        )
    batch, rows = input_ids.shape
    if attention_mask is not None:
        shape = tuple(attention_mask.shape)
        if len(shape) != 2 or shape[0] != batch or shape[1] < rows or (cache is None and shape[1] != rows):
            raise ValueError(
                f"attention_mask must have the shape {(batch, rows)} of input_ids (with a cache it may begin earlier), "
                f"got {shape}"
            )
    together = {
        "attention_mask": attention_mask, "cache": cache, "positions": positions, "cu_seqlens": cu_seqlens,
        "sequence_length": sequence_length,
    }  # fmt: skip
    given = [name for name, argument in together.items() if argument is not None]
    if given == ["sequence_length"]:
        raise ValueError(
            f"sequence_length is for a cache that ranks share, got sequence_length {sequence_length} without a cache: "
            "pass cache=LongNetCache(config, share=...); without a cache, give the rows' positions"
        )
    allowed = (["attention_mask", "cache"], ["cache", "sequence_length"], ["positions", "cu_seqlens"])
    if len(given) > 1 and given not in allowed:
        raise NotImplementedError(
            f"{' and '.join(given)} do not go together: packed documents have no padding and no cache, positions "
            "are counted from the padding and the cache, and rows that are dealt out over ranks have no padding; pass "
            "one of them (attention_mask and cache do go together, and so do cache and sequence_length, and "
            "positions and cu_seqlens)"
        )


def _check_rows_are_real(runs: Sequence[Run]) -> None:
    for row, (start, stop) in enumerate(runs):
        if start == stop:
            raise ValueError(f"attention_mask must mark at least one real token in every row, got none in row {row}")
