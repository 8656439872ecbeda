"""A vision transformer whose attention is replaced: patches attend within squares, and to all through the class token.

python examples/vit.py

A pattern knows positions in a sequence, so squares of an image must become runs of one. In raster order they are not: a
4 x 4 square in the corner of 32 x 32 patches takes positions 0-3, 32-35, 64-67 and 96-99. In Z-order (Morton 1966: the
bits of row and column, interleaved) every aligned square of 2^k x 2^k patches is one run of 4^k positions, so segments
are squares. Attention does not know the order, and position embeddings are added before it, so a trained ViT keeps its
weights.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from dilated_attention_pytorch import DilatedPattern, Pattern, global_tokens
from dilated_attention_pytorch.integrations import replace_attention


class Attention(nn.Module):
    """Self-attention as timm writes it: `qkv`, `proj` and `num_heads` are what `replace_attention` looks for."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.proj = num_heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, N, E]` to `[B, N, E]`."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm block of a ViT."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(width), Attention(width, num_heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """`[B, N, E]` to `[B, N, E]`."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def z_order(side: int) -> Tensor:
    """Raster numbers of `side` x `side` patches in Z-order, `side` a power of 2."""
    row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    bits = range(side.bit_length())
    code = sum((row >> bit & 1) << 2 * bit + 1 | (column >> bit & 1) << 2 * bit for bit in bits)
    return torch.as_tensor(code).flatten().argsort()


class VisionTransformer(nn.Module):
    """A ViT of `side` x `side` patches: the class token first, then the patches in `order` (raster without it)."""

    def __init__(self, side: int, *, order: Tensor | None = None, width: int = 64, num_heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=8, stride=8)
        self.positions = nn.Parameter(torch.randn(side * side, width))
        self.class_token = nn.Parameter(torch.randn(1, 1, width))
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(2)))
        self.head = nn.Linear(width, 10)
        self.order = torch.arange(side * side) if order is None else order

    def forward(self, images: Tensor) -> Tensor:
        """Images `[B, 3, 8 side, 8 side]` to scores `[B, 10]`."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x[:, self.order]], dim=1)
        return self.head(self.blocks(x)[:, 0])


def squares(small: int, large: int, rate: int) -> Pattern:
    """All patches of `small` x `small`, one in `rate` of `large` x `large`, and the class token, which sees all.

    At rate 4^k a head sees one patch of every 2^k x 2^k of a large square, and the next head its neighbour.
    """
    # The class token is position 0, so the first squares begin at 1, which is where they begin a whole square earlier.
    segments = DilatedPattern([small**2, large**2], [1, rate], segment_shift=large**2 - 1)
    return segments + global_tokens(1)


def main(side: int = 64) -> None:
    """Replace the attention of a drawn ViT, and time both."""
    torch.manual_seed(0)
    images, pattern = torch.randn(1, 3, 8 * side, 8 * side), squares(4, 32, 16)
    model = VisionTransformer(side, order=z_order(side)).eval()
    for name in ("dense", "squares"):
        if name == "squares":
            print(replace_attention(model, pattern))
        with torch.no_grad():
            model(images)
            start = time.perf_counter()
            model(images)
        print(f"{name}: {side * side + 1:,} tokens in {time.perf_counter() - start:.2f} s")
    print(f"pairs of tokens computed: {pattern.density(side * side + 1, num_kv_heads=4):.1%}")


if __name__ == "__main__":
    main()
