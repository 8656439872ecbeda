"""Models of plain PyTorch as people have them, with the dense definition inside. It imports nothing of the package."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from support.oracle import Groups, dense_attention, dense_counts

ROWS = 23
DILATED = Groups((5, 16, 30), (1, 3, 1))  # every row sees every key, most more than once
HOLES = Groups((6, 16), (2, 3))  # some rows see nothing
CAUSAL = nn.Transformer.generate_square_subsequent_mask


class DenseMultihead(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` by the dense oracle. Made of a layer by :func:`with_oracle`."""

    groups: Groups

    def forward(
        self,
        query,
        key,
        value,
        key_padding_mask=None,
        need_weights=False,
        attn_mask=None,
        average_attn_weights=True,
        is_causal=False,
    ):
        is_single = query.dim() == 2
        q, k, v = (x[None] if is_single else x if self.batch_first else x.transpose(0, 1) for x in (query, key, value))
        weights = (
            (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if self.in_proj_weight is None
            else self.in_proj_weight.chunk(3)
        )
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (
            functional.linear(x, weight, bias).unflatten(-1, (self.num_heads, -1))
            for x, weight, bias in zip((q, k, v), weights, biases, strict=True)
        )
        if key_padding_mask is not None:
            padding = key_padding_mask if key_padding_mask.dtype == torch.bool else key_padding_mask != 0
            key_padding_mask = padding[None] if is_single else padding
        counts = dense_counts(
            self.groups,
            q.shape[1],
            k.shape[1],
            self.num_heads,
            is_causal=is_causal or attn_mask is not None,
            padding=key_padding_mask,
            batch=q.shape[0],
        )
        heads, _ = dense_attention(q, k, v, *counts, self.head_dim**-0.5)
        out = self.out_proj(heads.flatten(2))
        return (out[0] if is_single else out if self.batch_first else out.transpose(0, 1)), None


class Attention(nn.Module):
    """A timm attention block, with all its options."""

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        attn_dim: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        fused_attn: bool = True,
    ) -> None:
        super().__init__()
        attn_dim = attn_dim or dim
        self.num_heads = num_heads
        self.head_dim = attn_dim // num_heads
        self.scale = self.head_dim**-0.5
        self.fused_attn = fused_attn
        self.qkv = nn.Linear(dim, attn_dim * 3, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm = nn.LayerNorm(attn_dim) if scale_norm else nn.Identity()
        self.proj = nn.Linear(attn_dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        return self.q_norm(q), self.k_norm(k), v

    def joined(self, heads: Tensor) -> Tensor:
        return self.proj_drop(self.proj(self.norm(heads.transpose(1, 2).flatten(2))))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x)
        if self.fused_attn:
            drop = self.attn_drop.p if self.training else 0.0
            heads = functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=drop)
        else:
            scores = q * self.scale @ k.transpose(-2, -1)
            heads = self.attn_drop((scores if attn_mask is None else scores + attn_mask).softmax(dim=-1)) @ v
        return self.joined(heads)


class DenseBlock(Attention):
    """A timm attention block by the dense oracle. Made of a block by :func:`with_oracle`."""

    groups: Groups

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = (h.transpose(1, 2) for h in self.heads(x))
        counts = dense_counts(
            self.groups, x.shape[1], x.shape[1], self.num_heads, is_causal=is_causal, batch=x.shape[0]
        )
        return self.joined(dense_attention(q, k, v, *counts, self.scale)[0].transpose(1, 2))


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int, **options: object) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads, **options)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """A timm-shaped ViT: patch embedding, class token, positions, blocks, head."""

    def __init__(self, side: int, patch: int, dim: int, num_heads: int, depth: int, **options: object) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, patch, patch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, dim))
        self.blocks = nn.Sequential(*(Block(dim, num_heads, **options) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def with_oracle(model: nn.Module, groups: Groups) -> nn.Module:
    """A copy whose attention layers compute the dense definition."""
    model = copy.deepcopy(model)
    for layer in model.modules():
        if type(layer) is nn.MultiheadAttention:
            layer.__class__, layer.groups, layer._qkv_same_embed_dim = DenseMultihead, groups, False
        elif type(layer) is Attention:
            layer.__class__, layer.groups = DenseBlock, groups
    return model


def encoder(*, norm_first: bool = False, batch_first: bool = True, dtype: torch.dtype = torch.float64) -> Any:
    layer = nn.TransformerEncoderLayer(
        12, 3 if norm_first else 2, 17, 0.0, batch_first=batch_first, norm_first=norm_first, dtype=dtype
    )
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first and not norm_first)
    for parameter in model.parameters():  # biases too
        nn.init.normal_(parameter, std=0.4)
    return model


def results(model: nn.Module, x: Tensor, weight: Tensor, **options: Any) -> dict[str, Tensor]:
    """The output where ``weight`` is not 0, and the gradients of the input and of every parameter."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    out = model(x, **options)
    (out * weight).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"out": out * (weight != 0), "x": x.grad, **gradients}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def padding(lengths: list[int], rows: int = ROWS) -> Tensor:
    return torch.arange(rows) >= torch.tensor(lengths)[:, None]


def vision_transformer(**options: Any) -> tuple[VisionTransformer, Tensor, Tensor]:
    model = VisionTransformer(15, 3, 12, 3, 2, **options).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model, torch.randn(2, 3, 15, 15, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
