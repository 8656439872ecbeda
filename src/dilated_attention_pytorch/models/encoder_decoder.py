"""The LongNet encoder-decoder with cross attention."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.nn.linear import project
from dilated_attention_pytorch.ops import attend
from dilated_attention_pytorch.patterns import DilatedPattern, Pattern

from .blocks import BlockAttention, LayerAttention, LongNetBlock, magneto_gains
from .config import LongNetConfig, check_config
from .encoder import LongNetEncoder, check_causal_fields, runs_of
from .longnet import check_ids
from .padding import attend_runs, positions_of
from .rotary import PositionTerms
from .token_model import TokenModel

ALL_TO_ALL = DilatedPattern([1 << 30], [1])
"""Dense attention: one segment longer than any sequence."""

CrossAttention = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Maps query ``[B, N, H, D]``, key and value ``[B, M, G, D]`` and a dropout probability to ``[B, N, H, D]``."""


class DecoderBlock(LongNetBlock):
    """A block with cross attention ``x + cross_attention(norm(x), states)`` between its two halves."""

    def __init__(
        self,
        config: LongNetConfig,
        layer: int,
        states_dim: int,
        pattern: Pattern,
        *,
        gain: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, layer, gain=gain, device=device, dtype=dtype)
        self.cross_attention_layernorm = nn.LayerNorm(
            config.embed_dim, eps=config.layernorm_eps, device=device, dtype=dtype
        )
        self.cross_attention = BlockAttention(
            config.embed_dim,
            config.num_heads,
            pattern,
            config.attention_dropout,
            bias=False,
            kdim=states_dim,
            vdim=states_dim,
            num_kv_heads=config.num_kv_heads,
            sub_layernorm=True,
            layernorm_eps=config.layernorm_eps,
            gain=gain,
            device=device,
            dtype=dtype,
        )

    def reset_parameters(self) -> None:
        """Draw every parameter again."""
        super().reset_parameters()
        self.cross_attention_layernorm.reset_parameters()
        self.cross_attention.reset_parameters()

    def forward(  # type: ignore[override]
        self, x: Tensor, terms: PositionTerms, attend: LayerAttention, states: Tensor, cross: CrossAttention
    ) -> Tensor:
        """``[B, N, E]`` to ``[B, N, E]``, given the states ``[B, M, states_dim]``."""
        x = self.attend_to_itself(x, terms, attend)
        x = x + self.dropout(self.cross_attention(self.cross_attention_layernorm(x), states, cross))
        return self.feed(x)


class LongNetEncoderDecoder(TokenModel):
    """Encoder-decoder: a :class:`LongNetEncoder`, and a causal decoder with cross attention to the encoder's states.

    A decoder block is ``x + attention(norm(x))``, causal under its layer's pattern, then
    ``x + cross_attention(norm(x), states)``, then ``x + feed_forward(norm(x))``. All attention is exact under its
    pattern. Cross attention is dense by default: every target position attends to every source position, without
    materialising the N x M scores.

    Args:
        encoder: configuration of the encoder; its width may differ from the decoder's.
        decoder: configuration of the decoder; ``vocab_size`` is that of the logits.
        cross_pattern: pattern of the cross attention in absolute positions, for source and target that are aligned;
            dense by default. Cross attention uses no rotary positions.
        device, dtype: of the parameters.

    Raises:
        NotImplementedError, ValueError: see :class:`LongNetEncoder`.

    >>> from dilated_attention_pytorch.models import LongNetConfig, LongNetEncoderDecoder
    >>> config = LongNetConfig(
    ...     embed_dim=32, num_layers=2, num_heads=4, segment_lengths=[16, 64], dilation_rates=[1, 4]
    ... )
    >>> model = LongNetEncoderDecoder(config, config)
    >>> model(torch.randint(256, (2, 100)), torch.randint(256, (2, 7))).shape
    torch.Size([2, 7, 256])
    """

    def __init__(
        self,
        encoder: LongNetConfig,
        decoder: LongNetConfig,
        *,
        cross_pattern: Pattern = ALL_TO_ALL,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_config("encoder", encoder)
        check_config("decoder", decoder)
        check_causal_fields(decoder)
        gains = magneto_gains(encoder.num_layers, decoder.num_layers)
        self.cross_pattern = cross_pattern
        self.encoder = LongNetEncoder(encoder, gain=gains.encoder, device=device, dtype=dtype)
        blocks = (
            DecoderBlock(
                decoder, layer, encoder.embed_dim, cross_pattern, gain=gains.decoder, device=device, dtype=dtype
            )
            for layer in range(decoder.num_layers)
        )
        self._make_stack(decoder, blocks, device, dtype)
        self._make_head(device, dtype)

    def reset_parameters(self) -> None:
        """Draw every parameter again, as when the model was made."""
        super().reset_parameters()
        self.encoder.reset_parameters()

    def forward(
        self,
        input_ids: Tensor,
        decoder_input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits of the next token at each target position: encode the source, then :meth:`decode`.

        Args:
            input_ids: the source, integer ``[B, M]``.
            decoder_input_ids: the target, integer ``[B, N]``; the loss must shift it by one against the logits.
            attention_mask: ``[B, M]``, 1 = real, as in :meth:`LongNetEncoder.forward`.
            decoder_attention_mask: ``[B, N]``, the same for the target. Logits at padding are meaningless.

        Returns:
            logits ``[B, N, V]``.

        Raises:
            TypeError, ValueError: arguments of the wrong type or shape.
            NotImplementedError: a mask with holes.
        """
        states = self.encoder(input_ids, attention_mask=attention_mask)
        return self.decode(
            decoder_input_ids, states, attention_mask=attention_mask, decoder_attention_mask=decoder_attention_mask
        )

    def decode(
        self,
        decoder_input_ids: Tensor,
        states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits ``[B, N, V]`` given encoder states ``[B, M, E]``, for a source that is encoded once.

        Args:
            decoder_input_ids, attention_mask, decoder_attention_mask: see :meth:`forward`.
            states: output of the encoder, or other states of that width.

        Raises:
            TypeError, ValueError: arguments of the wrong type or shape.
            NotImplementedError: a mask with holes.
        """
        check_ids("decoder_input_ids", decoder_input_ids)
        width = self.encoder.config.embed_dim
        if states.dim() != 3 or states.shape[0] != decoder_input_ids.shape[0] or states.shape[-1] != width:
            raise ValueError(
                f"states must be [{decoder_input_ids.shape[0]}, source, {width}], one sequence for every row of "
                f"decoder_input_ids, got shape {tuple(states.shape)}"
            )
        batch, rows = decoder_input_ids.shape
        sources = runs_of(attention_mask, states.shape[:2], "attention_mask")
        targets = runs_of(decoder_attention_mask, decoder_input_ids.shape, "decoder_attention_mask")
        positions = torch.arange(rows, device=states.device)
        if targets is not None:
            positions = positions_of(targets, rows, [0] * batch, states.device)

        def attend_layer(layer: int, query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> Tensor:
            causal = functools.partial(
                attend, pattern=self.patterns[layer], is_causal=True, dropout_p=dropout_p, heads_first=False
            )
            return attend_runs(causal, query, key, value, targets, targets)

        def cross(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> Tensor:
            across = functools.partial(attend, pattern=self.cross_pattern, dropout_p=dropout_p, heads_first=False)
            return attend_runs(across, query, key, value, targets, sources)

        x = self.embedding(decoder_input_ids) * math.sqrt(self.config.embed_dim)
        return project(self.head, self._through_blocks(x, positions, attend_layer, states, cross))
