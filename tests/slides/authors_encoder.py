"""GigaPath's slide encoder as its authors describe it, rebuilt in dense arithmetic; it shares no code with the package.

A table of a sine-cosine position for every place of the grid, torchscale's pre-norm layers with a norm inside attention
and feed-forward, and torchscale's dilated attention with every softmax written out.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from integrations.torchscale_layer import DilatedAttention


@functools.cache
def position_table(width: int, grid_size: int) -> Tensor:
    """``[1 + grid_size ** 2, width]``: zeros for the class token, then place after place, row by row."""

    def of_one_axis(places: np.ndarray) -> np.ndarray:
        frequencies = 1.0 / 10000 ** (np.arange(width // 4, dtype=float) / (width / 4.0))
        angles = places.reshape(-1)[:, None] * frequencies[None, :]
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)

    columns, rows = np.meshgrid(np.arange(grid_size, dtype=np.float32), np.arange(grid_size, dtype=np.float32))
    table = np.concatenate([of_one_axis(columns), of_one_axis(rows)], axis=1)
    return torch.from_numpy(np.concatenate([np.zeros((1, width)), table])).float()


def segment_lengths(slide_size: int, tile_size: int) -> list[int]:
    """Five of them, as the authors compute them from the largest slide."""
    longest = (slide_size // tile_size) ** 2
    return [int(w) for w in np.power(2, np.linspace(np.log2(1024), int(np.log2(longest)), 5)).astype(int)]


class FeedForward(nn.Module):
    """fc2(norm(gelu(fc1(x)))); the authors compute the gelu in float32."""

    is_rounded = False

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)
        self.ffn_layernorm = nn.LayerNorm(inner, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.fc1(x)
        inner = functional.gelu(inner.float()).type_as(inner) if self.is_rounded else functional.gelu(inner)
        return self.fc2(self.ffn_layernorm(inner))


class Layer(nn.Module):
    """Norm, attention, add; norm, feed-forward, add."""

    def __init__(self, args: SimpleNamespace, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.self_attn = DilatedAttention(args, width, heads, subln=True)
        self.self_attn_layer_norm = nn.LayerNorm(width, eps=1e-5)
        self.ffn = FeedForward(width, inner)
        self.final_layer_norm = nn.LayerNorm(width, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.self_attn_layer_norm(x)
        x = self.self_attn(x, x, x)[0] + residual
        residual = x
        return self.ffn(self.final_layer_norm(x)) + residual


class AuthorsSlideEncoder(nn.Module):
    """The model in evaluation mode: no dropout, no paths dropped."""

    def __init__(
        self,
        *,
        features: int,
        width: int,
        layers: int,
        heads: int,
        inner: int,
        grid_size: int = 128,
        global_pool: bool = False,
    ) -> None:
        super().__init__()
        args = SimpleNamespace(
            segment_length=segment_lengths(262144, 256), dilated_ratio=[1, 2, 4, 8, 16], xpos_rel_pos=False
        )
        self.grid_size = grid_size
        self.global_pool = global_pool
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Linear(features, width)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(Layer(args, width, heads, inner) for _ in range(layers))
        self.encoder.layer_norm = nn.LayerNorm(width, eps=1e-5)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.register_buffer("pos_embed", position_table(width, grid_size)[None], persistent=False)

    def draw(self, seed: int) -> AuthorsSlideEncoder:
        """Weights in float64 that leave nothing at its neutral value, norms and biases neither."""
        made, generator = self.double(), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                scale = 0.3 if parameter.dim() == 1 else math.sqrt(2 / sum(parameter.shape))
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale)
                if name.endswith(("norm.weight", "ln.weight")):
                    parameter += 1.0
        return made.eval()

    def forward(self, x: Tensor, coords: Tensor) -> tuple[Tensor, Tensor]:
        """What they give without ``all_layer_embed`` ``[S, E]``, and with it ``[S, L + 1, E]``."""
        x = self.patch_embed.proj(x)
        corner = torch.floor(coords / 256.0)
        place = (corner[..., 0] * self.grid_size + corner[..., 1]).long() + 1
        x = x + self.pos_embed[0][place]
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1) + self.pos_embed[:, :1], x), dim=1)
        states = [x]
        for layer in self.encoder.layers:
            x = layer(x)
            states.append(x)
        last, *layers = (
            self.norm(x[:, 1:].mean(dim=1)) if self.global_pool else self.norm(x)[:, 0]
            for x in (self.encoder.layer_norm(x), *states)
        )
        return last, torch.stack(layers, dim=1)
