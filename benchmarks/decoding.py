"""Decoding: time per token, cached rows and memory after a short and a long text, beside the formula.

    python -m benchmarks.decoding

The correctness gate runs first: cached logits equal those of the whole text in one call. A token's cost depends on how
far its segments have filled, so every length is measured at places spread over one longest segment from there on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.benchmarks.results import module_command, origin, write_json
from dilated_attention_pytorch.models import LongNetCache, LongNetConfig, LongNetLM

PATTERN: dict[str, Any] = {"segment_lengths": [2048, 4096, 8192], "dilation_rates": [1, 2, 4]}
SIZES: dict[str, Any] = {"vocab_size": 256, "embed_dim": 256, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4}
PLACES = 8  # over one longest segment
CHUNK = 1024  # tokens read at a time
LIMIT = 1.5  # time per token at 60,000 tokens over that at 9,000


@dataclass(frozen=True, slots=True)
class Point:
    """What was measured from one length of text on."""

    tokens: int
    milliseconds_per_token: float
    """Mean over the places of the median over the tokens decoded there."""
    rows_per_head: int
    """The most that a layer and head held at any place."""
    formula: int
    """``sum_i ceil(min(w_i, t) / r_i)`` at the last place."""
    cache_bytes: int
    """The most that was allocated at any place."""


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
    for _ in range(num_tokens):
        begin = time.perf_counter()
        token = model(token, cache=cache)[:, -1:].argmax(dim=-1)
        yield 1e3 * (time.perf_counter() - begin)


def measure(model: LongNetLM, length: int, num_tokens: int) -> Point:
    """Read ``length`` tokens, then at each place decode ``num_tokens / PLACES`` and read on to the next."""
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


@torch.no_grad()
def main() -> int:
    """Print a table and write it, with the machine and the command it came from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1_000, 9_000, 30_000, 60_000])
    parser.add_argument("--tokens", type=int, default=320, help="tokens decoded from each length on")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/decoding.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    difference = check_equality()
    if difference > 1e-11:
        print(f"cached logits differ from uncached ones by {difference:.1e}: nothing was measured", file=sys.stderr)
        return 1
    model = LongNetLM(LongNetConfig(**SIZES, **PATTERN, layer_segment_shifts=(0, 1024))).eval()
    here = origin(module_command())
    measure(model, 1, arguments.tokens)  # the first calls of every kernel
    points = [measure(model, length, arguments.tokens) for length in arguments.lengths]
    print(f"{SIZES | PATTERN}\nlargest difference of cached and uncached logits, float64: {difference:.1e}")
    print(f"{'tokens':>8} {'ms/token':>9} {'rows/head':>10} {'formula':>8} {'cache MB':>9}")
    for point in points:
        print(
            f"{point.tokens:>8} {point.milliseconds_per_token:>9.2f} {point.rows_per_head:>10} {point.formula:>8} "
            f"{point.cache_bytes / 1e6:>9.2f}"
        )
    by_length = {point.tokens: point.milliseconds_per_token for point in points}
    ratio = by_length[60_000] / by_length[9_000] if {60_000, 9_000} <= by_length.keys() else None
    if ratio is not None:
        print(f"time per token at 60,000 over 9,000: {ratio:.2f} (limit {LIMIT})")
    results = {
        "machine": here, "model": SIZES | PATTERN | {"layer_segment_shifts": [0, 1024]}, "dtype": "float32",
        "chunk": CHUNK, "largest_difference_float64": difference, "points": [asdict(point) for point in points],
        "ratio_60000_over_9000": ratio, "limit": LIMIT,
    }  # fmt: skip
    write_json(arguments.output, results)
    print(f"written: {arguments.output}")
    return 0 if ratio is None or ratio <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
