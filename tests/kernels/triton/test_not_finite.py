"""How far what is not finite reaches in the Triton kernels: docs/definition.md, "What is not finite"."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention_pytorch import DilatedPattern, attend, attend_with_lse, local_window
from dilated_attention_pytorch.kernels.select import is_interpreted
from dilated_attention_pytorch.kernels.triton import launch
from dilated_attention_pytorch.kernels.triton.configurations import BlockSizes
from dilated_attention_pytorch.kernels.triton.problem import Problem
from support.drawn import DrawnCall, Sizes, block_calls, calls, examples
from support.planned import tiles_of, with_candidates

SIZES = Sizes(
    st.integers(20, 60), batch=1, kv_heads=2, head_dims=(16,), groups=2, summands=(1,), segments=st.integers(5, 70)
)
DRAWS = 2
pytestmark = [
    pytest.mark.skipif(not is_interpreted(), reason="tiles of another size than those of the configuration below"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, in the interpreter
]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    with_candidates(monkeypatch, BlockSizes(16, 16, 4, 1))


def in_reach(problem: Problem, counts: Tensor, bad: Tensor, tile_rows: int, *, of_queries: bool) -> Tensor:
    """Rows ``[rows, heads]`` of tiles that read a bad line ``[lines, heads]``: one that some row of the tile is in
    relation with, or, under a rule, one between the first and the last of those."""
    tiles, _ = tiles_of(problem, tile_rows, of_queries=of_queries)
    counts = counts.mT if of_queries else counts
    reached = torch.zeros(counts.shape[1], counts.shape[0], dtype=torch.bool)
    for head in range(tiles.shape[0]):
        for tile in tiles[head]:
            rows = tile[tile >= 0]
            lines = counts[head, rows].sum(0).nonzero().flatten()
            if problem.rules and len(lines):
                lines = torch.arange(int(lines[0]), int(lines[-1]) + 1)
            reached[rows, head] = bool(bad[lines, head].any())
    return reached


def check(call: DrawnCall, kind: int, value: float, place: int) -> int:
    """Spoil one number of the query, key or value; returns how many rows it could not reach."""
    q, k, v, grad_out, _ = call.tensors(torch.float32)
    heads = call.kv_heads
    ratio = next(one for one in (2, 1) if call.ratio % one == 0)
    q, grad_out = q[:, :, : heads * ratio], grad_out[:, :, : heads * ratio]
    counts = call.counts()[0][0]
    options: dict[str, Any] = {"is_causal": call.is_causal, "scale": 0.3, "impl": "triton", **call.options}
    found: list[list[Tensor]] = []
    where = place % (q if kind == 0 else k).shape[1], place % heads
    for is_spoilt in (False, True):
        leaves = [x.clone() for x in (q, k, v)]
        if is_spoilt:
            leaves[kind][0, where[0], where[1] * (ratio if kind == 0 else 1), 3] = value
        leaves = [x.requires_grad_() for x in leaves]
        out, lse = attend_with_lse(*leaves, call.pattern, **options)
        grads = torch.autograd.grad(out, leaves, grad_out)
        found.append([x.detach()[0] for x in (out, lse, *grads)])
    pattern = call.pattern
    problem = launch.Problem(
        q,
        k,
        v,
        pattern.groups,
        call.is_causal,
        0.3,
        int(call.options.get("query_offset", 0)),
        int(call.options.get("key_offset", 0)),
        call.options.get("cu_seqlens"),
        rules=pattern.rules,  # type: ignore[arg-type]
    )
    bad_keys = torch.zeros(k.shape[1], heads, dtype=torch.bool)
    bad_rows = torch.zeros(q.shape[1], heads, dtype=torch.bool)
    if kind == 0:
        bad_rows[where] = True
    else:
        bad_keys[where] = True
        bad_rows = in_reach(problem, counts, bad_keys, 16 // ratio, of_queries=False)
    bad_grads = bad_keys | in_reach(problem, counts, bad_rows, 16, of_queries=True)
    of_heads = bad_rows.repeat_interleave(ratio, 1)
    if kind == 0:  # of its own head
        of_heads[:, [one for one in range(heads * ratio) if one != where[1] * ratio]] = False
    for clean, spoilt, reached in zip(*found, (of_heads, of_heads, of_heads, bad_grads, bad_grads), strict=True):
        assert torch.equal(clean[~reached], spoilt[~reached])
    if math.isnan(value) and kind == 1:
        sees = (counts[where[1], :, where[0]] > 0)[:, None] & (torch.arange(heads) == where[1])
        assert found[1][0][sees.repeat_interleave(ratio, 1)].isnan().all()
    return int((~of_heads).sum())


@pytest.mark.parametrize("ruled", [False, True], ids=["dilated", "windows and blocks"])
def test_it_reaches_rows_of_tiles_that_see_it_and_no_others(ruled: bool) -> None:
    free = 0

    @examples(DRAWS, is_shrunk=False)
    @given(
        (block_calls if ruled else calls)(with_padding=False, sizes=SIZES),
        st.sampled_from([0, 1, 1, 2]),
        st.sampled_from([math.nan, math.inf, -math.inf]),
        st.integers(0, 1000),
    )
    def draw(call: DrawnCall, kind: int, value: float, place: int) -> None:
        nonlocal free
        call.ratio = 1 if call.ratio % 2 else 2
        free += check(call, kind, value, place)

    draw()
    assert free > 0


def test_a_window_of_rows_that_lie_apart_reads_the_keys_between_them() -> None:
    """Rows in the order of groups are no neighbours: a tile of every fourth row reads what is between their windows."""
    pattern = DilatedPattern([128] * 3, [4] * 3) + local_window(1, 0)
    q, k, v = (torch.randn(1, 128, 1, 16) for _ in range(3))
    v[0, 33] = math.nan
    out = attend(q, k, v, pattern, impl="triton")
    counts = pattern.counts(torch.arange(128), torch.arange(128), 1, is_causal=False)[0]
    apart = torch.arange(0, 64, 4)
    assert not counts[apart, 33].any()
    assert out[0, apart].isnan().all()
    assert out[0, 64:].isfinite().all()
