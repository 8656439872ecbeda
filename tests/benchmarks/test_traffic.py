"""What the counts of operations and bytes rest on: the kernels' own order and runs, a count by hand, a plain cache."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.tiling import KERNELS, Kernel

from benchmarks import caching, tiling, traffic
from dilated_attention_pytorch.benchmarks.shapes import SHAPES, Case
from dilated_attention_pytorch.kernels.triton.problem import Problem
from support.planned import Planned, planned

CASES = {
    "nested": {"rows": 300, "segment_lengths": (64, 128, 256), "dilation_rates": (1, 2, 4)},
    "r does not divide w": {"rows": 263, "segment_lengths": (50, 130, 300), "dilation_rates": (1, 3, 7)},
    "short segments": {"rows": 139, "segment_lengths": (5, 11, 100), "dilation_rates": (1, 2, 13)},
    "grouped heads": {"rows": 203, "segment_lengths": (64, 300), "dilation_rates": (2, 3), "heads": 4, "kv_heads": 2},
    "block offsets": {
        "rows": 197,
        "segment_lengths": (64, 300),
        "dilation_rates": (2, 4),
        "heads": 3,
        "offset_rule": "block",
    },
}
EVERYTHING_FITS = 1 << 60


def case_of(name: str, causal: bool) -> Case:
    sizes: dict[str, Any] = {"heads": 2, "offset_rule": "modulo", **CASES[name]}
    sizes.setdefault("kv_heads", sizes["heads"])
    return Case(shape=name, mode="forward", head_dim=32, causal=causal, dtype="bfloat16", **sizes)


def problem_with_tensors(case: Case) -> Problem:
    query, key, value = case.operands(torch.device("cpu"))
    return Problem(query, key, value, case.pattern.groups, case.causal, 1.0)


def planned_by_kernels(case: Case, kernel: Kernel, slots: int) -> Planned:
    # The key gradient takes over the order of the query gradient where both have the same rows.
    rows = tiling._tile_rows_of(case, kernel)
    return planned(problem_with_tensors(case), rows, slots, of_queries=kernel == "key_gradient")


@pytest.mark.parametrize("name", CASES)
def test_the_order_of_rows_is_the_kernels(name: str) -> None:
    case = case_of(name, False)
    side, order, *_ = planned_by_kernels(case, "forward", 16)
    tiles = tiling.tiles_of(case, "forward", tiling.configurations_of(case, "forward")[0])
    assert (tiles.window, tiles.is_ordered, tiles.num_windows) == (side.window, True, side.num_windows)
    ours = tiling.order_of_rows(case, side.window)
    assert np.array_equal(ours[ours >= 0], order.numpy()[ours >= 0])
    assert sorted(ours[0][ours[0] >= 0]) == list(range(case.rows))


# The query gradient walks over the runs of the forward.
@pytest.mark.parametrize(("kernel", "causal"), [("forward", False), ("forward", True), ("key_gradient", True)])
@pytest.mark.parametrize("name", CASES)
def test_the_runs_of_every_tile_are_the_kernels(name: str, kernel: Kernel, causal: bool) -> None:
    case = case_of(name, causal)
    chosen = tiling.configurations_of(case, kernel)[0]
    tiles = tiling.tiles_of(case, kernel, chosen)
    ours = tiling.runs_of(case, kernel, chosen, tiles)
    slots = tiles.rows.shape[1]
    theirs = planned_by_kernels(case, kernel, slots)
    side, order, num_tiles = theirs.side, theirs.order, theirs.ranges.shape[1]
    assert theirs.lines.shape[1] == tiles.lines_per_head
    assert theirs.lines.shape[2] * 4 == caching.bytes_of_run(tiles)
    tiles_per_window = num_tiles // side.num_windows
    found = 0
    for head in range(case.kv_heads):
        for place in range(num_tiles):
            window, tile = divmod(place, tiles_per_window)
            rows = order[head, window, tile * slots : (tile + 1) * slots].numpy()
            their_runs = theirs.runs(head, place)[:, :4].tolist()
            if their_runs:
                (our_tile,) = np.flatnonzero((tiles.kv_head == head) & (tiles.rows[:, 0] == rows[0]))
                its = ours.tile == our_tile
                our_runs = np.stack([ours.first[its], ours.rate[its], ours.count[its], ours.edge[its]], 1)
                assert our_runs.tolist() == their_runs
                found += len(their_runs)
    assert found == len(ours.tile)


def blocks_by_hand(case: Case, kernel: Kernel, tiles: tiling.Tiles, block: int) -> int:
    """Every tile, group and segment by itself, from the definition of a group."""
    positions, total = torch.arange(case.rows), 0
    for tile, head in enumerate(tiles.kv_head.tolist()):
        rows = [row for row in tiles.rows[tile].tolist() if row >= 0]
        for group in case.pattern.groups:
            segments, selected = (x.tolist() for x in group.locate(positions, head, case.kv_heads))
            for segment in sorted({segments[row] for row in rows if selected[row]}):
                active = [row for row in rows if selected[row] and segments[row] == segment]
                others = [t for t in range(case.rows) if selected[t] and segments[t] == segment]
                if case.causal and kernel == "key_gradient":
                    total -= sum(t < min(active) for t in others) // block
                elif case.causal:
                    others = [t for t in others if t <= max(active)]
                total += math.ceil(len(others) / block)
    return total


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_pairs_are_counted_as_by_hand_and_are_not_fewer_than_the_patterns(
    name: str, kernel: Kernel, causal: bool
) -> None:
    case = case_of(name, causal)
    for chosen in tiling.configurations_of(case, kernel):
        tiles = tiling.tiles_of(case, kernel, chosen)
        blocks = tiling.runs_of(case, kernel, chosen, tiles).num_blocks
        assert blocks == blocks_by_hand(case, kernel, tiles, chosen.block_run)
        assert tiling.executed_pairs(case, kernel, chosen, blocks) >= case.num_pairs("pattern")
        dense = tiling.blocks_of_dense_launches(case, kernel, chosen)
        assert tiling.executed_pairs(case, kernel, chosen, dense) >= case.num_pairs("pattern")


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_dense_group_whose_segments_fit_wastes_nothing(kernel: Kernel) -> None:
    case = Case(
        shape="dense",
        mode="forward",
        rows=1024,
        heads=2,
        kv_heads=2,
        head_dim=64,
        segment_lengths=(256,),
        dilation_rates=(1,),
        causal=False,
        dtype="bfloat16",
    )
    rows = traffic.operations_of(case, kernel)
    assert [(row.ratio, row.ratio_of_dense_launches) for row in rows] == [(1.0, 1.0)] * len(rows)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["nested", "grouped heads", "block offsets"])
def test_a_cache_that_holds_everything_moves_what_the_formula_says(name: str, kernel: Kernel, causal: bool) -> None:
    case = case_of(name, causal)
    chosen = tiling.configurations_of(case, kernel)[0]
    tiles = tiling.tiles_of(case, kernel, chosen)
    runs = tiling.runs_of(case, kernel, chosen, tiles)
    small = 1 << 14
    moved = caching.replay(
        case, kernel, chosen, tiles, runs, capacities=(EVERYTHING_FITS, small), side_by_side=3
    ).bytes_by_capacity
    row = case.head_dim * 2
    query, key, sector = row * case.rows * case.heads, row * case.rows * case.kv_heads, 32
    sectors = -(-4 * case.rows * case.heads // sector) * sector
    # Rows that no group selects are no part of a run: as keys and values in the first two kernels, as queries and their
    # gradients in the third, with log-sum-exp and delta.
    seen = sum(
        int(
            torch.stack([g.locate(torch.arange(case.rows), h, case.kv_heads)[1] for g in case.pattern.groups])
            .any(0)
            .sum()
        )
        for h in range(case.kv_heads)
    )
    of_runs, tables = row * seen * 2, len(runs.tile) * caching.bytes_of_run(tiles) + 8 * len(tiles.kv_head)
    tables += 4 * case.rows * case.kv_heads
    if kernel == "forward":
        assert moved[EVERYTHING_FITS] == 2 * query + of_runs + sectors + tables
    elif kernel == "query_gradient":
        assert moved[EVERYTHING_FITS] == 3 * query + of_runs + 2 * sectors + tables
    else:
        least = 4 * key + of_runs * case.heads // case.kv_heads + tables
        assert least < moved[EVERYTHING_FITS] <= least + 2 * sectors
    assert moved[small] > moved[EVERYTHING_FITS]


def test_the_cache_forgets_what_was_used_least_recently() -> None:
    generator = np.random.default_rng(0)
    sizes = generator.integers(1, 9, 40)
    capacities = (25, 60, 110)
    cache = caching._Cache(sizes, 60, capacities)
    missed, last_use = dict.fromkeys(capacities, 0), {}
    for step in range(60):
        units = generator.integers(0, generator.integers(1, 41), 8)
        cache.begin(step)
        cache.use(step, units)
        for capacity in capacities:
            for unit in set(units.tolist()):
                recent = [other for other, when in last_use.items() if when >= last_use.get(unit, math.inf)]
                if not recent or sizes[recent].sum() > capacity:
                    missed[capacity] += int(sizes[unit])
        last_use.update(dict.fromkeys(units.tolist(), step))
    assert cache.missed == missed


@pytest.mark.parametrize("causal", [False, True])
def test_the_papers_pattern_moves_little_more_than_it_must(causal: bool, figure: Any) -> None:
    case = SHAPES["paper"].case(rows=32768, dtype="bfloat16", causal=causal)
    for backward, most in ((False, 1.3), (True, 2.0)):
        moved = traffic.bytes_of(case, backward=backward)
        ratios = {name: value / moved.least for name, value in moved.replayed.items()}
        figure(
            f"bytes over the least, paper's pattern, {'causal, ' * causal}{'backward' if backward else 'forward'}",
            {name: round(ratio, 3) for name, ratio in ratios.items()},
        )
        # 20 MiB, half of the smaller cache, is shown, not promised: a span of keys and values takes 16 of them.
        assert max(ratio for name, ratio in ratios.items() if name != "20 MiB") <= most
        assert moved.transient <= 0.3
        assert sum(moved.terms.values()) <= moved.replayed["60 MiB"] * 1.001
        assert moved.dense > moved.dense_at_best > moved.replayed["30 MiB"]


def test_a_decoding_step_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="only whole sequences"):
        tiling.plan_of_case(SHAPES["decode"].case(rows=128))


def test_halves_compute_what_their_own_rows_see() -> None:
    """One segment of 256 keys at a rate of 2, its rows 0, 2, ... side by side, and the others, which see nothing."""
    case = Case(
        shape="half of the rows",
        mode="forward",
        head_dim=64,
        causal=True,
        dtype="bfloat16",
        rows=512,
        heads=1,
        kv_heads=1,
        segment_lengths=(512,),
        dilation_rates=(2,),
    )
    # The 256 selected rows in tiles of 128 walk over 1 and 2 blocks of 128 keys; halves of them over 1, 1, 2 and 2.
    pairs = 256 * 257 // 2
    assert traffic.operations_of_halves(case) == {"whole": 3 * 128 * 128 / pairs, "halves": 6 * 64 * 128 / pairs}
    paper = SHAPES["paper"].case(rows=4096, dtype="bfloat16", causal=True)
    whole = {row.block_rows: row.ratio for row in traffic.operations_of(paper, "forward") if row.block_run == 128}
    ratios = traffic.operations_of_halves(paper)
    assert ratios["halves"] < ratios["whole"] == whole[128]
