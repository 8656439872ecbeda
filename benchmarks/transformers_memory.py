"""Peak memory and time of a Llama with attn_implementation="dilated", "sdpa" and "eager", each in a new process.

    python -m benchmarks.transformers_memory

The correctness gate runs first: under a pattern that covers the length, logits must equal those of sdpa. Measured are a
forward pass without gradients and a training step, without padding and with a padded row, and the bytes of the caches
after a text of the largest length.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch import DilatedPattern, Pattern
from dilated_attention_pytorch.benchmarks.clock import Clock
from dilated_attention_pytorch.benchmarks.results import module_command, origin
from dilated_attention_pytorch.integrations import BoundedCache, register, set_pattern

from .options import parse, parser_of, write_results

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "use_cache": False,
}
LARGEST_MASK = 4 << 30  # maximum bytes of a dense mask or dense scores
CALLS = ("forward", "training step", "forward, padded")


@dataclass(frozen=True, slots=True)
class Point:
    """Measurement of one call of the model."""

    attention: str
    call: str
    tokens: int
    peak_bytes: int | None
    """Peak memory above weights and tokens; None if it was not measured."""
    seconds: float | None
    reason: str = ""
    """Why it was not measured."""


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


def largest_tensor(attention: str, call: str, tokens: int) -> int:
    """Bytes of the implementation's N x N tensors."""
    if attention == "eager":
        return 4 * SIZES["num_attention_heads"] * tokens**2
    return tokens**2 if attention == "sdpa" and call == "forward, padded" else 0


def measure(attention: str, call: str, tokens: int, device: str, threads: int) -> Point:
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


def in_a_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run the function in a new process and return its result."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def main() -> int:
    """Print a table; write the results with the machine and the command."""
    parser = parser_of(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--attentions", nargs="+", default=["dilated", "sdpa", "eager"])
    parser.add_argument("--most-dense", type=int, default=65536, help="longest text of the others than dilated")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parse(parser, "transformers_memory.json")
    if arguments.tiny:
        arguments.lengths, arguments.attentions = [64], ["dilated"]
    # glibc keeps freed pages of up to 64 MiB. With a fixed threshold they are returned to the system.
    os.environ["MALLOC_TRIM_THRESHOLD_"] = "131072"
    difference = check_equality()
    if difference > 1e-4:
        print(f"logits differ from those of sdpa by {difference:.1e}: nothing was measured", file=sys.stderr)
        return 1
    here = origin(module_command())
    points = []
    print(f"{SIZES}\nlargest difference to sdpa, float32: {difference:.1e}")
    print(f"{'call':>16} {'tokens':>7} {'attention':>9} {'peak MB':>9} {'seconds':>8}")
    for call in list(CALLS)[:1] if arguments.tiny else CALLS:
        for tokens in arguments.lengths:
            for attention in arguments.attentions:
                if attention != "dilated" and tokens > arguments.most_dense:
                    continue
                needed = largest_tensor(attention, call, tokens)
                if needed > LARGEST_MASK:
                    reason = f"needs {needed / 1e9:.0f} GB for N x N numbers"
                    points.append(Point(attention, call, tokens, None, None, reason))
                    print(f"{call:>16} {tokens:>7} {attention:>9} {reason}", flush=True)
                    continue
                point = in_a_fresh_process(measure, attention, call, tokens, arguments.device, arguments.threads)
                points.append(point)
                peak = "" if point.peak_bytes is None else f"{point.peak_bytes / 1e6:.0f}"
                print(f"{call:>16} {tokens:>7} {attention:>9} {peak:>9} {point.seconds:>8.2f}", flush=True)
    caches = {
        kind: cached_bytes(kind, max(arguments.lengths), arguments.device, arguments.threads)
        for kind in ("bounded", "the model's own")
    }
    for kind, size in caches.items():
        print(f"cache after {max(arguments.lengths)} tokens, {kind}: {size / 1e6:.1f} MB")
    write_results(
        arguments.output,
        "transformers",
        {
            "machine": here,
            "model": SIZES,
            "dtype": "float32",
            "device": arguments.device,
            "largest_difference_to_sdpa": difference,
            "points": [asdict(point) for point in points],
            "cache_bytes": caches,
        },
    )
    print(f"written: {arguments.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
