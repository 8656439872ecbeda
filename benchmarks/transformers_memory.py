"""Peak memory and time of a Llama with attn_implementation="dilated" and "sdpa", each in a new process.

    python -m benchmarks.transformers_memory

The correctness gate runs first: under a pattern that covers the length, logits must equal those of sdpa. Measured are a
forward pass without gradients and a training step, without padding and with a padded row, and the bytes of the caches
after a text of the largest length.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dilated_attention_pytorch import DilatedPattern, Pattern
from dilated_attention_pytorch.benchmarks.clock import Clock
from dilated_attention_pytorch.integrations import BoundedCache, register, set_pattern

from .study import Study, in_new_process, run

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "use_cache": False,
}
Name = Literal["dilated", "sdpa"]
CallName = Literal["forward", "training step", "forward, padded"]


@dataclass(frozen=True, kw_only=True)
class TransformersMemory(Study):
    """Settings."""

    lengths: tuple[int, ...] = (4096, 16384, 65536)
    """Tokens of a text."""
    attentions: tuple[Name, ...] = ("dilated", "sdpa")
    """The attentions that are measured."""
    calls: tuple[CallName, ...] = ("forward", "training step", "forward, padded")
    """What is measured."""
    most_dense: int = 65536
    """Longest text with sdpa, whose mask of a padded text has N x N bytes."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Where the model is."""


@dataclass(frozen=True, slots=True)
class Point:
    """Measurement of one call of the model."""

    attention: str
    call: str
    tokens: int
    peak_bytes: int | None
    """Peak memory above weights and tokens; None where it cannot be read."""
    seconds: float


def pattern_up_to(length: int) -> DilatedPattern:
    """Segments from 2,048, each four times the one before, up to the whole length; the rates grow alike."""
    lengths = [2048]
    while lengths[-1] < length:
        lengths.append(4 * lengths[-1])
    return DilatedPattern(lengths, [4**level for level in range(len(lengths))])


def model_of(attention: str, length: int, device: str, pattern: Pattern | None = None) -> Any:
    """A Llama with the same random weights for every attention; the pattern is for "dilated"."""
    from transformers import LlamaConfig, LlamaForCausalLM

    register()
    config = LlamaConfig(**SIZES, max_position_embeddings=length)
    config._attn_implementation = attention
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    if attention == "dilated":
        set_pattern(model, pattern or pattern_up_to(length))
    return model.to(device)


@torch.no_grad()
def check_equality() -> float:
    """Largest float32 difference between the logits of sdpa and of a pattern that covers the length."""
    tokens = torch.randint(256, (2, 257))
    mask = torch.ones_like(tokens)
    mask[1, 200:] = 0
    ours, plain = (
        model_of(attention, 257, "cpu", DilatedPattern([257], [1])).eval()(tokens, attention_mask=mask).logits
        for attention in ("dilated", "sdpa")
    )
    return float((ours - plain)[mask.bool()].abs().max())


def measured(attention: str, call: str, tokens: int, device: str, threads: int) -> Point:
    """Measure one call in this process, which must be new; a shorter call before it loads libraries."""
    torch.set_num_threads(threads)
    model = model_of(attention, tokens, device)
    clock = Clock(torch.device(device))

    def step(length: int) -> tuple[Tensor, ...]:
        ids = torch.randint(256, (1, length), device=device)
        mask = None
        if call == "forward, padded":
            mask = torch.ones_like(ids)
            mask[:, : length // 8] = 0
        if call != "training step":
            with torch.no_grad():
                return (model.model(ids, attention_mask=mask).last_hidden_state,)
        model.model(ids).last_hidden_state.sum().backward()
        return tuple(parameter.grad for parameter in model.parameters() if parameter.grad is not None)

    step(min(tokens, 2048))
    memory: list[tuple[int, int] | None] = []
    seconds = clock.seconds(lambda: memory.append(clock.memory(lambda: step(tokens))))
    return Point(attention, call, tokens, None if memory[0] is None else memory[0][0], seconds)


@torch.no_grad()
def cached_bytes(kind: str, tokens: int, device: str, threads: int) -> int:
    """Bytes of keys and values after a text, read 2,048 tokens at a time."""
    from transformers import DynamicCache

    torch.set_num_threads(threads)
    model = model_of("dilated", tokens, device).eval()
    bounded = BoundedCache(model.config)
    own: Any = DynamicCache(config=model.config)
    for part in torch.randint(256, (1, tokens), device=device).split(2048, dim=1):
        model.model(part, past_key_values=bounded if kind == "bounded" else own, use_cache=True)
    if kind == "bounded":
        return bounded.num_bytes
    return sum(tensor.numel() * tensor.element_size() for layer in own.layers for tensor in (layer.keys, layer.values))


def measure(given: TransformersMemory) -> dict[str, Any]:
    """Every call at every length, with every attention.

    Raises:
        SystemExit: logits differ from those of sdpa.
    """
    # glibc keeps freed pages of up to 64 MiB. With a fixed threshold they are returned to the system.
    os.environ["MALLOC_TRIM_THRESHOLD_"] = "131072"
    difference = check_equality()
    if difference > 1e-4:
        raise SystemExit(f"not measured, because logits differ from those of sdpa by {difference:.1e}")
    points, where = [], (given.device, torch.get_num_threads())
    for call, tokens, attention in itertools.product(given.calls, given.lengths, given.attentions):
        if attention != "dilated" and tokens > given.most_dense:
            continue
        points.append(in_new_process(measured, attention, call, tokens, *where))
        print(points[-1], flush=True)
    kinds = ("bounded", "the model's own")
    return {
        "model": SIZES,
        "dtype": "float32",
        "device": given.device,
        "largest_difference_to_sdpa": difference,
        "points": [asdict(point) for point in points],
        "cache_bytes": {kind: cached_bytes(kind, max(given.lengths), *where) for kind in kinds},
    }


if __name__ == "__main__":
    tiny = {"lengths": (64,), "attentions": ("dilated",), "calls": ("forward",)}
    run(TransformersMemory, measure, text=__doc__, name="transformers_memory", group="transformers", tiny=tiny)
