"""Time and memory of dilated attention on this machine, as ratios to dense attention's own rate in the same run.

    python -m benchmarks.attention [--tiny] [--only speed head_dims avx2 growth long_growth memory paper floor]
        [--impl auto|native|aten] [--rows N ...] [--head-dims D ...] [--output FILE]

A time is printed only if the call's sampled rows agree with the definition. The bound of a time is the exact number of
operations of its pattern divided by the rate of PyTorch's dense attention at 8,192 rows, in the same run and dtype.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dilated_attention_pytorch import DilatedPattern, attend, attend_with_lse
from dilated_attention_pytorch.benchmarks.exactness import draw_samples, judge, sampled_gradient
from dilated_attention_pytorch.benchmarks.results import module_command, origin
from dilated_attention_pytorch.benchmarks.shapes import Case, DtypeName
from dilated_attention_pytorch.memory import begin_peak, resident
from dilated_attention_pytorch.ops import implementation

from .implementation import LEAST_VECTORS, add_choice, chosen, in_words, judged
from .options import parse, parser_of, write_results

SPEED = ((2048, 1), (4096, 2), (8192, 4))
PAPER = ((2048, 1), (4096, 2), (8192, 4), (16384, 6), (32768, 12))
DENSE_ROWS = 8192
LIMITS = {torch.float32: (0.50, 0.65), torch.bfloat16: (0.30, 0.45)}  # of the bound: forward, forward + backward
CAUSAL = 1.1  # allowed factor for causal calls
LONG_SECONDS = 10.0  # calls that take longer are timed only twice
LIMIT_AVX2, LIMIT_GROWTH, LIMIT_MEMORY = 1.0, 66.0, 0.5


def pattern_of(groups: tuple[tuple[int, int], ...]) -> DilatedPattern:
    return DilatedPattern([w for w, _ in groups], [r for _, r in groups])


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


Operands = tuple[Tensor, Tensor, Tensor]


def operands(rows: int, heads: int, dtype: torch.dtype, head_dim: int = 64) -> tuple[Operands, Tensor]:
    """Query, key and value, which require gradients, and the gradient of the output."""
    generator = torch.Generator().manual_seed(rows)
    q, k, v, g = (torch.randn(1, rows, heads, head_dim, generator=generator).to(dtype) for _ in range(4))
    return (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), g


class Dense:
    """Dense scaled dot-product attention: the rate that this machine reaches."""

    def __init__(self, rows: int, heads: int, dtype: torch.dtype, head_dim: int, *, is_causal: bool) -> None:
        self.inputs, self.grad = operands(rows, heads, dtype, head_dim)
        self.is_causal = is_causal
        # PyTorch counts the whole square for its own causal attention; here only the triangle counts.
        pairs = rows * (rows + 1) // 2 if is_causal else rows**2
        self.flops = 4 * head_dim * heads * pairs

    def forward(self) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in self.inputs)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return out.transpose(1, 2)

    def forward_seconds(self) -> float:
        with torch.no_grad():
            return seconds(self.forward)

    def both_seconds(self) -> float:
        return seconds(lambda: torch.autograd.grad(self.forward(), self.inputs, self.grad))


def gate(groups: tuple[tuple[int, int], ...], inputs: Operands, *, is_causal: bool) -> dict[str, float]:
    """Relative errors of the timed call on sampled rows, and of the gradients through them.

    Raises:
        SystemExit: they exceed what rounding explains; nothing is timed.
    """
    _, rows, heads, head_dim = inputs[0].shape
    dtypes: dict[torch.dtype, DtypeName] = {
        torch.float32: "float32",
        torch.bfloat16: "bfloat16",
        torch.float64: "float64",
    }
    case = Case(
        shape="study",
        mode="forward_backward",
        rows=rows,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        segment_lengths=tuple(w for w, _ in groups),
        dilation_rates=tuple(r for _, r in groups),
        causal=is_causal,
        dtype=dtypes[inputs[0].dtype],
    )
    samples = draw_samples(case)
    grad = sampled_gradient(case, samples, inputs[0])
    out = attend(*inputs, case.pattern, is_causal=is_causal)
    verdict = judge(case, "pattern", samples, inputs, out, grad, torch.autograd.grad(out, inputs, grad))
    if not verdict.passes:
        raise SystemExit(f"not timed, because it is wrong: {case.name}: {verdict.in_words()}")
    return verdict.errors


def measure(
    groups: tuple[tuple[int, int], ...],
    rows: int,
    heads: int,
    dtype: torch.dtype,
    *,
    is_causal: bool,
    repeats: int,
    head_dim: int = 64,
    limits: tuple[float, float] | None = None,
    dense_rows: int = DENSE_ROWS,
) -> dict[str, Any]:
    """Median times of this package and of dense attention, timed alternately, and their ratio per operation.

    ``limits`` are those of the ratio: forward, forward + backward.
    """
    inputs, grad = operands(rows, heads, dtype, head_dim)
    errors = gate(groups, inputs, is_causal=is_causal)
    pattern = pattern_of(groups)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        attend(*inputs, pattern, is_causal=is_causal)
    flops = counter.get_total_flops()

    def forward() -> Tensor:
        return attend(*inputs, pattern, is_causal=is_causal)

    def forward_seconds() -> float:
        with torch.no_grad():
            return seconds(forward)

    def both_seconds() -> float:
        return seconds(lambda: torch.autograd.grad(forward(), inputs, grad))

    dense = Dense(dense_rows, heads, dtype, head_dim, is_causal=is_causal)
    result: dict[str, Any] = {
        "groups": groups,
        "rows": rows,
        "heads": heads,
        "head_dim": head_dim,
        "dtype": str(dtype).removeprefix("torch."),
        "causal": is_causal,
        "forward_flops": flops,
        "largest_sampled_errors": errors,
    }
    for name, ours, theirs, factor, limit in (
        ("forward", forward_seconds, dense.forward_seconds, 1.0, limits and limits[0]),
        ("forward_backward", both_seconds, dense.both_seconds, 3.5, limits and limits[1]),
    ):
        times: list[float] = []
        dense_times: list[float] = []
        # With AVX2 alone PyTorch's backward in bfloat16 takes most of a minute.
        for _ in range(repeats if theirs() < LONG_SECONDS else 2):
            dense_times.append(theirs())
            times.append(ours())
            dense_times.append(theirs())
        rate = factor * dense.flops / statistics.median(dense_times)
        ratio = statistics.median(times) / (factor * flops / rate)
        result[name] = {
            "seconds": statistics.median(times),
            "fastest": min(times),
            "slowest": max(times),
            "dense_seconds": statistics.median(dense_times),
            "dense_rows": dense_rows,
            "dense_rate_gflops": rate / 1e9,
            "ratio_to_bound": ratio,
        }
        if limit is not None:
            result[name] |= judged(ratio, limit)
    return result


def show(result: dict[str, Any]) -> None:
    both, forward = result["forward_backward"], result["forward"]
    words = [
        f"{x['seconds']:8.3f} s = {x['ratio_to_bound']:.3f} x bound "
        + (in_words(x["ratio_to_bound"], x["limit"]) if "limit" in x else "")
        for x in (forward, both)
    ]
    print(
        f"N={result['rows']:>7,} H={result['heads']:>2} D={result['head_dim']:>3} {result['dtype']:>8} "
        f"causal={result['causal']!s:>5}  forward {words[0]}  forward+backward {words[1]}  "
        f"(dense forward {forward['dense_seconds']:.3f} s, {forward['dense_rate_gflops']:.0f} and "
        f"{both['dense_rate_gflops']:.0f} GFLOP/s, "
        f"largest error {max(result['largest_sampled_errors'].values()):.1e})",
        flush=True,
    )


def limits_of(dtype: torch.dtype, *, is_causal: bool) -> tuple[float, float]:
    """Limits of the ratio to the bound: forward, forward + backward."""
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        return LIMIT_AVX2, LIMIT_AVX2
    forward, both = LIMITS[dtype]
    return (CAUSAL * forward, CAUSAL * both) if is_causal else (forward, both)


def timed(rows: list[int], head_dims: list[int], repeats: int, *, is_tiny: bool) -> list[dict[str, Any]]:
    results = []
    heads, rows, repeats, dense_rows = (1, [1024], 1, 256) if is_tiny else (8, rows, repeats, DENSE_ROWS)
    head_dims, dtypes = (head_dims[:1], [torch.float32]) if is_tiny else (head_dims, list(LIMITS))
    for number, head_dim, dtype, is_causal in itertools.product(rows, head_dims, dtypes, (False, True)):
        result = measure(
            SPEED,
            number,
            heads,
            dtype,
            is_causal=is_causal,
            repeats=min(repeats, 3) if number > 20000 else repeats,
            head_dim=head_dim,
            limits=limits_of(dtype, is_causal=is_causal),
            dense_rows=dense_rows,
        )
        show(result)
        results.append(result)
    return results


def speed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time relative to (FLOPs / dense rate) at 16,384 and 65,536 rows, in float32 and bfloat16."""
    return timed(options.rows, options.head_dims, 5, is_tiny=options.tiny)


def head_dims(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The same at 16,384 rows with heads of 48, 96 and 128."""
    return timed([16384], [48, 96, 128], 3, is_tiny=options.tiny)


def avx2(options: argparse.Namespace) -> dict[str, Any]:
    """The same in a process limited to AVX2: PyTorch's kernels and ours, and the products of oneDNN and MKL."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "speed.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks.attention",
            "--only",
            "speed",
            "--impl",
            options.impl,
            "--rows",
            *map(str, options.rows),
            "--output",
            str(file),
            *(["--tiny"] if options.tiny else []),
        ]
        subprocess.run(command, check=True, env={**os.environ, **LEAST_VECTORS})
        found: dict[str, Any] = json.loads(file.read_text())
    instructions = found["machine"]["vector_instructions"]
    if instructions != "AVX2":
        raise SystemExit(f"PyTorch computes with {instructions} where AVX2 was asked for")
    return {
        "environment": LEAST_VECTORS,
        "vector_instructions": instructions,
        "impl": found["impl"],
        "speed": found["speed"],
    }


def growth_between(small: int, large: int, heads: int) -> dict[str, Any]:
    """Median ratio of several rounds, each with the long call between many short ones: a machine's speed varies."""
    inputs = {rows: operands(rows, heads, torch.float32)[0] for rows in (small, large)}
    pattern = pattern_of(SPEED)

    def mean_of(rows: int, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            attend(*inputs[rows], pattern)
        return (time.perf_counter() - start) / calls

    calls = max(1, large // small // 2)
    times: dict[int, list[float]] = {small: [], large: []}
    with torch.no_grad():
        for rows in times:
            mean_of(rows, 1)
        for _ in range(5):
            before, long, after = mean_of(small, calls), mean_of(large, 1), mean_of(small, calls)
            times[small].append((before + after) / 2)
            times[large].append(long)
    ratios = [long / short for short, long in zip(times[small], times[large], strict=True)]
    ratio, limit = statistics.median(ratios), LIMIT_GROWTH / 64 * large / small
    print(
        f"growth: time at {large:,} rows over time at {small:,}, {heads} heads: {ratio:.2f} {in_words(ratio, limit)} "
        f"(rows: {large / small:.0f} x; rounds: {min(ratios):.1f} to {max(ratios):.1f})"
    )
    return {
        "rows": [small, large],
        "heads": heads,
        "seconds": [statistics.median(t) for t in times.values()],
        "ratio": ratio,
        "ratios": ratios,
        **judged(ratio, limit),
    }


def growth(options: argparse.Namespace) -> dict[str, Any]:
    """Time at 131,072 rows over time at 16,384."""
    return growth_between(1024, 2048, 1) if options.tiny else growth_between(16384, 131072, 8)


def long_growth(options: argparse.Namespace) -> dict[str, Any]:
    """Time at 1,048,576 rows over time at 16,384, with one head."""
    return growth_between(1024, 4096, 1) if options.tiny else growth_between(16384, 1 << 20, 1)


def floor(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Costs that no use of the kernel avoids: its own causal rate at 2,048 rows, and the first touch of the output."""
    results = []
    rows, whole, dense_rows = (256, 1024, 1024) if options.tiny else (2048, 65536, DENSE_ROWS)
    for dtype in (torch.float32, torch.bfloat16):
        x = operands(dense_rows, 8, dtype)[0][0].detach()
        triangles = x.unflatten(1, (-1, rows)).flatten(0, 1)  # the work of the pattern's groups
        times: dict[str, list[float]] = {"dense": [], "triangles": [], "first_touch": []}
        for _ in range(5):
            for name, heads in (("dense", x.transpose(1, 2)), ("triangles", triangles.transpose(1, 2))):
                start = time.perf_counter()
                torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
                times[name].append(time.perf_counter() - start)
            start = time.perf_counter()
            torch.zeros(1, whole, 8, 64, dtype=dtype)
            times["first_touch"].append(time.perf_counter() - start)
        dense, small, touch = (statistics.median(times[name]) for name in ("dense", "triangles", "first_touch"))
        pairs_ratio = (dense_rows + 1) / (rows + 1)
        ratio = small * pairs_ratio / dense
        print(
            f"{dtype}: causal attention at {rows:,} rows takes {ratio:.3f} x its time per pair at {dense_rows:,}; "
            f"filling a fresh output of {whole:,} rows takes {touch:.3f} s"
        )
        results.append(
            {
                "dtype": str(dtype).removeprefix("torch."),
                "causal_time_per_pair_ratio": ratio,
                "output_rows": whole,
                "first_touch_seconds": touch,
            }
        )
    return results


def memory_of_one(rows: int, dtype: torch.dtype, *, is_causal: bool) -> None:
    """In a fresh process: peak resident memory of forward + backward beyond inputs, out, lse and gradients."""
    warm, grad = operands(4096, 8, dtype)
    torch.autograd.grad(attend(*warm, pattern_of(SPEED), is_causal=is_causal), warm, grad)
    del warm, grad
    inputs, grad = operands(rows, 8, dtype)
    if not begin_peak():
        raise SystemExit("memory is read from Linux's /proc, which is not here; leave it out with --only")
    before = resident("VmRSS")
    out, lse = attend_with_lse(*inputs, pattern_of(SPEED), is_causal=is_causal)
    grads = torch.autograd.grad(out, inputs, grad)
    results = sum(x.numel() * x.element_size() for x in (out, lse, *grads))
    transient = resident("VmHWM") - before - results
    print(transient / (inputs[0].numel() * inputs[0].element_size()))


def memory(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Transient memory of forward + backward relative to the size of q, each case in a separate process."""
    results = []
    for dtype in ("float32",) if options.tiny else ("float32", "bfloat16"):
        for causal in (False,) if options.tiny else (False, True):
            rows = 4096 if options.tiny else 65536
            command = [
                sys.executable,
                "-m",
                "benchmarks.attention",
                "--impl",
                options.impl,
                "--memory-of",
                str(rows),
                dtype,
                str(int(causal)),
            ]
            # glibc keeps freed pages of up to 64 MiB. With a fixed threshold they are returned, and the peak is the
            # memory in use; without, the retained pages are counted, too.
            parts = {}
            for name, setting in (("in_use", {"MALLOC_TRIM_THRESHOLD_": "131072"}), ("with_freed_pages", {})):
                run = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **setting})
                parts[name] = float(run.stdout)
            print(
                f"transient memory at {rows:,} rows, {dtype}, causal={causal}: {parts['in_use']:.3f} x the size of q "
                f"{in_words(parts['in_use'], LIMIT_MEMORY)} "
                f"({parts['with_freed_pages']:.3f} with the freed pages that glibc keeps)"
            )
            results.append(
                {
                    "rows": rows,
                    "dtype": dtype,
                    "causal": causal,
                    "parts_of_query": parts,
                    **judged(parts["in_use"], LIMIT_MEMORY),
                }
            )
    return results


def paper(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The paper's own configuration: exact in float64 on sampled rows, then timed in float32."""
    results = []
    heads, dense_rows = (2, 256) if options.tiny else (12, DENSE_ROWS)
    for rows in (401,) if options.tiny else (32768, 40001):
        for is_causal in (False,) if options.tiny else (False, True):
            inputs, _ = operands(rows, heads, torch.float64)
            with implementation("auto"):  # the native kernels do not compute in float64
                errors = gate(PAPER, inputs, is_causal=is_causal)
            print(
                f"paper's configuration, {rows:,} rows, causal={is_causal}: "
                f"relative float64 errors on sampled rows {errors}"
            )
            result = measure(PAPER, rows, heads, torch.float32, is_causal=is_causal, repeats=1, dense_rows=dense_rows)
            result["largest_sampled_errors_float64"] = errors
            show(result)
            results.append(result)
    return results


def main() -> None:
    parser = parser_of(__doc__)
    parts: dict[str, Callable[[argparse.Namespace], Any]] = {
        "speed": speed,
        "head_dims": head_dims,
        "avx2": avx2,
        "growth": growth,
        "long_growth": long_growth,
        "memory": memory,
        "paper": paper,
        "floor": floor,
    }
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts), help="which parts to run")
    add_choice(parser)
    parser.add_argument("--rows", type=int, nargs="+", default=[16384, 65536], help="of the parts speed and avx2")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64], help="of the part speed")
    parser.add_argument("--memory-of", nargs=3, help=argparse.SUPPRESS)
    arguments = parse(parser, "attention.json")
    with implementation(arguments.impl):
        if arguments.memory_of:
            rows, dtype, causal = arguments.memory_of
            memory_of_one(int(rows), getattr(torch, dtype), is_causal=causal == "1")
            return
        results: dict[str, Any] = {"machine": origin(module_command()), "impl": chosen(arguments.impl)}
        print(f"impl: {results['impl']}")
        for name in arguments.only:
            print(f"--- {name}: {(parts[name].__doc__ or '').strip()}", flush=True)
            results[name] = parts[name](arguments)
    write_results(arguments.output, "attention", results)
    print(f"written: {arguments.output}")


if __name__ == "__main__":
    main()
