"""Lower bound of the CPU kernels' time: their matrix products alone, compared with dense PyTorch attention.

    python -m benchmarks.products [--tiny] [--avx2] [--head-dim D] [--output FILE]

The products are those of the kernels' own sources, in the sizes that the kernels use, on operands that stay in a core's
caches, each thread independently. ``least`` is the time per operation of the products alone, relative to dense
attention at 8,192 rows: the ratio that the kernels would have if the softmax cost nothing.
"""

from __future__ import annotations

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

from dilated_attention_pytorch.benchmarks.results import module_command, origin
from dilated_attention_pytorch.benchmarks.shapes import BACKWARD_FLOPS, FORWARD_FLOPS
from dilated_attention_pytorch.kernels.compilation import SOURCES, build_of_this_machine, find_compiler

from .implementation import LEAST_VECTORS
from .options import parse, parser_of, write_results

DENSE_ROWS, DENSE_HEADS = 8192, 4
OPERATIONS = 4e10  # per sample and thread
ROUNDS = 5
SOURCE = r"""
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "vectors.h"

namespace dilated_attention {
template <class C>
void repeat(const at::Tensor& a, const at::Tensor& b, at::Tensor& c, int64_t count, bool is_added) {
  const int64_t m = a.size(1), k = a.size(2), n = c.size(2);
  at::parallel_for(0, a.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      for (int64_t x = 0; x < count; x++)
        multiply(
            m, n, k, a.const_data_ptr<C>() + i * m * k, k, b.const_data_ptr<C>() + i * k * n, n,
            c.mutable_data_ptr<float>() + i * m * n, n, is_added);
    at::native::cpublas::brgemm_release(kPair<C> == 2);
  });
}

void products(const at::Tensor& a, const at::Tensor& b, at::Tensor c, int64_t count, bool is_added) {
  if (a.scalar_type() == at::kFloat)
    repeat<float>(a, b, c, count, is_added);
  else
    repeat<Factor<BFloat16>>(a, b, c, count, is_added);
}
}  // namespace dilated_attention

TORCH_LIBRARY(dilated_attention_products, m) {
  m.def("products(Tensor a, Tensor b, Tensor(a!) c, int count, bool is_added) -> ()", &dilated_attention::products);
}
"""


def load_products() -> None:
    """Compile a loop around the kernels' own product, with the compiler flags of the kernels."""
    build = build_of_this_machine()
    with tempfile.TemporaryDirectory() as scratch:
        source, library = Path(scratch) / "products.cpp", Path(scratch) / "products.so"
        source.write_text(SOURCE)
        command = [str(find_compiler()), str(source), f"-I{SOURCES}", *build.arguments, "-o", str(library)]
        subprocess.run(command, check=True)
        torch.ops.load_library(library)


def factor_dtypes() -> tuple[torch.dtype, ...]:
    """Dtypes to measure products in: bfloat16 too if the processor multiplies it."""
    is_wide = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.cpu._is_avx512_bf16_supported()
    return (torch.float32, torch.bfloat16) if is_wide else (torch.float32,)


def sizes_of(head_dim: int, dtype: torch.dtype) -> dict[str, list[tuple[int, int, int, bool]]]:
    """Rows, columns and depth of the products of a tile and a block, and whether they are accumulated."""
    rows = 256 if dtype == torch.float32 else 128
    return {
        "forward": [(rows, 256, head_dim, False), (rows, head_dim, 256, True)],
        "backward": [
            (128, 64, head_dim, False),
            (128, 64, head_dim, False),
            (128, head_dim, 64, True),
            (128, head_dim, 64, True),
            (head_dim, 64, 128, True),
        ],
    }


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def products_of(sizes: list[tuple[int, int, int, bool]], dtype: torch.dtype, least: float) -> Callable[[], float]:
    """A function that measures operations per second of all threads, in products of these sizes in turn.

    ``least``: operations of each thread in a measurement.
    """
    threads, operations = torch.get_num_threads(), sum(2 * m * n * k for m, n, k, _ in sizes)
    count = max(1, int(least / operations))
    operands = [
        (torch.randn(threads, m, k).to(dtype), torch.randn(threads, k, n).to(dtype), torch.zeros(threads, m, n))
        for m, n, k, _ in sizes
    ]

    def multiply_all() -> None:
        for x, (*_, is_added) in zip(operands, sizes, strict=True):
            torch.ops.dilated_attention_products.products(*x, count, is_added)

    return lambda: threads * count * operations / seconds(multiply_all)


def dense_attention(head_dim: int, dtype: torch.dtype, rows: int) -> dict[str, Callable[[], float]]:
    """Functions that measure operations per second of PyTorch's attention: forward, and forward and backward."""
    query, key, value, grad = (torch.randn(1, DENSE_HEADS, rows, head_dim).to(dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    pairs = DENSE_HEADS * head_dim * rows**2

    def attend() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    def forward() -> float:
        with torch.no_grad():
            return FORWARD_FLOPS * pairs / seconds(attend)

    def both() -> float:
        return (FORWARD_FLOPS + BACKWARD_FLOPS) * pairs / seconds(lambda: torch.autograd.grad(attend(), leaves, grad))

    return {"dense_forward": forward, "dense_forward_backward": both}


def measure(head_dim: int, dtype: torch.dtype, rows: int, operations: float) -> dict[str, Any]:
    """Medians over rounds: rates in GFLOP/s, and the minimum fraction of dense attention's time."""
    contestants = dense_attention(head_dim, dtype, rows) | {
        f"products_{name}": products_of(sizes, dtype, operations) for name, sizes in sizes_of(head_dim, dtype).items()
    }
    rounds = [{name: rate() for name, rate in contestants.items()} for _ in range(ROUNDS + 1)][1:]
    whole = FORWARD_FLOPS + BACKWARD_FLOPS
    least = {
        "forward": statistics.median(x["dense_forward"] / x["products_forward"] for x in rounds),
        "forward_backward": statistics.median(
            x["dense_forward_backward"]
            * (FORWARD_FLOPS / x["products_forward"] + BACKWARD_FLOPS / x["products_backward"])
            / whole
            for x in rounds
        ),
    }
    gflops = {name: statistics.median(x[name] for x in rounds) / 1e9 for name in contestants}
    name = str(dtype).removeprefix("torch.")
    print(
        f"{name}, D = {head_dim}, GFLOP/s: {', '.join(f'{k} {v:.0f}' for k, v in gflops.items())}; "
        f"least {least['forward']:.2f} | {least['forward_backward']:.2f}",
        flush=True,
    )
    return {"dtype": name, "head_dim": head_dim, "gflops": gflops, "least": least}


def main() -> int:
    """Measure both dtypes and write the result."""
    parser = parser_of(__doc__)
    parser.add_argument("--head-dim", type=int, default=64, help="width of the heads")
    parser.add_argument("--avx2", action="store_true", help="in a process that uses no more than AVX2")
    options = parse(parser, "products_avx2.json" if "--avx2" in sys.argv else "products.json")
    if options.avx2 and any(os.environ.get(name) != value for name, value in LEAST_VECTORS.items()):
        command = [sys.executable, "-m", "benchmarks.products", *sys.argv[1:]]
        return subprocess.run(command, env=os.environ | LEAST_VECTORS, check=False).returncode
    load_products()
    rows, operations = (512, 4e7) if options.tiny else (DENSE_ROWS, OPERATIONS)
    results = [measure(options.head_dim, dtype, rows, operations) for dtype in factor_dtypes()]
    write_results(options.output, "attention", {"machine": origin(module_command()), "results": results})
    print(f"written: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
