"""The models written out: the dense oracle, complex rotations, no module of ours."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from dilated_attention_pytorch.models import LongNetConfig
from support import oracle

WRITTEN_OUT: dict[str, tuple[oracle.Groups | oracle.Rule, ...]] = {
    "local_window(4, 6)": (oracle.Rule("window", (4, 6)),),
    "local_window(8)": (oracle.Rule("window", (8, 0)),),
    "local_window(3) + DilatedPattern([7, 23], [1, 3])": (
        oracle.Rule("window", (3, 0)),
        oracle.Groups((7, 23), (1, 3)),
    ),
}
"""The patterns of layers that tests take, for the oracle."""
Counts = tuple[Tensor, Tensor]
"""How often a query counts a key, and the zero-padding keys of every row."""


class Dense:
    """The blocks of a model with these weights."""

    def __init__(self, config: LongNetConfig, weights: dict[str, Tensor], prefix: str = "") -> None:
        self.config, self.weights, self.prefix = config, weights, prefix

    def weight(self, name: str) -> Tensor:
        return self.weights[f"{self.prefix}{name}"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], self.weight(f"{name}.weight"), self.weight(f"{name}.bias"))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.embed_dim // self.config.num_heads))

    def turned(self, layer: int, x: Tensor) -> Tensor:
        half, thetas = x.shape[-1] // 2, list(self.config.layer_rope_thetas) or [self.config.rope_theta]
        theta = thetas[layer % len(thetas)]
        if theta == 0:
            return x
        speed = theta ** -(torch.arange(half).double() / half)
        angles = torch.arange(x.shape[1]).double()[:, None] * speed
        pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    def scaled(self, layer: int, q: Tensor) -> Tensor:
        lengths = list(self.config.layer_scale_lengths) or [0]
        length = lengths[layer % len(lengths)]
        if length == 0:
            return q
        factors = [max(1.0, math.log(position + 1) / math.log(length)) for position in range(q.shape[1])]
        return q * torch.tensor(factors, dtype=torch.float64)[:, None, None]

    def mixed(self, name: str, k: Tensor) -> Tensor:
        if self.config.shifted_keys:
            return functional.pad(k, (0, 0, 0, 0, 1, 0))[:, :-1]
        if self.config.key_convolution == 1:
            return k
        kernel = self.weight(f"{name}.key_convolution.weight").flatten(0, 1).flip(1)[:, None]
        channels = functional.pad(k.flatten(2).transpose(1, 2), (kernel.shape[2] - 1, 0))
        return functional.conv1d(channels, kernel, groups=kernel.shape[0]).transpose(1, 2).unflatten(2, k.shape[2:])

    def attention(
        self, name: str, q: Tensor, k: Tensor, v: Tensor, counts: Counts, gates: Tensor | None = None
    ) -> Tensor:
        out, _ = oracle.dense_attention(q, k, v, *counts, 1 / math.sqrt(q.shape[-1]))
        joined = self.norm(out.flatten(2), f"{name}.inner_layernorm")
        if gates is not None:
            joined = joined * gates.repeat_interleave(q.shape[-1], dim=-1)
        return joined @ self.weight(f"{name}.out_proj.weight").T

    def counts(self, layer: int, batch: int, rows: int, *, is_causal: bool) -> Counts:
        config = self.config
        assert config.num_kv_heads is not None
        if config.layer_patterns:
            parts = WRITTEN_OUT[config.layer_patterns[layer % len(config.layer_patterns)]]
        else:
            shift = config.layer_segment_shifts[layer % len(config.layer_segment_shifts)]
            lengths, rates = tuple(config.segment_lengths), tuple(config.dilation_rates)
            parts = (oracle.Groups(lengths, rates, config.offset_rule, shift=(shift,)),)
        counted = [
            oracle.dense_counts(part, rows, rows, config.num_kv_heads, is_causal=is_causal, batch=batch)
            for part in parts
        ]
        counts, zero_pad_keys = (torch.stack(several).sum(0) for several in zip(*counted, strict=True))
        return counts, zero_pad_keys

    def block(
        self, layer: int, x: Tensor, *, is_causal: bool, states: Tensor | None = None, seen: Counts | None = None
    ) -> Tensor:
        name = f"blocks.{layer}"
        normed = self.norm(x, f"{name}.attention_layernorm")
        q, k, v = (self.heads(normed @ self.weight(f"{name}.attention.{one}_proj.weight").T) for one in "qkv")
        gates = None
        if self.config.head_gates:
            gates = 2 / (1 + torch.exp(-normed @ self.weight(f"{name}.head_gates.proj.weight").T))
        q, k = self.scaled(layer, self.turned(layer, q)), self.turned(layer, self.mixed(name, k))
        counts = self.counts(layer, *x.shape[:2], is_causal=is_causal)
        x = x + self.attention(f"{name}.attention", q, k, v, counts, gates)
        if states is not None:
            assert seen is not None
            normed, cross = self.norm(x, f"{name}.cross_attention_layernorm"), f"{name}.cross_attention"
            weights = tuple(self.weight(f"{cross}.{one}_proj.weight") for one in "qkv")
            q, k, v = (self.heads(y @ w.T) for y, w in zip((normed, states, states), weights, strict=True))
            x = x + self.attention(cross, q, k, v, seen)
        inner = self.norm(x, f"{name}.feed_forward_layernorm") @ self.weight(f"{name}.feed_forward.in_proj.weight").T
        if self.config.activation == "swiglu":
            gate, up = inner.chunk(2, dim=-1)
            inner = gate * torch.sigmoid(gate) * up
        else:
            inner = functional.gelu(inner)
        inner = self.norm(inner, f"{name}.feed_forward.inner_layernorm")
        return x + inner @ self.weight(f"{name}.feed_forward.out_proj.weight").T

    def embedded(self, ids: Tensor) -> Tensor:
        return self.weight("embedding.weight")[ids] * math.sqrt(self.config.embed_dim)

    def states(self, x: Tensor, *, is_causal: bool = False) -> Tensor:
        for layer in range(self.config.num_layers):
            x = self.block(layer, x, is_causal=is_causal)
        return self.norm(x, "layernorm")
