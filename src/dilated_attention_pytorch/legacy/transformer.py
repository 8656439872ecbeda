"""Transformer layers and models with the names and arguments of an earlier package, built on PyTorch's layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dilated_attention_pytorch.models.blocks import magneto_gains
from dilated_attention_pytorch.models.rotary import rotary, rotate
from dilated_attention_pytorch.nn import MultiheadDilatedAttention

_Activation = str | Callable[[Tensor], Tensor]
_LENGTHS = (2048, 4096, 8192, 16384, 32768)
_RATES = (1, 2, 4, 6, 12)


class _DilatedLayer(nn.Module):
    """A layer of PyTorch's, batch first and norms first, with dilated attention and the norms of MAGNETO
    (arXiv 2210.06423): a LayerNorm before the last matrix of attention and feed-forward, and a gain of the matrices."""

    _attentions: tuple[str, ...]
    """Modules of the layer that are attention."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: _Activation = functional.relu,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        norms: dict[str, Any] = {"sub_layernorm": True, "layernorm_eps": layer_norm_eps, "gain": gamma_init}
        # Made first, as it says in words what PyTorch's layer asserts.
        made = {
            name: MultiheadDilatedAttention(d_model, nhead, segment_lengths, dilation_rates, dropout, **norms, **place)
            for name in self._attentions
        }
        given = (d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps)
        super().__init__(*given, batch_first=True, norm_first=True, **place)
        for name, attention in made.items():
            self.add_module(name, attention)
        matrix = self.get_submodule("linear2")
        assert isinstance(matrix, nn.Linear)
        nn.init.xavier_normal_(matrix.weight, gain=gamma_init)
        norm = nn.LayerNorm(matrix.in_features, eps=layer_norm_eps, **place)
        self.add_module("linear2", nn.Sequential(norm, matrix))


class DilatedTransformerEncoderLayer(_DilatedLayer, nn.TransformerEncoderLayer):
    """``torch.nn.TransformerEncoderLayer`` (batch first, norms first) with dilated attention and MAGNETO's norms.

    The earlier package's layer had no residual connection; this one has it, as in the paper and in PyTorch.

    Args:
        d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, device, dtype: as of PyTorch's layer.
            ``dropout`` applies to attention probabilities and to the residual branches.
        segment_lengths, dilation_rates: the pattern, see :class:`DilatedPattern`.
        gamma_init: Xavier gain of value, output and feed-forward matrices.
    """

    _attentions = ("self_attn",)

    def forward(self, src: Tensor, is_causal: bool = False) -> Tensor:  # type: ignore[override]
        """``[B, N, E]`` to ``[B, N, E]``."""
        return super().forward(src, is_causal=is_causal)


class DilatedTransformerDecoderLayer(_DilatedLayer, nn.TransformerDecoderLayer):
    """``torch.nn.TransformerDecoderLayer`` with dilated self- and cross-attention; see the encoder's layer.

    Cross-attention uses the same pattern: position p of the target attends to the memory as to its own sequence.
    """

    _attentions = ("self_attn", "multihead_attn")

    def forward(  # type: ignore[override]
        self, tgt: Tensor, memory: Tensor, tgt_is_causal: bool = False, memory_is_causal: bool = False
    ) -> Tensor:
        """``[B, N, E]`` and memory ``[B, M, E]`` to ``[B, N, E]``."""
        return super().forward(tgt, memory, tgt_is_causal=tgt_is_causal, memory_is_causal=memory_is_causal)


class LongNet(nn.Module):
    """Encoder and decoder over the same rows, as in an earlier package: ``decoder(x, encoder(x))``.

    The decoder ends with a LayerNorm, as pre-norm layers require. Defaults are the paper's base model.
    """

    def __init__(
        self,
        d_model: int = 768,
        nhead: int = 12,
        num_encoder_layers: int = 12,
        num_decoder_layers: int = 12,
        dim_feedforward: int = 3072,
        segment_lengths: Sequence[int] = _LENGTHS,
        dilation_rates: Sequence[int] = _RATES,
        dropout: float = 0.0,
        activation: _Activation = functional.relu,
        layer_norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        gains = magneto_gains(num_encoder_layers, num_decoder_layers)
        sizes = (d_model, nhead, segment_lengths, dilation_rates, dim_feedforward)
        layer = (*sizes, dropout, activation, layer_norm_eps)
        self.encoder = nn.ModuleList(
            DilatedTransformerEncoderLayer(*layer, gains.encoder, device, dtype) for _ in range(num_encoder_layers)
        )
        self.decoder = nn.ModuleList(
            DilatedTransformerDecoderLayer(*layer, gains.decoder, device, dtype) for _ in range(num_decoder_layers)
        )
        self.encoder_norm = nn.LayerNorm(d_model, eps=layer_norm_eps, device=device, dtype=dtype)
        self.decoder_norm = nn.LayerNorm(d_model, eps=layer_norm_eps, device=device, dtype=dtype)

    def forward(self, x: Tensor, is_causal: bool = True) -> Tensor:
        """``[B, N, E]`` to ``[B, N, E]``; causal or not in encoder and decoder alike."""
        memory = x
        for layer in self.encoder:
            memory = layer(memory, is_causal=is_causal)
        memory = self.encoder_norm(memory)
        for layer in self.decoder:
            x = layer(x, memory, tgt_is_causal=is_causal, memory_is_causal=is_causal)
        return self.decoder_norm(x)


class LongNetLM(nn.Module):
    """Logits from token embeddings with rotary positions, through this module's :class:`LongNet`.

    Args:
        num_tokens: vocabulary size.
        d_model: width of the embedding, an even number for the rotation.
        nhead, num_encoder_layers, num_decoder_layers, dim_feedforward, segment_lengths, dilation_rates, dropout,
            activation, layer_norm_eps, device, dtype: as of :class:`LongNet`.
    """

    def __init__(
        self,
        num_tokens: int,
        d_model: int = 768,
        nhead: int = 12,
        num_encoder_layers: int = 12,
        num_decoder_layers: int = 12,
        dim_feedforward: int = 3072,
        segment_lengths: Sequence[int] = _LENGTHS,
        dilation_rates: Sequence[int] = _RATES,
        dropout: float = 0.0,
        activation: _Activation = functional.relu,
        layer_norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(num_tokens, d_model, device=device, dtype=dtype)
        sizes = (d_model, nhead, num_encoder_layers, num_decoder_layers, dim_feedforward)
        pattern = (segment_lengths, dilation_rates)
        self.long_net = LongNet(*sizes, *pattern, dropout, activation, layer_norm_eps, device, dtype)
        self.out = nn.Linear(d_model, num_tokens, device=device, dtype=dtype)

    def forward(self, x: Tensor, is_causal: bool = True) -> Tensor:
        """Tokens ``[B, N]`` to logits ``[B, N, V]``."""
        embedded = self.token_embedding(x)
        positions = torch.arange(x.shape[1], device=x.device)
        turn = rotary(positions, embedded.shape[-1], 10000.0, embedded.dtype)
        embedded = embedded + rotate(embedded.unsqueeze(-2), turn).squeeze(-2)
        return self.out(self.long_net(embedded, is_causal=is_causal))
