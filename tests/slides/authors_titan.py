"""TITAN's slide encoder, written densely from its description: every bias of an N x N matrix, tile by tile."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def alibi_slopes(heads: int) -> list[float]:
    if math.log2(heads).is_integer():
        ratio = 2 ** (-8 / heads)
        return [ratio ** (head + 1) for head in range(heads)]
    fewer = 2 ** math.floor(math.log2(heads))
    return alibi_slopes(fewer) + alibi_slopes(2 * fewer)[0::2][: heads - fewer]


def norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / (centred.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight + bias


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
    return torch.softmax(scores, dim=-1) @ v


def pooled(x: Tensor, w: Mapping[str, Tensor], name: str, heads: int) -> Tensor:
    """``[N, E]`` to ``[queries, E]``."""
    context = norm(x, w[f"{name}.ln_k.weight"], w[f"{name}.ln_k.bias"], 1e-5)
    query = norm(w[f"{name}.query"], w[f"{name}.ln_q.weight"], w[f"{name}.ln_q.bias"], 1e-5)
    parts = []
    for index, rows in enumerate((query, context, context)):
        matrix = w[f"{name}.attn.in_proj_weight"].chunk(3)[index]
        parts.append(rows @ matrix.T + w[f"{name}.attn.in_proj_bias"].chunk(3)[index])
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(0, 1) for part in parts)
    out = softmax_attention(q, k, v, 0.0).transpose(0, 1).flatten(-2)
    return out @ w[f"{name}.attn.out_proj.weight"].T + w[f"{name}.attn.out_proj.bias"]


def slide_vector(
    w: Mapping[str, Tensor], features: Tensor, corners: Tensor, size: int, heads: int, pool: str, pool_heads: int
) -> Tensor:
    """The vector ``[E]`` of ``encode_slide_from_patch_features``."""
    summed: dict[tuple[int, int], Tensor] = {}
    least = corners.min(dim=0).values
    for feature, corner in zip(features, corners, strict=True):
        cell = (int((corner[0] - least[0]) // size), int((corner[1] - least[1]) // size))
        summed[cell] = summed[cell] + feature if cell in summed else feature
    cells = [cell for cell in sorted(summed) if bool((summed[cell] != 0).any())]
    x = gelu(torch.stack([summed[cell] for cell in cells]) @ w["patch_embed.0.weight"].T + w["patch_embed.0.bias"])
    x = torch.cat((w["cls_token"][0], x))
    distance = torch.zeros(len(x), len(x), dtype=x.dtype)
    for i, (a, b) in enumerate(cells):
        for j, (c, d) in enumerate(cells):
            distance[i + 1, j + 1] = math.hypot(a - c, b - d)
    bias = -torch.tensor(alibi_slopes(heads), dtype=x.dtype)[:, None, None] * distance
    layers = max(int(name.split(".")[2]) for name in w if name.startswith("blocks.")) + 1
    for layer in range(layers):
        n = f"blocks.modules_list.{layer}"
        rows = norm(x, w[f"{n}.norm1.weight"], w[f"{n}.norm1.bias"], 1e-6)
        parts = (rows @ w[f"{n}.attn.qkv.weight"].T + w[f"{n}.attn.qkv.bias"]).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(0, 1) for part in parts)
        out = softmax_attention(q, k, v, bias).transpose(0, 1).flatten(-2)
        x = x + out @ w[f"{n}.attn.proj.weight"].T + w[f"{n}.attn.proj.bias"]
        rows = norm(x, w[f"{n}.norm2.weight"], w[f"{n}.norm2.bias"], 1e-6)
        inner = gelu(rows @ w[f"{n}.mlp.fc1.weight"].T + w[f"{n}.mlp.fc1.bias"])
        x = x + inner @ w[f"{n}.mlp.fc2.weight"].T + w[f"{n}.mlp.fc2.bias"]
    x = norm(x, w["norm.weight"], w["norm.bias"], 1e-6)
    if pool == "cascade":
        x = pooled(x, w, "attn_pool", pool_heads)
    return pooled(x, w, "attn_pool_contrastive", pool_heads)[0]
