"""LongNet: a decoder-only language model with dilated attention, in plain PyTorch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from dilated_attention_pytorch.nn.linear import project
from dilated_attention_pytorch.ops import attend
from dilated_attention_pytorch.ops.validation import check_cu_seqlens
from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.tracing import require

from .blocks import LayerAttention, LongNetBlock, PreviousKeys
from .config import LongNetConfig, check_config
from .padding import Run, attend_runs, check_rows_are_real, positions_of, real_runs
from .previous_keys import rows_before, within_document
from .token_model import TokenModel

if TYPE_CHECKING:
    from .cache import CacheStep, LongNetCache, PromptStep


_attend_rows = functools.partial(attend, heads_first=False)  # a short prompt has fewer rows than heads


class AttentionFunction(Protocol):
    """The model's attention function: :func:`attend`, or a distributed one with the same arguments for local rows."""

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


class LongNetLM(TokenModel):
    """Decoder-only language model: embedding, L blocks with dilated attention, LayerNorm, output matrix.

    LongNet (Ding et al. 2023, arXiv 2307.02486) with MAGNETO's sub-LayerNorms and initialisation (arXiv 2210.06423),
    rotary positions, a gated or GELU feed-forward and grouped-query heads.

    Args:
        config: sizes and options.
        attention: the attention function; :func:`attend` by default. It receives every block's query, key, value and
            pattern, so distribution is decided outside the model. Can be replaced later: ``model.attention``. Where
            that function has a part of the rows, keys that are made of several rows also need
            ``model.previous_rows``, such as ``functools.partial(parallel.previous_rows, mesh=mesh)``.
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
        check_config("config", config)
        self.attention = attention
        self.previous_rows: Callable[[Tensor, int], tuple[Tensor, ...]] | None = None
        blocks = (LongNetBlock(config, layer, device=device, dtype=dtype) for layer in range(config.num_layers))
        self._make_stack(config, blocks, device, dtype)
        self._make_head(device, dtype)

    def gradient_checkpointing_enable(self) -> None:
        """Recompute blocks in the backward pass instead of storing their activations, in training.

        ``checkpoint_every`` of the configuration selects the blocks; outputs and gradients do not change.
        """
        self.gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        """Store the activations of all blocks."""
        self.gradient_checkpointing = False

    def forward(
        self,
        input_ids: Tensor | None,
        *,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: LongNetCache | None = None,
        positions: Tensor | None = None,
        hidden_only: bool = False,
    ) -> Tensor:
        """Logits ``[B, N, V]`` of the next token at each position: ``head(hidden_states(...))``.

        Args:
            input_ids: integer ``[B, N]``.
            inputs_embeds: ``[B, N, E]``, instead of input_ids (then None): rows of the embedding table, as it stores
                them, or others in their place. Multiplied by ``sqrt(E)`` as these are, unlike those of
                :class:`LongNetEncoder`.
            attention_mask: ``[B, N]``, 1 = real. The ones of a row must be contiguous: padding before, after, or both.
                Positions count from a row's first real token, so a padded row gives the same result as it does alone.
                Logits at padding are meaningless. With a cache, columns before the last N are past and ignored.
            cu_seqlens: int32 ``[documents + 1]`` boundaries of documents packed along every row, see :func:`attend`;
                positions restart in every document.
            cache: keys and values of the tokens before ``input_ids``, updated in place.
            positions: rotary positions ``[N]`` or ``[B, N]`` of the rows, for a model whose attention function
                is distributed; by default they count from the first real token, or from the start of the document.
            hidden_only: return :meth:`hidden_states`, to which ``head`` is applied elsewhere.

        Returns:
            logits ``[B, N, V]`` in the parameters' (or autocast's) dtype.

        Raises:
            TypeError, ValueError: arguments of the wrong type or shape.
            NotImplementedError: a mask with holes, or arguments that do not go together.
        """
        hidden = self.hidden_states(
            input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            cu_seqlens=cu_seqlens,
            cache=cache,
            positions=positions,
        )
        return hidden if hidden_only else self.logits(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """The output matrix: ``[..., E]`` to ``[..., V]``."""
        return project(self.head, hidden)

    def hidden_states(
        self,
        input_ids: Tensor | None,
        *,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: LongNetCache | None = None,
        positions: Tensor | None = None,
        sequence_length: int | None = None,
    ) -> Tensor:
        """The output of the last block after the final LayerNorm, ``[B, N, E]``; arguments as in :meth:`forward`.

        With ``sequence_length``, ``input_ids`` are this rank's rows of a prompt of that many tokens: the ranks that
        share ``cache`` read it together, and each gets the hidden states of its rows.
        """
        tokens = tokens_of(input_ids, inputs_embeds, self.config.embed_dim)
        check_inputs(tokens, attention_mask, cu_seqlens, cache, positions, sequence_length)
        count, read = self.config.num_previous_keys, rows_before if positions is None else self.previous_rows
        if count and read is None:
            raise NotImplementedError(
                f"shifted_keys and key_convolution read up to {count} rows before each row, which a shard of the rows "
                "does not have: got positions; set model.previous_rows = functools.partial(parallel.previous_rows, "
                "mesh=mesh), or pass whole sequences"
            )
        batch, rows = tokens.shape[:2]
        runs = None if attention_mask is None else real_runs(attention_mask[:, attention_mask.shape[1] - rows :])
        attend_layer: LayerAttention
        previous: PreviousKeys | None = None
        if cache is not None:
            self._check_inference(cache)
            step: CacheStep | PromptStep
            if sequence_length is None:
                step = cache.step(batch, rows, runs, tokens.device)
            else:
                step = cache.prompt_step(batch, rows, sequence_length, tokens.device)
            positions, attend_layer = step.positions, step.attend
            if count:
                previous = functools.partial(step.previous_keys, count)
        elif runs is not None and any(run != (0, rows) for run in runs):
            check_rows_are_real(runs)
            positions = positions_of(runs, rows, [0] * batch, tokens.device)
            attend_layer = functools.partial(self._attend_runs, runs)
        else:
            if positions is None:
                positions = document_positions(rows, cu_seqlens, tokens.device)
            attend_layer = functools.partial(self._attend, cu_seqlens)
        if count and cache is None:
            assert read is not None
            previous = functools.partial(_previous_keys, read, count, positions)
        embedded = self.embedding(tokens) if inputs_embeds is None else inputs_embeds
        return self._through_blocks(embedded * math.sqrt(self.config.embed_dim), positions, attend_layer, previous)

    def _check_inference(self, cache: LongNetCache) -> None:
        # Checked before the cache changes, so that the same cache serves the corrected call.
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
                "with a cache, the model does not call its attention function, and this model has a custom one: "
                "call the model without a cache, or set model.attention = attend first (to distribute a cache, give it "
                "a share)"
            )
        if self.training and self.config.attention_dropout:
            raise NotImplementedError("a cache is for inference, without attention dropout: call model.eval() first")

    def _attend(
        self, cu_seqlens: Tensor | None, layer: int, query: Tensor, key: Tensor, value: Tensor, dropout_p: float
    ) -> Tensor:
        attention = _attend_rows if self.attention is attend else self.attention
        return attention(
            query, key, value, self.patterns[layer], is_causal=True, cu_seqlens=cu_seqlens, dropout_p=dropout_p
        )

    def _attend_runs(
        self, runs: Sequence[Run], layer: int, query: Tensor, key: Tensor, value: Tensor, dropout_p: float
    ) -> Tensor:
        def attend_layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self._attend(None, layer, query, key, value, dropout_p)

        return attend_runs(attend_layer, query, key, value, runs, runs)


def _previous_keys(
    read: Callable[[Tensor, int], tuple[Tensor, ...]], count: int, positions: Tensor, layer: int, key: Tensor
) -> tuple[Tensor, ...]:
    return within_document(read(key, count), positions)


def document_positions(rows: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """Positions ``[N]`` that restart at 0 in every document."""
    places = torch.arange(rows, device=device)
    if cu_seqlens is None:
        return places
    starts = cu_seqlens.to(device, torch.int64)
    return places - starts[torch.searchsorted(starts, places, right=True) - 1]


def check_equal_boundaries(names: str, first: Tensor, other: Tensor) -> None:
    """Raise ValueError unless the boundaries of packed documents that two arguments of these names give are equal."""
    if first is other:
        return
    words = f"{names} must be the same boundaries, those of self-attention"
    if first.shape != other.shape:
        raise ValueError(f"{words}: got {first.shape[0] - 1} and {other.shape[0] - 1} documents")
    is_equal = (first == other.to(first.device)).all()
    require(is_equal, ValueError, words, lambda: f": got {first.tolist()} and {other.tolist()}")


def tokens_of(input_ids: Tensor | None, inputs_embeds: Tensor | None, embed_dim: int) -> Tensor:
    """The one that is given of input_ids ``[B, N]`` and inputs_embeds ``[B, N, E]``."""
    if inputs_embeds is None:
        if input_ids is None:
            raise ValueError(
                f"pass input_ids [batch, sequence] or inputs_embeds [batch, sequence, {embed_dim}]: got neither"
            )
        return check_ids("input_ids", input_ids)
    if input_ids is not None:
        raise ValueError("input_ids and inputs_embeds exclude each other: got both; pass one of them")
    if inputs_embeds.dim() != 3 or inputs_embeds.shape[-1] != embed_dim or not inputs_embeds.is_floating_point():
        raise ValueError(
            f"inputs_embeds must be a floating-point tensor [batch, sequence, {embed_dim}], "
            f"got {inputs_embeds.dtype} of shape {tuple(inputs_embeds.shape)}"
        )
    return inputs_embeds


def check_ids(name: str, ids: Tensor | None) -> Tensor:
    """Return ``ids``, an integer tensor ``[batch, sequence]`` of token ids; raise ValueError if they are not."""
    if ids is None or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        got = None if ids is None else f"{ids.dtype} of shape {tuple(ids.shape)}"
        raise ValueError(f"{name} must be an int64 or int32 tensor [batch, sequence] of token numbers, got {got}")
    return ids


def check_inputs(
    tokens: Tensor,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    cache: LongNetCache | None,
    positions: Tensor | None = None,
    sequence_length: int | None = None,
) -> None:
    """Raise unless these arguments of a model's call fit its tokens ``[B, N]`` or ``[B, N, E]`` and go together."""
    batch, rows = tokens.shape[:2]
    if attention_mask is not None:
        shape = tuple(attention_mask.shape)
        if len(shape) != 2 or shape[0] != batch or shape[1] < rows or (cache is None and shape[1] != rows):
            raise ValueError(
                f"attention_mask must have the shape {(batch, rows)} of input_ids (with a cache it may begin earlier), "
                f"got {shape}"
            )
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, tokens)
    together = {
        "attention_mask": attention_mask,
        "cache": cache,
        "positions": positions,
        "cu_seqlens": cu_seqlens,
        "sequence_length": sequence_length,
    }
    given = [name for name, argument in together.items() if argument is not None]
    if given == ["sequence_length"]:
        raise ValueError(
            f"sequence_length is for a cache that ranks share, got sequence_length {sequence_length} without a cache: "
            "pass cache=LongNetCache(config, share=...); without a cache, pass the rows' positions"
        )
    allowed = (["attention_mask", "cache"], ["cache", "sequence_length"], ["positions", "cu_seqlens"])
    if len(given) > 1 and given not in allowed:
        raise NotImplementedError(
            f"{' and '.join(given)} exclude each other: packed documents have no padding and no cache, positions "
            "follow from the padding and the cache, and sharded rows have no padding; pass one of "
            "them (allowed together: attention_mask and cache, cache and sequence_length, "
            "positions and cu_seqlens)"
        )
