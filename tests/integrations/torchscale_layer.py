"""torchscale's dilated attention layer as its authors describe and run it, rebuilt in dense arithmetic.

It shares no code with the package. ``flash_attn``, which the layer needs there, is a softmax with its log-sum-exp here.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class XPOS(nn.Module):
    """Rotary positions with a decay: queries times ``scale^p``, keys times ``scale^-p``, from the middle on."""

    def __init__(self, head_dim: int, scale_base: float = 512) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.scale_base = scale_base
        self.register_buffer("scale", (torch.arange(0, head_dim, 2) + 0.4 * head_dim) / (1.4 * head_dim))

    def forward(self, x: Tensor, offset: int = 0, *, downscale: bool = False) -> Tensor:
        """``[B, N, H, D]`` of positions from ``offset`` on."""
        length, half = x.shape[1], self.head_dim // 2
        low = -(length + offset) // 2
        power = torch.arange(low, length + offset + low).to(self.scale).div(self.scale_base)[:, None]
        scale = self.scale**power
        frequency = 1.0 / (10000 ** (torch.arange(0, half) / half))
        angle = (torch.arange(0, length + offset, dtype=torch.float)[:, None] * frequency).to(scale)
        if downscale:
            scale = 1 / scale
        sin, cos = (
            (part * scale)[-length:].repeat_interleave(2, dim=1)[:, None] for part in (angle.sin(), angle.cos())
        )
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * cos + turned * sin


class DilatedAttention(nn.Module):
    """The layer, with its attributes, its signature and its arithmetic.

    ``rows_in_place`` repairs the one defect: rows of segments whose length the ratio does not divide are put where they
    belong. ``merge_has_gradient`` differentiates the weights of the merge, which the authors compute under no_grad.
    """

    rows_in_place = False
    merge_has_gradient = False

    def __init__(
        self,
        args: Any,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        self_attention: bool = True,
        encoder_decoder_attention: bool = False,
        subln: bool = False,
    ) -> None:
        super().__init__()
        self.args = args
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.self_attention = self_attention
        self.encoder_decoder_attention = encoder_decoder_attention
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.inner_attn_ln = nn.LayerNorm(embed_dim) if subln and self_attention else None
        self.dropout_module = nn.Dropout(dropout)
        has_xpos = args.xpos_rel_pos and self_attention
        self.xpos = XPOS(self.head_dim, args.xpos_scale_base) if has_xpos else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        incremental_state: Any = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        rel_pos: Tensor | None = None,
        is_first_step: bool = False,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        q, k, v = (
            linear(x).unflatten(-1, (self.num_heads, self.head_dim))
            for linear, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        if self.xpos is not None:
            k = self.xpos(k, offset=0, downscale=True)
            q = self.xpos(q, offset=0)
        outs, lses = zip(
            *(
                self.group(q, k, v, w, r, is_causal)
                for w, r in zip(self.args.segment_length, self.args.dilated_ratio, strict=True)
            ),
            strict=True,
        )
        with torch.set_grad_enabled(self.merge_has_gradient and torch.is_grad_enabled()):
            weights = torch.softmax(torch.stack(lses), dim=0)
        attn = (torch.stack(outs) * weights.unsqueeze(-1)).sum(0).flatten(-2)
        if self.inner_attn_ln is not None:
            attn = self.inner_attn_ln(attn)
        return self.out_proj(attn), None

    def group(self, q: Tensor, k: Tensor, v: Tensor, w: int, r: int, is_causal: bool) -> tuple[Tensor, Tensor]:
        """Output ``[B, N, H, D]`` and log-sum-exp ``[B, N, H]`` of one pair (w, r), head by head."""
        length = q.shape[1]
        s = min(w, length)
        num_segments, class_rows = math.ceil(length / s), math.ceil(s / r)
        outs, lses = [], []
        for head in range(self.num_heads):
            offset = head // math.ceil(self.num_heads / r)
            # The sequence is padded to whole segments, and every segment to whole classes.
            q_class, k_class, v_class = (
                functional.pad(
                    functional.pad(x[:, :, head], (0, 0, 0, num_segments * s - length)).unflatten(1, (num_segments, s)),
                    (0, 0, 0, class_rows * r - s),
                )[:, :, offset::r]
                for x in (q, k, v)
            )
            scores = self.scaling * q_class @ k_class.mT
            if is_causal:
                later = torch.ones(class_rows, class_rows, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(later, -math.inf)
            lse = scores.logsumexp(-1)
            rows = list(range(offset, class_rows * r, r))
            out_of_head = q.new_zeros(len(q), num_segments, class_rows * r, self.head_dim)
            lse_of_head = q.new_full((len(q), num_segments, class_rows * r), max(-1e8, torch.finfo(q.dtype).min))
            out_of_head[:, :, rows] = (scores - lse.unsqueeze(-1)).exp() @ v_class
            lse_of_head[:, :, rows] = lse
            if self.rows_in_place:
                out_of_head, lse_of_head = out_of_head[:, :, :s], lse_of_head[:, :, :s]
            outs.append(out_of_head.flatten(1, 2)[:, :length])
            lses.append(lse_of_head.flatten(1, 2)[:, :length])
        return torch.stack(outs, dim=2), torch.stack(lses, dim=2)


def layer(
    lengths: list[int] | str,
    ratios: list[int] | str,
    *,
    embed_dim: int,
    num_heads: int,
    subln: bool = False,
    xpos_scale_base: float | None = None,
    dropout: float = 0.0,
    **settings: Any,
) -> DilatedAttention:
    """A layer in float64 with drawn weights and biases."""
    args = SimpleNamespace(
        segment_length=lengths,
        dilated_ratio=ratios,
        flash_attention=True,
        xpos_scale_base=xpos_scale_base,
        xpos_rel_pos=xpos_scale_base is not None,
        multiway=False,
        **settings,
    )
    made = DilatedAttention(args, embed_dim, num_heads, dropout, subln=subln).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=embed_dim**-0.5)
    return made


class Encoder(nn.Module):
    """Layers at the places that torchscale's encoder has for them."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for attention in layers:
            block = nn.Module()
            block.self_attn = attention
            self.layers.append(block)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        for block in self.layers:
            x = x + block.self_attn(query=x, key=x, value=x, **options)[0]
        return x
