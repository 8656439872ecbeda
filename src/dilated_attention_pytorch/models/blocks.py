"""The LongNet block: dilated attention and a feed-forward, each with MAGNETO's sub-LayerNorm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from dilated_attention_pytorch.nn import MultiheadPatternAttention
from dilated_attention_pytorch.nn.linear import project

from .config import LongNetConfig
from .previous_keys import KeyConvolution
from .rotary import PositionTerms

LayerAttention = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""The attention of a block under the pattern of its layer: maps the layer's number, query ``[B, N, H, D]``, key and
value ``[B, N, G, D]`` and a dropout probability to ``[B, N, H, D]``; causal in a decoder."""
PreviousKeys = Callable[[int, Tensor], tuple[Tensor, ...]]
"""For the keys ``[B, N, G, D]`` of the layer with this number, those of the 1, 2, ... rows before each, as many as the
model's configuration says; 0 before the first row of a document."""


def magneto_gain(num_layers: int) -> float:
    """MAGNETO's Xavier gain of value, output and feed-forward matrices in a decoder of L blocks: ``sqrt(log(2 L))``.

    It bounds the update of the model's output independently of L (arXiv 2210.06423, section 2.2, figure 2).
    """
    return math.sqrt(math.log(2 * num_layers))


class Gains(NamedTuple):
    """Xavier gains of the encoder's blocks and of the decoder's blocks in an encoder-decoder."""

    encoder: float
    decoder: float


def magneto_gains(num_encoder_layers: int, num_decoder_layers: int) -> Gains:
    """Gains for an encoder of N blocks, ``sqrt(log(3 M) log(2 N) / 3)``, and a decoder of M blocks, ``sqrt(log(3 M))``.

    MAGNETO (arXiv 2210.06423, figure 2), for encoder-decoder models.
    """
    of_decoder = math.log(3 * num_decoder_layers)
    return Gains(math.sqrt(of_decoder * math.log(2 * num_encoder_layers) / 3), math.sqrt(of_decoder))


class FeedForward(nn.Module):
    """``out(norm(act(x)))``: ``act(x) = silu(gate x) * (up x)`` for "swiglu", ``gelu(up x)`` for "gelu".

    ``gain`` is the Xavier gain of the up and out matrices; None = :func:`magneto_gain` of a decoder.
    """

    def __init__(
        self,
        config: LongNetConfig,
        *,
        gain: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert config.ffn_dim is not None
        self.is_gated = config.activation == "swiglu"
        self.gain = magneto_gain(config.num_layers) if gain is None else gain
        width = config.ffn_dim
        # Gate and up form one matrix, so that the input is read once.
        self.in_proj = nn.Linear(
            config.embed_dim, 2 * width if self.is_gated else width, bias=False, device=device, dtype=dtype
        )
        self.inner_layernorm = nn.LayerNorm(width, eps=config.layernorm_eps, device=device, dtype=dtype)
        self.out_proj = nn.Linear(width, config.embed_dim, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform matrices; up and out with MAGNETO's gain."""
        weights = self.in_proj.weight.chunk(2) if self.is_gated else (self.in_proj.weight,)
        for weight, gain in zip(weights[::-1], (self.gain, 1.0), strict=False):
            nn.init.xavier_uniform_(weight, gain=gain)
        nn.init.xavier_uniform_(self.out_proj.weight, gain=self.gain)
        self.inner_layernorm.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """``[..., E]`` to ``[..., E]``."""
        inner = project(self.in_proj, x)
        if self.is_gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = functional.silu(gate) * up
        else:
            inner = functional.gelu(inner)
        return project(self.out_proj, self.inner_layernorm(inner))


class HeadGates(nn.Module):
    """``2 sigmoid(W x)``, a factor per head; W of H x E starts at 0, so that the factors start at 1."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.proj = nn.Linear(embed_dim, num_heads, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weights to 0."""
        nn.init.zeros_(self.proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., E]`` to ``[..., H]``."""
        return 2.0 * torch.sigmoid(project(self.proj, x))


class BlockAttention(MultiheadPatternAttention):
    """The projections of a block's attention around an attention callable that the model passes."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        states: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor, float], Tensor],
        gates: Tensor | None = None,
    ) -> Tensor:
        """``[B, N, E]`` of queries from ``x [B, N, E]``, keys and values from ``states [B, M, kdim]``.

        ``attend`` maps query ``[B, N, H, D]``, key and value ``[B, M, G, D]`` and a dropout probability to
        ``[B, N, H, D]``; ``gates [B, N, H]`` multiply its normalised heads.
        """
        query, key, value = self._project_in(x, states, states)
        heads = attend(query, key, value, self.attention.dropout if self.training else 0.0)
        return self._project_out(heads, gates)


class LongNetBlock(nn.Module):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``.

    ``gain`` is the Xavier gain of MAGNETO's matrices; None = :func:`magneto_gain` of a decoder.
    """

    def __init__(
        self,
        config: LongNetConfig,
        layer: int,
        *,
        gain: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.attention_layernorm = nn.LayerNorm(config.embed_dim, eps=config.layernorm_eps, device=device, dtype=dtype)
        self.attention = BlockAttention(
            config.embed_dim,
            config.num_heads,
            config.pattern(layer),
            config.attention_dropout,
            bias=False,
            num_kv_heads=config.num_kv_heads,
            sub_layernorm=True,
            layernorm_eps=config.layernorm_eps,
            gain=magneto_gain(config.num_layers) if gain is None else gain,
            device=device,
            dtype=dtype,
        )
        self.feed_forward_layernorm = nn.LayerNorm(
            config.embed_dim, eps=config.layernorm_eps, device=device, dtype=dtype
        )
        self.feed_forward = FeedForward(config, gain=gain, device=device, dtype=dtype)
        self.dropout = nn.Dropout(config.dropout)
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        self.head_gates = HeadGates(config.embed_dim, config.num_heads, **placed) if config.head_gates else None
        keys = (self.attention.num_kv_heads, self.attention.head_dim, config.key_convolution)
        self.key_convolution = KeyConvolution(*keys, **placed) if config.key_convolution > 1 else None

    def reset_parameters(self) -> None:
        """Draw every parameter again."""
        for part in (self.attention_layernorm, self.attention, self.feed_forward_layernorm, self.feed_forward):
            part.reset_parameters()
        for option in (self.head_gates, self.key_convolution):
            if option is not None:
                option.reset_parameters()

    def forward(
        self, x: Tensor, terms: PositionTerms, attend: LayerAttention, previous: PreviousKeys | None = None
    ) -> Tensor:
        """``[B, N, E]`` to ``[B, N, E]``.

        ``terms`` are those of the layer and the rows' positions, ``attend`` is the attention callable, and ``previous``
        gives the keys before each row, which the key convolution or shifted keys read.
        """
        return self.feed(self.attend_to_itself(x, terms, attend, previous))

    def attend_to_itself(
        self, x: Tensor, terms: PositionTerms, attend: LayerAttention, previous: PreviousKeys | None = None
    ) -> Tensor:
        """The attention half of the block."""

        def attend_heads(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> Tensor:
            if previous is not None:
                rows = previous(self.layer, key)
                # Without a convolution, each key is that of the row before: shifted keys.
                key = rows[0] if self.key_convolution is None else self.key_convolution(key, *rows)
            return attend(self.layer, terms.of_query(query), terms.of_key(key), value, dropout_p)

        normed = self.attention_layernorm(x)
        gates = None if self.head_gates is None else self.head_gates(normed)
        return x + self.dropout(self.attention(normed, normed, attend_heads, gates))

    def feed(self, x: Tensor) -> Tensor:
        """The feed-forward half of the block."""
        return x + self.dropout(self.feed_forward(self.feed_forward_layernorm(x)))
