"""Decoding: time per token, cached rows and memory after short and long texts, compared with the formula.

    python -m benchmarks.decoding [--tiny] [--only model kernel small] [--impl auto|native|aten] [--output FILE]

The correctness gate runs first: cached logits must equal those of the whole text in one call. A token's cost depends on
how full its segments are, so every length is measured at positions spread over one longest segment from there on.

The part "kernel" measures one call: the last of many rows through ``attend``. Its rate, the bytes of the keys and
values that it sees over its time, is compared with that of a copy of a quarter of a GiB before each call (bytes read
plus written). The copy also evicts the keys and the program from all caches; the next call finds only what fits there.

The part "small" measures small calls with one thread and with two, on the machine as it is and beside two busy
processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch import DilatedPattern, Pattern, attend
from dilated_attention_pytorch.benchmarks.results import module_command, origin
from dilated_attention_pytorch.models import LongNetCache, LongNetConfig, LongNetLM
from dilated_attention_pytorch.ops import implementation

from .implementation import add_choice, chosen, in_words, judged
from .options import parse, parser_of, write_results

PATTERN: dict[str, Any] = {"segment_lengths": [2048, 4096, 8192], "dilation_rates": [1, 2, 4]}
SIZES: dict[str, Any] = {"vocab_size": 256, "embed_dim": 256, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4}
PLACES = 8  # positions over one longest segment
CHUNK = 1024  # tokens read at a time
LIMIT = 1.5  # time per token at 60,000 tokens over that at 9,000
KERNEL_ROWS = (60_000, 1_000_000)
KERNEL_HEADS, KERNEL_KV_HEADS, HEAD_DIM = 8, 4, 64
SMALL_CALLS = ((1, 60_000, 1), (1, 2000, 1), (64, 64, 1), (256, 256, 1), (128, 128, 4))  # queries, keys, sequences
LEAST_BANDWIDTH = 0.6  # rate of keys and values, relative to that of a copy
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"  # until its parent ends
COPIED_BYTES = 1 << 28
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative error of the kernel's whole output


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
    key_value_bytes: float
    """Bytes of the rows that a token sees in all layers, mean over positions."""

    @property
    def bytes_per_second(self) -> float:
        """Keys and values read per second, over the whole time of a token."""
        return 1e3 * self.key_value_bytes / self.milliseconds_per_token


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


def seen_rows(pattern: Pattern, rows: int, kv_heads: int) -> Tensor:
    """bool ``[G, M]``: the rows that the last of ``rows`` rows sees, for every head."""
    return pattern.counts(torch.tensor([rows - 1]), torch.arange(rows), kv_heads, is_causal=True)[:, 0] > 0


def key_value_bytes(config: LongNetConfig, tokens: int) -> int:
    """Bytes of the rows that the last of ``tokens`` tokens sees, over all layers."""
    assert config.num_kv_heads is not None
    rows = sum(
        int(seen_rows(pattern, tokens, config.num_kv_heads).sum())
        for pattern in map(config.pattern, range(config.num_layers))
    )
    return 2 * 4 * rows * (config.embed_dim // config.num_heads)


def measure(model: LongNetLM, length: int, num_tokens: int) -> Point:
    """Read ``length`` tokens, then decode ``num_tokens / PLACES`` at each position and read on to the next."""
    config, cache = model.config, LongNetCache(model.config)
    distance = max(config.segment_lengths) // PLACES
    times, rows, sizes, seen = [], [], [], []
    for place in range(PLACES):
        read(model, cache, length + place * distance - cache.tokens_seen[0] if place else length)
        rows += [count for layer in range(config.num_layers) for count in cache.rows_per_head(layer)[0]]
        times.append(statistics.median(decode(model, cache, num_tokens // PLACES)))
        sizes.append(cache.num_bytes)
        seen.append(key_value_bytes(config, cache.tokens_seen[0]))
    pairs = zip(config.segment_lengths, config.dilation_rates, strict=True)
    formula = sum(-(-min(w, cache.tokens_seen[0]) // r) for w, r in pairs)
    return Point(length, statistics.mean(times), max(rows), formula, max(sizes), statistics.mean(seen))


def copy_seconds(source: Tensor, target: Tensor) -> float:
    begin = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - begin


def measure_kernel(name: str, pattern: Pattern, rows: int, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
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
    source = torch.ones(COPIED_BYTES if repeats > 2 else 1 << 20, dtype=torch.int8)
    target = torch.empty_like(source).copy_(source)
    copies: list[float] = []
    times: list[float] = []
    following: list[float] = []
    for _ in range(repeats):
        copies.append(copy_seconds(source, target))
        for taken in (times, following):
            begin = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begin)
    read, copied, warm = (statistics.median(x) for x in (times, copies, following))
    num_bytes = 2 * int(seen.sum()) * HEAD_DIM * dtype.itemsize
    bandwidths = num_bytes / read, 2 * source.numel() / copied
    ratio = bandwidths[0] / bandwidths[1]
    words = str(dtype).removeprefix("torch.")
    print(
        f"{name:>8} {rows:>9,} rows {words:>8}: {1e3 * read:8.3f} ms for {num_bytes / 1e6:8.1f} MB of keys and "
        f"values = {bandwidths[0] / 1e9:5.1f} GB/s, {ratio:.3f} of a copy's {bandwidths[1] / 1e9:.1f} GB/s "
        f"{in_words(ratio, LEAST_BANDWIDTH, is_least=True)}  (the next call {1e3 * warm:.3f} ms, error {error:.0e})",
        flush=True,
    )
    return {
        "pattern": name,
        "rows": rows,
        "dtype": words,
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
        "ratio": ratio,
        **judged(ratio, LEAST_BANDWIDTH, is_least=True),
    }


def kernel(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The call of the last row alone, with a pattern of all rows, and with the model's pattern."""
    results = []
    for dtype in TOLERANCE:
        for rows in (9_000,) if arguments.tiny else KERNEL_ROWS:
            for name, pattern in (("all rows", DilatedPattern([rows], [1])), ("dilated", DilatedPattern(**PATTERN))):
                results.append(measure_kernel(name, pattern, rows, dtype, 2 if arguments.tiny else 9))
    return results


def small(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Calls that take a fraction of a millisecond."""
    program = [sys.executable, "-c", BUSY, str(os.getpid())]
    busy: list[subprocess.Popen[bytes]] = []
    results = []
    try:
        for num_busy in (0, 2):
            busy += [subprocess.Popen(program) for _ in range(num_busy)]
            for dtype in TOLERANCE:
                for rows, keys, batch in SMALL_CALLS:
                    sizes = ((rows, KERNEL_KV_HEADS), (keys, KERNEL_KV_HEADS), (keys, KERNEL_KV_HEADS))
                    query, key, value = (torch.randn(batch, *size, HEAD_DIM).to(dtype) for size in sizes)
                    pattern = DilatedPattern(**PATTERN)
                    for threads in (1, 2):
                        torch.set_num_threads(threads)
                        times = []
                        for _ in range(4 if arguments.tiny else 500):
                            begin = time.perf_counter()
                            attend(query, key, value, pattern, is_causal=True, query_offset=keys - rows)
                            times.append(time.perf_counter() - begin)
                        result = {"batch": batch, "rows": rows, "keys": keys, "dtype": str(dtype), "threads": threads}
                        result |= {"busy": num_busy, "median": statistics.median(times), "mean": statistics.mean(times)}
                        results.append(result)
                        print(f"{result}", flush=True)
    finally:
        torch.set_num_threads(arguments.threads)
        for process in busy:
            process.kill()
            process.wait()
    return results


def whole_model(arguments: argparse.Namespace) -> dict[str, Any]:
    """A model with a cache, measured from each length on."""
    pattern = {"segment_lengths": [64, 128], "dilation_rates": [1, 2]} if arguments.tiny else PATTERN
    model = LongNetLM(
        LongNetConfig(**SIZES, **pattern, layer_segment_shifts=(0, pattern["segment_lengths"][0] // 2))
    ).eval()
    measure(model, 1, arguments.tokens)  # warm up every kernel
    points = [measure(model, length, arguments.tokens) for length in arguments.lengths]
    print(f"{SIZES | pattern}")
    print(f"{'tokens':>8} {'ms/token':>9} {'rows/head':>10} {'formula':>8} {'cache MB':>9} {'GB/s of K and V':>16}")
    for point in points:
        print(
            f"{point.tokens:>8} {point.milliseconds_per_token:>9.2f} {point.rows_per_head:>10} {point.formula:>8} "
            f"{point.cache_bytes / 1e6:>9.2f} {point.bytes_per_second / 1e9:>16.2f}"
        )
    by_length = {point.tokens: point.milliseconds_per_token for point in points}
    ratio = by_length[60_000] / by_length[9_000] if {60_000, 9_000} <= by_length.keys() else None
    if ratio is not None:
        print(f"time per token at 60,000 over 9,000: {ratio:.2f} {in_words(ratio, LIMIT)}")
    return {
        "model": SIZES | pattern | {"layer_segment_shifts": list(model.config.layer_segment_shifts)},
        "dtype": "float32",
        "chunk": CHUNK,
        "points": [{**asdict(point), "key_value_bytes_per_second": point.bytes_per_second} for point in points],
        "ratio_60000_over_9000": ratio,
        "limit": LIMIT,
    }


@torch.no_grad()
def main() -> int:
    """Print a table; write the results with the machine and the command."""
    parser = parser_of(__doc__)
    parts = ("model", "kernel", "small")
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts), help="which parts to run")
    add_choice(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1_000, 9_000, 30_000, 60_000, 1_000_000])
    parser.add_argument("--tokens", type=int, default=320, help="tokens decoded from each length on")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parse(parser, "decoding.json")
    if arguments.tiny:
        arguments.lengths, arguments.tokens = [100], 16
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    difference = check_equality()  # in float64, which the native kernels do not compute
    if difference > 1e-11:
        print(f"cached logits differ from uncached ones by {difference:.1e}: nothing was measured", file=sys.stderr)
        return 1
    with implementation(arguments.impl):
        results: dict[str, Any] = {
            "machine": origin(module_command()),
            "impl": chosen(arguments.impl),
            "largest_difference_float64": difference,
        }
        print(f"impl: {results['impl']}\nlargest difference of cached and uncached logits, float64: {difference:.1e}")
        if "kernel" in arguments.only:
            results["kernel"] = kernel(arguments)
        if "small" in arguments.only:
            results["small"] = small(arguments)
        if "model" in arguments.only:
            results |= whole_model(arguments)
    write_results(arguments.output, "models", results)
    print(f"written: {arguments.output}")
    ratio = results.get("ratio_60000_over_9000")
    return 0 if ratio is None or ratio <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
