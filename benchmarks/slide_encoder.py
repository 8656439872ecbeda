"""The slide encoder on the CPU: seconds and peak memory of the adopted model and of the published algorithm in PyTorch.

    python -m benchmarks.slide_encoder [--lengths N ...] [--only adopted published]

12 layers, 768 wide, 16 heads, the pattern of the GigaPath encoder. The published algorithm pads, selects classes,
attends within them, scatters and merges, as torchscale's layer does; flash-attn is replaced by PyTorch's own fused CPU
kernel. Both models have the same weights and must agree, which is checked first: in float64 on a small model, then in
float32 on every measured length.
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from dilated_attention_pytorch.benchmarks.clock import Clock
from dilated_attention_pytorch.integrations import adopt
from dilated_attention_pytorch.ops import implementation

from .study import StudyOfCalls, run

SEGMENT_LENGTHS = [1024, 5792, 32768, 185363, 1048576]
DILATED_RATIOS = [1, 2, 4, 8, 16]
WIDTH, HEADS, FEEDFORWARD = 768, 16, 3072
Name = Literal["adopted", "published"]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}  # relative to the largest output


@dataclass(frozen=True, kw_only=True)
class Encoder(StudyOfCalls):
    """Settings."""

    lengths: tuple[int, ...] = (1_000, 5_000, 20_000)
    """Tiles of a slide."""
    only: tuple[Name, ...] = ("adopted", "published")
    """The models that are timed."""
    layers: int = 12
    """Layers of the encoder."""
    repeats: int = 3
    """Times that a call is timed."""


class PublishedAttention(nn.Module):
    """torchscale's layer with its attributes and algorithm; PyTorch's fused kernel replaces flash-attn."""

    def __init__(self, segment_lengths: list[int], width: int, heads: int) -> None:
        super().__init__()
        self.args = SimpleNamespace(segment_length=segment_lengths, dilated_ratio=DILATED_RATIOS)
        self.embed_dim = width
        self.num_heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))
        self.inner_attn_ln = nn.LayerNorm(width)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None]:
        q, k, v = (
            linear(x).unflatten(-1, (self.num_heads, -1))
            for linear, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        outs, lses = [], []
        for length, ratio in zip(self.args.segment_length, self.args.dilated_ratio, strict=True):
            segment = min(length, q.shape[1])
            out, lse = self.softmax(*(self.classes(x, segment, ratio) for x in (q, k, v)))
            outs.append(self.scattered(out, segment, ratio, q, 0.0))
            lses.append(self.scattered(lse.unsqueeze(-1), segment, ratio, q, -1e8))
        weights = torch.softmax(torch.stack(lses), dim=0)
        attn = torch.zeros_like(q)
        for out, weight in zip(outs, weights, strict=True):
            attn += out * weight
        return self.out_proj(self.inner_attn_ln(attn.flatten(-2))), None

    def softmax(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of ``[segments, H, class rows, D]``."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        return out, lse

    def classes(self, x: Tensor, segment: int, ratio: int) -> Tensor:
        """``[B, N, H, D]`` to ``[segments, H, class rows, D]``: head block b keeps the rows b, b + r, ..."""
        padded = functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % segment)).unflatten(1, (-1, segment)).flatten(0, 1)
        heads, head_dim = x.shape[2:]
        padded = functional.pad(padded, (0, 0, 0, -heads % ratio, 0, -segment % ratio))
        blocks = padded.view(len(padded), -1, ratio, ratio, (heads + -heads % ratio) // ratio, head_dim)
        kept = blocks.diagonal(dim1=2, dim2=3).permute(0, 4, 2, 1, 3)  # [segments, r, heads of a block, rows, D]
        return kept.flatten(1, 2)[:, :heads].contiguous()

    def scattered(self, x: Tensor, segment: int, ratio: int, like: Tensor, fill: float) -> Tensor:
        """The inverse of :meth:`classes`, with ``fill`` where a head selects nothing."""
        rows, heads = like.shape[1:3]
        dense = x.new_full((len(x), math.ceil(segment / ratio) * ratio, heads, x.shape[3]), fill)
        in_block = math.ceil(heads / ratio)
        for block in range(math.ceil(heads / in_block)):
            of_block = slice(block * in_block, (block + 1) * in_block)
            dense[:, block::ratio, of_block] = x[:, of_block].transpose(1, 2)
        return dense.unflatten(0, (like.shape[0], -1)).flatten(1, 2)[:, :rows]


class Block(nn.Module):
    """A pre-norm layer of the encoder: attention and feed-forward with residual connections."""

    def __init__(self, attention: nn.Module, width: int) -> None:
        super().__init__()
        self.self_attn = attention
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.final_layer_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, FEEDFORWARD * width // WIDTH)
        self.fc2 = nn.Linear(FEEDFORWARD * width // WIDTH, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, N, E]`` in and out."""
        normal = self.self_attn_layer_norm(x)
        x = x + self.self_attn(normal, normal, normal)[0]
        return x + self.fc2(functional.gelu(self.fc1(self.final_layer_norm(x))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Measurement of one model at one length."""

    rows: int
    model: str
    seconds: list[float]
    """Seconds of every call except the first."""
    peak_bytes: int | None
    """Peak memory of the first call above weights and input; None if it cannot be read."""
    largest_difference: float
    """Largest difference to the adopted model's output, relative to its largest absolute value."""


def models(segment_lengths: list[int], width: int, heads: int, layers: int) -> dict[str, nn.Module]:
    """The same encoder in two variants, with the same weights."""
    attentions = [PublishedAttention(segment_lengths, width, heads) for _ in range(layers)]
    published = nn.Sequential(*(Block(attention, width) for attention in attentions)).eval()
    return {"adopted": adopt(copy.deepcopy(published)), "published": published}


def difference(out: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest absolute value."""
    return float((out - expected).abs().max() / expected.abs().max())


def check_equality() -> float:
    """Largest float64 difference of a small model's outputs, over lengths with every kind of padding."""
    small = models([64, 128, 256, 256, 512], 96, HEADS, 2)
    largest = 0.0
    for rows in (1, 7, 100, 257, 601):
        x = torch.randn(2, rows, 96, dtype=torch.float64)
        expected, out = (model.double()(x) for model in small.values())
        largest = max(largest, difference(out, expected))
    return largest


def timed(name: str, model: nn.Module, x: Tensor, expected: Tensor | None, repeats: int) -> tuple[Point, Tensor]:
    """Memory of the first call, and times of the others."""
    clock = Clock(x.device)
    outs: list[Tensor] = []

    def call() -> tuple[Tensor, ...]:
        outs[:] = [model(x)]
        return (outs[0],)

    memory = clock.memory(call)
    error = 0.0 if expected is None else difference(outs[0], expected)
    seconds = [clock.seconds(call) for _ in range(repeats)]
    peak = None if memory is None else memory[0]
    return Point(rows=x.shape[1], model=name, seconds=seconds, peak_bytes=peak, largest_difference=error), outs[0]


@torch.no_grad()
def measure(given: Encoder) -> dict[str, Any]:
    """Time every model at every length.

    Raises:
        SystemExit: the outputs of two models differ by more than rounding explains.
    """
    with implementation("auto"):  # the native kernels do not compute in float64
        small_difference = check_equality()
    if not small_difference < TOLERANCE[torch.float64]:
        raise SystemExit(f"not timed, because outputs differ by {small_difference:.1e} in float64")
    encoders = models(SEGMENT_LENGTHS, WIDTH, HEADS, given.layers)
    points = []
    for rows in given.lengths:
        x, expected = torch.randn(1, rows, WIDTH), None
        for name in given.only:
            point, out = timed(name, encoders[name], x, expected, given.repeats)
            expected = out if expected is None else expected
            if not point.largest_difference < TOLERANCE[torch.float32]:
                raise SystemExit(f"{name} at {rows} rows differs by {point.largest_difference:.1e}")
            points.append(asdict(point))
            print(points[-1], flush=True)
    return {
        "layers": given.layers,
        "width": WIDTH,
        "heads": HEADS,
        "dtype": "float32",
        "segment_lengths": SEGMENT_LENGTHS,
        "dilated_ratios": DILATED_RATIOS,
        "largest_difference_float64": small_difference,
        "points": points,
    }


if __name__ == "__main__":
    tiny = {"lengths": (300,), "layers": 1, "repeats": 1}
    run(Encoder, measure, text=__doc__, name="slide_encoder", group="slides", tiny=tiny)
