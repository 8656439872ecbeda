"""What the kernels plan on the device: the arithmetic of segments, the order of rows, the number of launches."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dilated_attention_pytorch import (
    DilatedPattern,
    Pattern,
    attend_with_lse,
    global_tokens,
    local_window,
    strided_blocks,
)
from dilated_attention_pytorch.kernels.select import is_interpreted
from dilated_attention_pytorch.kernels.triton import plan, rule_table
from dilated_attention_pytorch.kernels.triton.problem import Problem
from dilated_attention_pytorch.kernels.triton.segments import (
    count_up_to,
    interval_of,
    is_selected,
    segment_start,
    selected,
)
from dilated_attention_pytorch.patterns.dilated import DilationGroup
from support.planned import planned, with_candidates
from support.triton_calls import DEVICE


@triton.jit
def _segments_kernel(OUT, length, rate, offset, shift, low, high, num_rows, WINDOW: tl.constexpr):
    """For each position: the start and interval of its segment, whether it is selected; then one run of rows."""
    position = tl.arange(0, WINDOW)
    start, begin, end = interval_of(position, 0, num_rows, length, shift)
    tl.store(OUT + position, start)
    tl.store(OUT + WINDOW + position, begin)
    tl.store(OUT + 2 * WINDOW + position, end)
    tl.store(OUT + 3 * WINDOW + position, is_selected(position, start, rate, offset).to(tl.int32))
    first, count = selected(segment_start(low, 0, length, shift), rate, offset, low, high)
    tl.store(OUT + 4 * WINDOW, first)
    tl.store(OUT + 4 * WINDOW + 1, count)
    tl.store(OUT + 5 * WINDOW + position, count_up_to(position, first, rate, count))


@pytest.mark.parametrize(("length", "rate", "shift"), [(7, 1, 0), (16, 3, 5), (20, 6, 19), (50, 4, 33), (5, 9, 2)])
def test_the_arithmetic_of_segments_is_that_of_the_pattern(length: int, rate: int, shift: int) -> None:
    window, num_rows = 128, 61
    group = DilationGroup(length, rate, segment_shift=(shift,))
    for head in range(min(rate, 3)):
        offset = group.offset(head, 3)
        of_segment = [(low, low + 1 + size) for low in (0, 11, 37) for size in (0, 2, length - 1)]
        for low, high in of_segment:
            high = min(high, group.segment_bounds(low, shift)[1])
            out = torch.full((6 * window,), -7, dtype=torch.int32, device=DEVICE)
            _segments_kernel[(1,)](
                out, length, rate, offset, shift, low, high, num_rows, WINDOW=window, enable_fp_fusion=True
            )
            start, begin, end, is_in, run, up_to = (x.tolist() for x in out.view(6, window).cpu())
            segment, chosen = group.locate(torch.arange(window), head, 3)
            for position in range(num_rows):
                bounds = group.segment_bounds(position, shift)
                assert (start[position], begin[position], end[position]) == (
                    bounds[0],
                    max(bounds[0], 0),
                    min(bounds[1], num_rows),
                )
                assert is_in[position] == int(chosen[position])
            first, count = group.selected(group.segment_bounds(low, shift)[0], offset, low, high)
            assert run[1] == count
            assert count == sum(chosen[low:high])
            assert not count or run[0] == first
            assert up_to == [sum(chosen[low : min(high, p + 1)].tolist()) if p >= low else 0 for p in range(window)]
            assert len(set(segment[low:high].tolist())) == 1


@pytest.mark.parametrize("rows", [40, 128, pytest.param(300, marks=pytest.mark.slow)])
def test_rows_keep_to_their_window_and_equal_rows_lie_side_by_side(rows: int) -> None:
    pattern = DilatedPattern([64, 128, 300], [1, 2, 4], segment_shift=(0, 17, 5))
    q = torch.empty(1, rows, 3, 16, device=DEVICE)
    side, rows_in_order, *_ = planned(Problem(q, q, q, pattern.groups, False, 1.0), (16,))
    assert side.is_ordered
    for head in range(3):
        membership = torch.stack([group.locate(torch.arange(rows), head, 3)[1] for group in pattern.groups])
        segment = pattern.groups[0].locate(torch.arange(rows), head, 3)[0]
        for window in range(side.num_windows):
            begin, end = window * side.window, min(rows, (window + 1) * side.window)
            order = rows_in_order[head, window, : end - begin].cpu().long()
            assert sorted(order.tolist()) == list(range(begin, end))
            kinds = [(int(segment[row]), *membership[:, row].tolist()) for row in order]
            changes = sum(a != b for a, b in itertools.pairwise(kinds))
            assert changes == len(set(kinds)) - 1


def launches(monkeypatch: pytest.MonkeyPatch, compute: Any) -> int:
    """How many kernels of Triton a computation launches; none of them is run."""
    from triton.runtime.interpreter import InterpretedFunction

    count = 0

    def counted(self: Any, *args: Any, **options: Any) -> None:
        nonlocal count
        count += 1

    with monkeypatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", counted)
        compute()
    return count


@pytest.mark.skipif(
    not is_interpreted(), reason="counts the interpreter's launches; benchmarks/gpu.py counts a device's"
)
def test_the_number_of_launches_depends_on_nothing(monkeypatch: pytest.MonkeyPatch, figure: Any) -> None:
    with_candidates(monkeypatch, plan.BlockSizes(16, 16, 4, 1))
    counted: dict[str, tuple[int, int]] = {}
    for rows, lengths, rates, bounds in (
        (40, [40], [2], None),
        (40, [8, 16, 40], [1, 2, 3], None),
        (40, [8, 16, 40], [1, 2, 3], [0, 11, 12, 40]),
        (70, [5, 8, 16, 32, 70], [1, 2, 4, 6, 12], None),
        (40, [40, 40], [1, 5], None),
    ):
        q, k, v = (torch.randn(1, rows, 2, 16, requires_grad=True) for _ in range(3))
        pattern: Pattern = DilatedPattern(lengths, rates)
        name = f"{len(lengths)} groups" + (", packed documents" if bounds else "")
        boundaries = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
        options: Any = {"cu_seqlens": boundaries, "impl": "triton"}
        if len(lengths) == 2:
            pattern, name = pattern + local_window(9) + strided_blocks(2, block_size=16), "2 groups and 2 rules"
        results: list[torch.Tensor] = []
        forward = launches(monkeypatch, lambda: results.append(attend_with_lse(q, k, v, pattern, **options).out))  # noqa: B023
        backward = launches(monkeypatch, lambda: results[0].sum().backward())  # noqa: B023
        counted[name] = (forward, backward)
    figure("kernel launches (forward, backward) by number of groups", counted)
    # Where rows are not ordered, as where rules weigh more than groups do, that launch is left out.
    assert set(counted.values()) <= {(3, 5), (2, 4)}
    assert list(counted.values())[:4] == [(3, 5)] * 4
    assert len(counted) == 5


def test_positions_past_32_bits_are_refused() -> None:
    q = torch.zeros(1, 3, 1, 16, device=DEVICE)
    last = rule_table.LAST_POSITION - 3
    window, at_last = local_window(2**31 - 1, 2), {"query_offset": last, "key_offset": last}
    out, _ = attend_with_lse(q, q, q, window, impl="triton", **at_last)  # type: ignore[arg-type]
    assert out.shape == q.shape
    past = {"query_offset": last + 1, "key_offset": last + 1}
    for options, pattern in (
        ({"query_offset": 2**31, "key_offset": 2**31}, DilatedPattern([5], [1])),
        ({}, DilatedPattern([2**31], [1], segment_shift=2**31 - 2)),
        (past, local_window(3)),
        (past, global_tokens(2)),
    ):
        with pytest.raises(NotImplementedError, match=r"count positions in 32 bits.*impl=\"aten\" has no such limit"):
            attend_with_lse(q, q, q, pattern, impl="triton", **options)  # type: ignore[arg-type]
