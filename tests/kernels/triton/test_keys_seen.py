"""Which keys of a run each row sees, beside the mask of every single pair, for numbers up to the last position."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch.kernels.select import is_interpreted
from dilated_attention_pytorch.kernels.triton.rule_table import FAR
from dilated_attention_pytorch.kernels.triton.runs import BITS, keys_seen, load_run
from support.drawn import examples

ROWS, LINE = 8, BITS.value + 3
LAST = 2**31 - 4096
"""Positions from here on are refused."""
needs_interpreter = pytest.mark.skipif(not is_interpreted(), reason="it is the arithmetic that is tested")


class Options(NamedTuple):
    """Those that say what a run is."""

    LINE: int
    CAUSAL: bool
    BANDED: bool


@triton.jit
def seen_kernel(RUN, POSITION, ACTIVE, SEEN, OPTIONS: tl.constexpr):
    row = tl.arange(0, 8)
    is_active = tl.load(ACTIVE + row) != 0
    seen = keys_seen(load_run(RUN, OPTIONS), tl.load(POSITION + row), is_active, OPTIONS)
    tl.store(SEEN + row, seen.start)
    tl.store(SEEN + 8 + row, seen.stop)


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, int, list[int]]:
    """First key, rate and count of a run, and the positions of rows, some of them near."""
    count = draw(st.integers(1, 9))
    rate = draw(st.one_of(st.integers(1, 5), st.integers(1, (LAST - 1) // max(1, count - 1))))
    first = draw(st.one_of(st.integers(0, 20), st.integers(0, LAST - 1 - (count - 1) * rate)))
    first = min(first, LAST - 1 - (count - 1) * rate)
    near = st.integers(max(0, first - 20), min(LAST - 1, first + 60))
    rows = st.lists(st.one_of(near, st.integers(0, LAST - 1)), min_size=ROWS, max_size=ROWS)
    return first, rate, count, draw(rows)


BANDS = st.tuples(
    st.one_of(st.just(-FAR), st.integers(-30, 0), st.integers(-FAR, 0)),
    st.one_of(st.just(FAR), st.integers(0, 30), st.integers(0, FAR)),
)


@needs_interpreter
@examples(60)
@given(runs(), BANDS, st.sampled_from([(False, False), (True, False), (True, True)]), st.integers(0, 2**ROWS - 1))
def test_the_keys_seen_are_those_that_the_mask_leaves(
    run: tuple[int, int, int, list[int]], band: tuple[int, int], mask: tuple[bool, bool], bits: int
) -> None:
    first, rate, count, positions = run
    is_causal, is_banded = mask
    low, high = band if is_banded else (-FAR, 0 if is_causal else FAR)
    active = [bits >> row & 1 for row in range(ROWS)]
    line = torch.zeros(LINE, dtype=torch.int32)
    line[:3] = torch.tensor([first, rate, count])
    line[LINE - 2 :] = torch.tensor([low, high])
    seen = torch.empty(2, ROWS, dtype=torch.int32)
    rows = torch.tensor(positions, dtype=torch.int32)
    options = Options(LINE, is_causal, is_banded)
    seen_kernel[(1,)](line, rows, torch.tensor(active, dtype=torch.int32), seen, options)
    for position, is_active, start, stop in zip(positions, active, *seen.tolist(), strict=True):
        keys = [j for j in range(count) if is_active and low <= first + j * rate - position <= high]
        assert [j for j in range(count) if start <= j < stop] == keys
        assert keys or (start, stop) == (FAR, 0)
