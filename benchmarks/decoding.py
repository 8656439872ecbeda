"""Decoding: time per token, cached rows and memory after short and long texts, compared with the formula.

    python -m benchmarks.decoding [--only model kernel] [--impl auto|native|aten]

The correctness gate runs first: cached logits must equal those of the whole text in one call. A token's cost depends on
how full its segments are, so every length is measured at positions spread over one longest segment from there on.

The part "kernel" measures one call: the last of many rows through ``attend``. Its rate, the bytes of the keys and
values that it sees over its time, is compared with that of a copy of a quarter of a GiB before each call (bytes read
plus written). The copy also evicts the keys and the program from all caches; the next call finds only what fits there.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dilated_attention_pytorch import DilatedPattern, Pattern, attend
from dilated_attention_pytorch.models import LongNetCache, LongNetConfig, LongNetLM
from dilated_attention_pytorch.ops import implementation

from .study import StudyOfCalls, run, seconds

PATTERN: dict[str, Any] = {"segment_lengths": [2048, 4096, 8192], "dilation_rates": [1, 2, 4]}
SIZES: dict[str, Any] = {"vocab_size": 256, "embed_dim": 256, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4}
PLACES = 8  # positions over one longest segment
CHUNK = 1024  # tokens read at a time
KERNEL_HEADS, KERNEL_KV_HEADS, HEAD_DIM = 8, 4, 64
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative error of the kernel's whole output


@dataclass(frozen=True, kw_only=True)
class Decoding(StudyOfCalls):
    """Settings."""

    only: tuple[Literal["model", "kernel"], ...] = ("model", "kernel")
    """What to measure."""
    lengths: tuple[int, ...] = (1_000, 9_000, 30_000, 60_000, 1_000_000)
    """Tokens that the model reads before it decodes."""
    tokens: int = 320
    """Tokens decoded from each length on."""
    segment_lengths: tuple[int, ...] = (2048, 4096, 8192)
    """Segments of the model, at rates of 1, 2 and 4."""
    rows: tuple[int, ...] = (60_000, 1_000_000)
    """Rows of the kernel's keys."""
    repeats: int = 9
    """Times that the kernel is timed."""
    copied_bytes: int = 1 << 28
    """Bytes that are copied before each call of the kernel."""


@dataclass(frozen=True, slots=True)
class Point:
    """Measurements from one length of text on."""

    tokens: int
    milliseconds_per_token: float
    """Mean over positions of the median over the tokens decoded there."""
    rows_per_head: int
    """Maximum over layers, heads and positions."""
    formula: int
    """``sum_i ceil(min(w_i, t) / r_i)`` at the last position."""
    cache_bytes: int
    """Maximum allocated at any position."""


def check_equality() -> float:
    """Largest difference of cached and uncached logits of a small model in float64."""
    config = LongNetConfig(**{**SIZES, "num_layers": 2}, segment_lengths=[64, 128, 256], dilation_rates=[1, 2, 4])
    model, ids = LongNetLM(config).double().eval(), torch.randint(256, (1, 300))
    cache = LongNetCache(config)
    cached = [model(chunk, cache=cache) for chunk in [*ids[:, :200].split(77, dim=1), *ids[:, 200:].split(1, dim=1)]]
    return float((torch.cat(cached, dim=1) - model(ids)).abs().max())


def read(model: LongNetLM, cache: LongNetCache, num_tokens: int) -> None:
    """Read random text, chunk by chunk."""
    for chunk in torch.randint(model.config.vocab_size, (1, num_tokens)).split(CHUNK, dim=1):
        model.hidden_states(chunk, cache=cache)


def decode(model: LongNetLM, cache: LongNetCache, num_tokens: int) -> Iterator[float]:
    """Decode greedily, yielding the milliseconds of each token."""
    token: Tensor = torch.zeros(1, 1, dtype=torch.int64)

    def step() -> None:
        nonlocal token
        token = model(token, cache=cache)[:, -1:].argmax(dim=-1)

    for _ in range(num_tokens):
        yield 1e3 * seconds(step)


def seen_rows(pattern: Pattern, rows: int, kv_heads: int) -> Tensor:
    """bool ``[G, M]``: the rows that the last of ``rows`` rows sees, for every head."""
    return pattern.counts(torch.tensor([rows - 1]), torch.arange(rows), kv_heads, is_causal=True)[:, 0] > 0


def measure_model(model: LongNetLM, length: int, num_tokens: int) -> Point:
    """Read ``length`` tokens, then decode ``num_tokens / PLACES`` at each position and read on to the next."""
    config, cache = model.config, LongNetCache(model.config)
    distance = max(config.segment_lengths) // PLACES
    times, rows, sizes = [], [], []
    for place in range(PLACES):
        read(model, cache, length + place * distance - cache.tokens_seen[0] if place else length)
        rows += [count for layer in range(config.num_layers) for count in cache.rows_per_head(layer)[0]]
        times.append(statistics.median(decode(model, cache, num_tokens // PLACES)))
        sizes.append(cache.num_bytes)
    pairs = zip(config.segment_lengths, config.dilation_rates, strict=True)
    formula = sum(-(-min(w, cache.tokens_seen[0]) // r) for w, r in pairs)
    return Point(length, statistics.mean(times), max(rows), formula, max(sizes))


def measure_kernel(given: Decoding, name: str, pattern: Pattern, rows: int, dtype: torch.dtype) -> dict[str, Any]:
    """Median times of the last row's call and of the copies before it, and the ratio of their bytes per second.

    Raises:
        SystemExit: the output differs from a float64 softmax by more than rounding explains; nothing is timed.
    """
    size = (1, min(rows, 1 << 15), KERNEL_KV_HEADS, HEAD_DIM)
    query = torch.randn(1, 1, KERNEL_HEADS, HEAD_DIM).to(dtype)
    key, value = (torch.randn(size).to(dtype).repeat(1, -(-rows // size[1]), 1, 1)[:, :rows] for _ in range(2))
    seen = seen_rows(pattern, rows, KERNEL_KV_HEADS)

    def call() -> Tensor:
        return attend(query, key, value, pattern, is_causal=True, query_offset=rows - 1)

    counts = pattern.counts(torch.tensor([rows - 1]), torch.arange(rows), KERNEL_KV_HEADS, is_causal=True)[0, 0]
    keys, values = (x[0, seen[0], 0].double() for x in (key, value))
    queries = query[0, 0, : KERNEL_HEADS // KERNEL_KV_HEADS].double()
    scores = queries @ keys.T / HEAD_DIM**0.5 + counts[seen[0]].double().log()
    expected = scores.softmax(-1) @ values
    error = float((call()[0, 0, : len(queries)].double() - expected).norm() / expected.norm())
    if not error <= TOLERANCE[dtype]:
        raise SystemExit(f"not timed, because it is wrong: {name}, {rows} rows, {dtype}: {error:.1e}")
    source = torch.ones(given.copied_bytes, dtype=torch.int8)
    target = torch.empty_like(source).copy_(source)
    copies, times, following = [], [], []
    for _ in range(given.repeats):
        copies.append(seconds(lambda: target.copy_(source)))
        times.append(seconds(call))
        following.append(seconds(call))
    read, copied, warm = (statistics.median(x) for x in (times, copies, following))
    num_bytes = 2 * int(seen.sum()) * HEAD_DIM * dtype.itemsize
    bandwidths = num_bytes / read, 2 * source.numel() / copied
    return {
        "pattern": name,
        "rows": rows,
        "dtype": str(dtype).removeprefix("torch."),
        "heads": KERNEL_HEADS,
        "kv_heads": KERNEL_KV_HEADS,
        "head_dim": HEAD_DIM,
        "seconds": read,
        "following_seconds": warm,
        "fastest": min(times),
        "key_value_bytes": num_bytes,
        "bytes_per_second": bandwidths[0],
        "copy_bytes_per_second": bandwidths[1],
        "error": error,
        "ratio": bandwidths[0] / bandwidths[1],
    }


def kernel(given: Decoding) -> list[dict[str, Any]]:
    """The call of the last row alone, with a pattern of all rows, and with the model's pattern."""
    results = []
    for dtype in TOLERANCE:
        for rows in given.rows:
            for name, pattern in (("all rows", DilatedPattern([rows], [1])), ("dilated", DilatedPattern(**PATTERN))):
                results.append(measure_kernel(given, name, pattern, rows, dtype))
                print(results[-1], flush=True)
    return results


def whole_model(given: Decoding) -> dict[str, Any]:
    """A model with a cache, measured from each length on."""
    sizes = {**SIZES, **PATTERN, "segment_lengths": list(given.segment_lengths)}
    model = LongNetLM(LongNetConfig(**sizes, layer_segment_shifts=(0, given.segment_lengths[0] // 2))).eval()
    measure_model(model, 1, given.tokens)  # warm up every kernel
    points = []
    for length in given.lengths:
        points.append(asdict(measure_model(model, length, given.tokens)))
        print(points[-1], flush=True)
    return {"model": sizes, "dtype": "float32", "chunk": CHUNK, "points": points}


@torch.no_grad()
def measure(given: Decoding) -> dict[str, Any]:
    """The chosen parts, after a check.

    Raises:
        SystemExit: cached logits differ from those of the whole text; nothing is timed.
    """
    with implementation("auto"):  # the native kernels do not compute in float64
        difference = check_equality()
    if difference > 1e-11:
        raise SystemExit(f"not timed, because cached logits differ from uncached ones by {difference:.1e}")
    results: dict[str, Any] = {"largest_difference_float64": difference}
    if "kernel" in given.only:
        results["kernel"] = kernel(given)
    return results | (whole_model(given) if "model" in given.only else {})


if __name__ == "__main__":
    tiny = {
        "lengths": (100,),
        "tokens": 16,
        "segment_lengths": (64, 128, 256),
        "rows": (9_000,),
        "repeats": 2,
        "copied_bytes": 1 << 20,
    }
    run(Decoding, measure, text=__doc__, name="decoding", group="models", tiny=tiny)
