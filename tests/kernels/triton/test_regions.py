"""Every tile has room for its runs in the table of runs, and none of it is another tile's."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch import DilatedPattern, Pattern, global_tokens, local_window, random_blocks
from dilated_attention_pytorch.kernels.triton.plan import LaunchPlan, plan_of
from dilated_attention_pytorch.kernels.triton.problem import Kind, Problem
from dilated_attention_pytorch.kernels.triton.regions import regions_of
from dilated_attention_pytorch.kernels.triton.sides import Side
from support.drawn import examples
from support.oracle import Groups, dense_counts
from support.planned import check_runs, planned
from support.triton_calls import DEVICE

Interval = tuple[int, int]


def plan_without_tensors(rows: int, heads: int, pattern: Pattern, num_documents: int | None) -> LaunchPlan:
    operand = torch.empty(1, rows, heads, 64, dtype=torch.bfloat16, device="meta")
    boundaries = None if num_documents is None else torch.empty(num_documents + 1, dtype=torch.int32, device="meta")
    return plan_of(Problem(operand, operand, operand, pattern.groups, True, 0.125, cu_seqlens=boundaries))


def intervals(rows: int, boundaries: list[int], length: int, shift: int) -> list[Interval | None]:
    """Of every row the segment of its document that holds it; None outside of the documents."""
    found: list[Interval | None] = [None] * rows
    for begin, end in itertools.pairwise(boundaries):
        for row in range(begin, end):
            start = row - (row - begin + shift) % length
            found[row] = (max(start, begin), min(start + length, end))
    return found


def first_lines(kind: Kind, side: Side, tile_rows: int, boundaries: list[int]) -> list[int]:
    """What ``first_line`` says, for the first head: of every tile, and the end of the last region."""
    regions, tiles_per_window = regions_of(kind, None, side, tile_rows), -(-side.window // tile_rows)
    found = []
    for tile in range(side.num_windows * tiles_per_window + 1):
        x = tile // tiles_per_window * side.window + tile % tiles_per_window * tile_rows
        x = min(x, side.num_rows - 1)
        d = max([index for index, begin in enumerate(boundaries[:-1]) if begin <= x], default=0)
        begin = min(boundaries[d], x)
        line = tile * regions.per_tile + d * regions.per_document
        for group in kind.sorted_groups:
            length, shift = group.segment_length, group.shift(0)
            line += begin // length + (x - begin + shift) // length - shift // length
        found.append(line)
    return found


@st.composite
def packings(draw: st.DrawFn, most: int) -> tuple[int, list[int]]:
    """A number of rows, and boundaries in order; some leave rows out at both ends."""
    rows = draw(st.integers(1, most))
    number = draw(st.sampled_from([1, 2, 5, rows, rows + 3]))
    inner = st.lists(st.integers(0, rows), min_size=number - 1, max_size=number - 1)
    boundaries = sorted([0, *draw(inner), rows])
    if draw(st.integers(0, 4)) == 0:
        boundaries = boundaries[1:-1] if number > 2 else boundaries
    return rows, boundaries


SEGMENTS = st.one_of(st.integers(1, 8), st.integers(1, 60), st.sampled_from([16, 32, 1000]))
GROUPS = st.lists(st.tuples(SEGMENTS, st.one_of(st.just(0), st.integers(0, 1000))), min_size=1, max_size=3)


def test_every_tile_has_room_however_rows_lie_within_their_pieces(figure: Any) -> None:
    fullest, drawn = 0.0, 0

    @examples(300, is_shrunk=False)
    @given(
        packings(120),
        GROUPS,
        st.sampled_from([16, 32, 64]),
        st.sampled_from([1, 3, 5, 8, 16]),
        st.booleans(),
        st.integers(0, 2**31),
    )
    def draw(
        packing: tuple[int, list[int]],
        groups: list[tuple[int, int]],
        window: int,
        tile_rows: int,
        is_ordered: bool,
        seed: int,
    ) -> None:
        nonlocal fullest, drawn
        drawn += 1
        rows, boundaries = packing
        pattern = sum(
            (DilatedPattern([length], [1], segment_shift=shift) for length, shift in groups[1:]),
            DilatedPattern([groups[0][0]], [1], segment_shift=groups[0][1]),
        )  # type: ignore[call-overload]
        kind = plan_without_tensors(rows, 1, pattern, len(boundaries) - 1).kind
        side = Side(rows, 0, window, is_ordered)
        of_group = [intervals(rows, boundaries, g.segment_length, g.shift(0)) for g in kind.sorted_groups]
        shortest = of_group[kind.segment_lengths.index(min(kind.segment_lengths))]
        order, generator = [], random.Random(seed)
        for begin in range(0, rows, window):
            its = range(begin, min(rows, begin + window))
            piece, pieces = 0, []
            for row in its:
                interval = shortest[row]
                piece += interval is not None and interval[0] == row
                pieces.append(piece)
            shuffled = sorted(its, key=lambda row: (pieces[row - begin], generator.random()))
            order += [(shuffled if is_ordered else list(its))[i : i + tile_rows] for i in range(0, window, tile_rows)]
        lines = first_lines(kind, side, tile_rows, boundaries)
        used = 0
        for tile, its_rows in enumerate(order):
            met = sum(len({one[row] for row in its_rows if one[row] is not None}) for one in of_group)
            assert met <= lines[tile + 1] - lines[tile]
            used += met
        most = regions_of(kind, None, side, tile_rows).lines
        assert 0 <= lines[0] <= lines[-1] <= most
        fullest = max(fullest, used / most)

    draw()
    assert drawn >= 300
    figure(f"Triton, {drawn} drawn packings, the fullest table of runs", f"{fullest:.2f} of its lines")
    assert fullest > 0.9


@pytest.mark.parametrize(
    ("length", "boundaries", "spare"),
    [
        (1000, [0, *range(8, 250, 16), 256], 1),  # a document ends within every tile
        (1000, [*range(257)], 16),  # documents of one row: a tile begins with one
        (24, [0, 256], 6),  # segments begin within a tile, or with one: 5 times each
    ],
)
def test_the_fullest_tables_have_no_line_too_few_and_few_too_many(
    length: int, boundaries: list[int], spare: int
) -> None:
    query = torch.zeros(1, 256, 1, 16, device=DEVICE)
    pattern = DilatedPattern([length], [1])
    bounds = torch.tensor(boundaries, dtype=torch.int32, device=DEVICE)
    runs = planned(Problem(query, query, query, pattern.groups, False, 1.0, cu_seqlens=bounds), (16,))
    runs.check_ranges()
    met = sum(len(set(intervals(256, boundaries, length, 0)[i : i + 16])) for i in range(0, 256, 16))
    assert int(runs.ranges[..., 1].sum()) == met
    assert runs.lines.shape[1] - met == spare


def test_the_regions_are_those_that_the_device_finds() -> None:
    query = torch.zeros(1, 100, 2, 16, device=DEVICE)
    boundaries = [0, 3, 3, 40, 41, 99, 100]
    for pattern in (DilatedPattern([16, 48], [1, 3]), DilatedPattern([7, 20], [1, 2], segment_shift=3)):
        bounds = torch.tensor(boundaries, dtype=torch.int32, device=DEVICE)
        problem = Problem(query, query, query, pattern.groups, True, 1.0, cu_seqlens=bounds)
        runs = planned(problem, (16,))
        want = first_lines(plan_of(problem).kind, runs.side, 16, boundaries)
        assert runs.ranges[0, :, 0].tolist() == want[:-1]


def test_the_runs_of_many_documents_hold_every_pair(figure: Any) -> None:
    drawn = runs = 0

    @examples(10, is_shrunk=False)
    @given(
        packings(60),
        GROUPS,
        st.lists(st.integers(1, 5), min_size=3, max_size=3),
        st.sampled_from([16, 21, 32]),
        st.booleans(),
        st.booleans(),
    )
    def draw(
        packing: tuple[int, list[int]],
        groups: list[tuple[int, int]],
        rates: list[int],
        tile_rows: int,
        is_causal: bool,
        of_queries: bool,
    ) -> None:
        nonlocal drawn, runs
        rows, boundaries = packing
        boundaries = [0, *boundaries, rows]  # every row in a document, as in a call
        summand = Groups(
            tuple(length for length, _ in groups), tuple(rates[: len(groups)]), "modulo", "ragged", (groups[0][1],)
        )
        pattern = DilatedPattern(list(summand.lengths), list(summand.rates), segment_shift=groups[0][1])
        query = torch.zeros(1, rows, 2, 16, device=DEVICE)
        bounds = torch.tensor(boundaries, dtype=torch.int32, device=DEVICE)
        problem = Problem(query, query, query, pattern.groups, is_causal, 1.0, cu_seqlens=bounds)
        counts, _ = dense_counts(summand, rows, rows, 2, boundaries=boundaries, is_causal=is_causal)
        runs += check_runs(problem, counts[0], tile_rows, of_queries=of_queries)
        drawn += 1

    draw()
    assert drawn >= 10
    figure("Triton, drawn packed documents, their runs", f"{drawn} calls, {runs} runs")


@pytest.mark.parametrize(
    "boundaries", [[0, 40, 10, 30, 64], [-7, 90, -3, 5, 200, 6], [64, 0], [2**31 - 1, -(2**31), 9]]
)
def test_boundaries_that_are_none_leave_every_tile_its_own_lines(boundaries: list[int]) -> None:
    query = torch.zeros(1, 64, 1, 16, device=DEVICE)
    bounds = torch.tensor(boundaries, dtype=torch.int32, device=DEVICE)
    patterns: tuple[Pattern, ...] = (
        DilatedPattern([5, 16], [1, 2], segment_shift=3),
        local_window(9, 3) + random_blocks(0.5, block_size=4),
    )
    for pattern in patterns:
        problem = Problem(query, query, query, pattern.groups, False, 1.0, cu_seqlens=bounds, rules=pattern.rules)
        for of_queries in (False, True):
            runs = planned(problem, (16,), of_queries=of_queries)
            runs.check_ranges()
            assert (runs.ranges[..., 0] >= 0).all()
            for tile in range(runs.ranges.shape[1]):
                for first, rate, count in runs.runs(0, tile)[:, :3].tolist():
                    assert count == 0 or 0 <= first <= first + rate * (count - 1) < 64


def test_packed_documents_take_no_more_than_a_line_each_for_every_group_and_head(figure: Any) -> None:
    """The paper's pattern over a million rows in 12 heads of 64, bfloat16: q has 1,536 MiB."""
    pattern = DilatedPattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
    mebibytes = {}
    for documents in (None, 64, 1000):
        plan = plan_without_tensors(1 << 20, 12, pattern, documents)
        for kernel in (plan.forward, plan.query_gradient, plan.key_gradient):
            for chosen in kernel.choice.candidates:
                walk = kernel.walk(chosen)
                tiles, line = walk.ranges[0] * walk.ranges[1], walk.runs[2]
                segments = 12 * sum((1 << 20) // group.segment_length for group in pattern.groups)
                assert math.prod(walk.runs) <= line * (5 * tiles + segments + 5 * 12 * (documents or 1))
                size = 4 * (math.prod(walk.runs) + math.prod(walk.ranges)) / 2**20
                mebibytes[documents] = max(mebibytes.get(documents, 0.0), size)
    figure(
        "Triton, MiB of the largest table of runs by documents, 1,048,576 rows in 12 heads",
        {str(documents): f"{size:.1f}" for documents, size in mebibytes.items()},
    )
    assert mebibytes[64] < 30
    assert mebibytes[1000] < 30


def test_rules_of_documents_are_bounded_by_tiles_and_documents() -> None:
    """As many lines as for one document, and for every further one what its rows may meet: not that for every tile."""
    rows, window = 1 << 16, local_window(255) + global_tokens(4)
    operand = torch.empty(1, rows, 1, 64, dtype=torch.bfloat16, device="meta")
    lines = []
    for documents in (1, 2, 500):
        bounds = torch.empty(documents + 1, dtype=torch.int32, device="meta")
        problem = Problem(operand, operand, operand, (), True, 0.125, cu_seqlens=bounds, rules=window.rules)
        forward = plan_of(problem).forward
        lines.append(forward.walk(forward.choice.candidates[0]).runs[1])
    assert lines[2] - lines[1] == 498 * (lines[1] - lines[0])
    assert lines[1] - lines[0] <= 4
