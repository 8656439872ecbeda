"""``python -m benchmarks.traffic``: operations and memory traffic of the kernels, counted, not timed.

Compares two designs. (a), the implemented one: tiles of rows that take part in the same groups, with one softmax over
all groups. (b): dense tiles and one launch per group; partials of the groups with r > 1 are stored compactly in float32
until the launch of the densest group merges them. Also the published algorithm, which gathers, scatters and merges
dense tensors.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dilated_attention_pytorch.benchmarks.results import module_command, origin, write_json
from dilated_attention_pytorch.benchmarks.shapes import BACKWARD_FLOPS, FORWARD_FLOPS, SHAPES, Case
from dilated_attention_pytorch.kernels.triton import plan
from dilated_attention_pytorch.kernels.triton.configurations import Configuration

from .caching import Replay, bytes_of_run, replay
from .tiling import (
    KERNELS,
    PRODUCTS,
    Kernel,
    blocks_of_dense_launches,
    classes_of,
    configurations_of,
    executed_pairs,
    runs_of,
    tiles_of,
)

FORMAT = "dilated-attention-pytorch traffic 1"
MULTIPROCESSORS = 132
"""Number on the H200 (and H100)."""
CACHES = {"60 MiB": 60 << 20, "40 MiB": 40 << 20, "30 MiB": 30 << 20, "20 MiB": 20 << 20}
"""H200, A100, and half of each: the cache has two halves, and data used by both may be stored twice."""
_STATISTIC = 4
_ROWS = {"paper": 32768, "three": 32768, "slide": 10000}


@dataclass(frozen=True, kw_only=True, slots=True)
class Operations:
    """Operations of one kernel in one configuration."""

    case: Case
    kernel: Kernel
    block_rows: int
    block_run: int
    pairs: int
    """Pairs of the pattern, over all heads."""
    executed: int
    """Pairs that the tiles compute."""
    executed_by_dense_launches: int
    """The same for design (b)."""

    @property
    def ratio(self) -> float:
        """Computed pairs over pairs of the pattern; 1 is optimal."""
        return self.executed / self.pairs

    @property
    def ratio_of_dense_launches(self) -> float:
        """The same for design (b)."""
        return self.executed_by_dense_launches / self.pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class Bytes:
    """Device memory traffic of a forward pass, or of the backward pass after it, with the first candidates."""

    case: Case
    backward: bool
    least: int
    """Every operand read once and every result written once: ``Case.least_bytes``."""
    terms: dict[str, int]
    """Traffic of each operand in design (a) if every kernel finds in the cache what it has read before."""
    replayed: dict[str, int]
    """Design (a) with an LRU cache, by its size."""
    dense_at_best: int
    """Design (b) if all launches together read q, k and v once."""
    dense: int
    """Design (b) if each launch reads its own rows once."""
    published: int
    transient: float
    """Memory of design (a) besides operands and results, relative to the size of q."""
    dense_transient: float
    """The same for design (b): its partials."""
    cache_bytes: int
    """Bytes that the programs of design (a) read from the cache."""
    busy: float
    """Occupancy of the program slots over time, minimum over the kernels."""


def operations_of(case: Case, kernel: Kernel) -> list[Operations]:
    """One entry per block size among the kernel's shipped candidates."""
    found = []
    for chosen in {(one.block_rows, one.block_run): one for one in configurations_of(case, kernel)}.values():
        blocks = runs_of(case, kernel, chosen, tiles_of(case, kernel, chosen)).num_blocks
        dense = blocks_of_dense_launches(case, kernel, chosen)
        row = Operations(
            case=case,
            kernel=kernel,
            block_rows=chosen.block_rows,
            block_run=chosen.block_run,
            pairs=case.num_pairs("pattern"),
            executed=executed_pairs(case, kernel, chosen, blocks),
            executed_by_dense_launches=executed_pairs(case, kernel, chosen, dense),
        )
        found.append(row)
    return found


def operations_of_halves(case: Case) -> dict[str, float]:
    """Computed pairs over those of the pattern, with blocks of 128 keys: for tiles of 128 rows, and for each half of 64
    rows on its own, as the warpgroups (four warps) of the warp-specialised forward kernel compute them."""
    ratios = {}
    for name, rows in (("whole", 128), ("halves", 64)):
        blocks = Configuration(rows, 128, 4, 2)
        number = runs_of(case, "forward", blocks, tiles_of(case, "forward", blocks)).num_blocks
        ratios[name] = executed_pairs(case, "forward", blocks, number) / case.num_pairs("pattern")
    return ratios


def bytes_of(case: Case, *, backward: bool) -> Bytes:
    """Traffic of a pass, by formula and by replay."""
    kernels: tuple[Kernel, ...] = ("query_gradient", "key_gradient") if backward else ("forward",)
    row = case.head_dim * case.torch_dtype.itemsize
    query, key, statistic = row * case.rows * case.heads, row * case.rows * case.kv_heads, _statistics(case)
    if backward:
        # Both gradient kernels read q, dO, k, v, log-sum-exp; the first also reads out, and writes delta for the other.
        terms = {
            "q": 2 * query,
            "k and v": 4 * key,
            "out": query,
            "grad out": 2 * query,
            "gradients": query + 2 * key,
            "log-sum-exp and delta": 4 * statistic,
        }
    else:
        terms = {"q": query, "k and v": 2 * key, "out": query, "log-sum-exp": statistic}
    order = outside = room = 0
    replays: list[Replay] = []
    for kernel in kernels:
        chosen = configurations_of(case, kernel)[0]
        tiles = tiles_of(case, kernel, chosen)
        runs = runs_of(case, kernel, chosen, tiles)
        order = 4 * case.rows * case.kv_heads * tiles.is_ordered
        its_runs = len(runs.tile) * bytes_of_run(tiles) + 8 * len(tiles.kv_head)
        # The order is read for the runs and by the kernel; the runs are written once and read once.
        terms["order of rows"] = terms.get("order of rows", order) + 2 * order
        terms["runs"] = terms.get("runs", 0) + 2 * its_runs
        outside += order + its_runs
        room = max(room, bytes_of_run(tiles) * tiles.lines_per_head * case.kv_heads + 8 * len(tiles.kv_head))
        side_by_side = plan.TILES_PER_MULTIPROCESSOR * MULTIPROCESSORS
        sizes = tuple(CACHES.values())
        replays.append(replay(case, kernel, chosen, tiles, runs, capacities=sizes, side_by_side=side_by_side))
    # Not in the replay, besides the runs: writing the order, and reading out for delta.
    outside += order + (query if backward else 0)
    partial, own_reads = _of_dense_launches(case, backward=backward)
    written = 3 * query + 2 * key + statistic if backward else query + statistic
    at_best = sum(terms.values()) - terms["order of rows"] - terms["runs"]
    return Bytes(
        case=case,
        backward=backward,
        least=_least(case, backward=backward),
        terms=terms,
        replayed={name: outside + sum(one.bytes_by_capacity[size] for one in replays) for name, size in CACHES.items()},
        dense_at_best=at_best + 2 * partial,
        dense=own_reads + written + 2 * partial,
        published=_of_published_route(case, backward=backward),
        transient=(order + room + (statistic if backward else 0)) / query,
        dense_transient=(partial + (statistic if backward else 0)) / query,
        cache_bytes=sum(one.cache_bytes for one in replays),
        busy=min(one.busy for one in replays),
    )


def _statistics(case: Case) -> int:
    return _STATISTIC * case.rows * case.heads


def _least(case: Case, *, backward: bool) -> int:
    forward = _of_mode(case, "forward").least_bytes("pattern")
    return _of_mode(case, "forward_backward").least_bytes("pattern") - forward if backward else forward


def _of_mode(case: Case, mode: Any) -> Case:
    return SHAPES[case.shape].case(rows=case.rows, mode=mode, dtype=case.dtype, causal=case.causal)


def _selected_rows(case: Case, *, sparse_only: bool) -> int:
    """Number of rows of key/value heads, over all groups (or those with r > 1)."""
    return sum(count for group, _, count in classes_of(case) if group.dilation_rate > 1 or not sparse_only)


def _of_dense_launches(case: Case, *, backward: bool) -> tuple[int, int]:
    """Bytes of design (b)'s float32 partials, and bytes that its launches read if each reads its own rows once."""
    ratio, row = case.heads // case.kv_heads, case.head_dim * case.torch_dtype.itemsize
    sparse, rows = _selected_rows(case, sparse_only=True), _selected_rows(case, sparse_only=False)
    numbers = 4 * case.head_dim
    if backward:  # partials of three gradients; both kernels of every launch read q, dO, k, v, log-sum-exp and delta
        partial = sparse * numbers * (ratio + 2)
        return partial, 2 * rows * ((2 * ratio + 2) * row + 2 * ratio * _STATISTIC)
    return sparse * ratio * (numbers + _STATISTIC), rows * (ratio + 2) * row


def _of_published_route(case: Case, *, backward: bool) -> int:
    """In rows of a head: s selected rows over g groups, n rows of a dense tensor; the forward pass adds log-sum-exps.

    Forward: q, k, v gathered (6 s), attention (4 s), scattered into zeros (g n + 2 s), each weighted and added to the
    sum (5 g n + n). Backward: gradients of products and weights (6 g n), dO gathered (2 s), attention (8 s), three
    gradients scattered (3 g n + 6 s) and summed (9 (g - 1) n).
    """
    row = case.head_dim * case.torch_dtype.itemsize
    s = _selected_rows(case, sparse_only=False) * case.heads // case.kv_heads
    n, g = case.rows * case.heads, len(case.segment_lengths)
    if backward:
        return row * (16 * s + 9 * g * n + 9 * (g - 1) * n)
    return row * (12 * s + 6 * g * n + n) + _STATISTIC * (3 * s + 7 * g * n)


def print_operations(rows: list[Operations], console: Console) -> None:
    """Print computed pairs over pairs of the pattern."""
    table = Table(title="pairs computed / pairs of the pattern", title_justify="left")
    for name in ("case", "kernel", "tile x block"):
        table.add_column(name, no_wrap=True)
    for name in ("(a) ordered tiles", "(b) dense launches"):
        table.add_column(name, justify="right")
    before = ""
    for row in rows:
        name = _in_words(row.case)
        if before and name != before:
            table.add_section()
        table.add_row(
            name if name != before else "",
            row.kernel,
            f"{row.block_rows} x {row.block_run}",
            f"{row.ratio:.3f}",
            f"{row.ratio_of_dense_launches:.3f}",
        )
        before = name
    console.print(table)


def print_bytes(rows: list[Bytes], console: Console) -> None:
    """Print bytes over the minimum, by design and cache size."""
    table = Table(title="bytes of device memory / the least", title_justify="left")
    for name in ("case", "pass"):
        table.add_column(name, no_wrap=True)
    caches = [f"(a) {name}" for name in CACHES]
    for name in (
        "least MB",
        "(a) formula",
        *caches,
        "(b) at best",
        "(b)",
        "published",
        "temp/q (a)",
        "temp/q (b)",
        "cache GB",
        "busy",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        ratios = (sum(row.terms.values()), *row.replayed.values(), row.dense_at_best, row.dense, row.published)
        table.add_row(
            _in_words(row.case),
            "backward" if row.backward else "forward",
            f"{row.least / 1e6:,.0f}",
            *(f"{value / row.least:.2f}" for value in ratios),
            f"{row.transient:.3f}",
            f"{row.dense_transient:.2f}",
            f"{row.cache_bytes / 1e9:.2f}",
            f"{row.busy:.2f}",
        )
    console.print(table)


def _in_words(case: Case) -> str:
    return f"{case.shape}, N={case.rows:,}{', causal' if case.causal else ''}"


def main() -> None:
    """Count, print, and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traffic", description="Operations and bytes by count.")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/traffic.json"), help="file to write")
    words = parser.parse_args()
    cases = [
        SHAPES[name].case(rows=rows, dtype="bfloat16", causal=causal)
        for name, rows in _ROWS.items()
        for causal in (False, True)
    ]
    operations = [row for case in cases for kernel in KERNELS for row in operations_of(case, kernel)]
    moved = [bytes_of(case, backward=backward) for case in cases for backward in (False, True)]
    console = Console(width=190)
    print_operations(operations, console)
    print_bytes(moved, console)
    # Matrix products per pair: 2 in the forward pass, at least 5 for both gradients.
    least = {"forward": FORWARD_FLOPS // 2, "query_gradient": BACKWARD_FLOPS // 2, "key_gradient": BACKWARD_FLOPS // 2}
    write_json(
        words.output,
        {
            "format": FORMAT,
            "machine": origin(module_command()),
            "caches": CACHES,
            "multiprocessors": MULTIPROCESSORS,
            "products": {"ours": PRODUCTS, "least": least},
            "cases": {case.name: asdict(case) for case in cases},
            "operations": [
                {
                    **asdict(row),
                    "case": row.case.name,
                    "ratio": row.ratio,
                    "ratio_of_dense_launches": row.ratio_of_dense_launches,
                }
                for row in operations
            ],
            "warp_specialized": [
                {"case": case.name, **operations_of_halves(case)} for case in cases if case.head_dim in (64, 128)
            ],
            "bytes": [{**asdict(row), "case": row.case.name} for row in moved],
        },
    )
    console.print(f"written: {words.output}", highlight=False)


if __name__ == "__main__":
    main()
