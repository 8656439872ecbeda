"""Attention under windows and blocks where shapes, compilers and memory could get in the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dilated_attention_pytorch import Pattern, attend, from_block_mask, local_window, random_blocks, strided_blocks
from dilated_attention_pytorch.kernels import fused
from dilated_attention_pytorch.plan.geometry import Partial
from dilated_attention_pytorch.plan.planner import CallShape, plan


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_blocks_of_documents_in_tiles_that_begin_elsewhere(dtype: torch.dtype) -> None:
    """First rows that are no multiples of the block, more than one tile, accumulators of the tile alone."""
    boundaries = torch.tensor([*range(0, 8193, 1000), 8192], dtype=torch.int32)
    q, k, v, grad = (x.to(dtype) for x in torch.randn(4, 1, 8192, 8, 16, dtype=torch.float64))
    pattern = strided_blocks(4) + random_blocks(0.2, block_size=96)
    packed, alone = [], []
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, pattern, is_causal=True, cu_seqlens=boundaries)
    packed = [out, *torch.autograd.grad(out, leaves, grad)]
    for begin, end in zip(boundaries.tolist(), boundaries.tolist()[1:], strict=False):
        rows = [x[:, begin:end].detach().double().requires_grad_() for x in (q, k, v)]
        one = attend(*rows, pattern, is_causal=True)
        alone.append([one, *torch.autograd.grad(one, rows, grad[:, begin:end].double())])
    for got, parts in zip(packed, zip(*alone, strict=True), strict=True):
        want = torch.cat(parts, 1)
        tolerance = 1e-12 if dtype == torch.float64 else 2e-2
        assert (got.double() - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize(("before", "after", "causal"), [(1500, 0, True), (600, 450, False), (1 << 30, 1 << 30, True)])
def test_wide_windows_equal_dense_attention_and_mask_at_their_edges_alone(
    before: int, after: int, causal: bool
) -> None:
    q, k, v, grad = torch.randn(4, 1, 2100, 1, 8, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found = [
        attend(*leaves, local_window(before, after), is_causal=causal, impl=impl) for impl in ("aten", "reference")
    ]
    for got, want in zip(*([x, *torch.autograd.grad(x, leaves, grad)] for x in found), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    steps = plan(CallShape(local_window(before, after), 1, 2100, 2100, 1, 1, 0, 0, causal), 1 << 40)
    masked = [p for tile in steps.tiles for p in tile.partials if isinstance(p, Partial) and p.band is not None]
    # What is masked is held in memory for the tiles to come.
    assert all(partial.num_keys * partial.num_queries <= 1 << 19 for partial in masked)


def test_one_query_sees_its_blocks() -> None:
    """A step of decoding reads few of the units; another route than copying all of them."""
    q, k, v = (torch.randn(2, rows, heads, 8, dtype=torch.float64) for rows, heads in ((1, 4), (5000, 2), (5000, 2)))
    for pattern in (strided_blocks(7, block_size=64), random_blocks(0.1, block_size=33)):
        found = [
            attend(q, k, v, pattern, is_causal=True, query_offset=4999, impl=impl) for impl in ("aten", "reference")
        ]
        torch.testing.assert_close(*found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dynamic", [False, True])
def test_patterns_are_made_and_called_under_a_compiler(dynamic: bool) -> None:
    mask = from_block_mask(torch.rand(4, 8, 8) < 0.6, 8)

    def call(q: torch.Tensor) -> torch.Tensor:
        pattern: Pattern = local_window(3) + random_blocks(0.5, block_size=4)
        return attend(q, q, q, pattern, is_causal=True) + attend(q, q, q, mask)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (64, 40):
        q = torch.randn(2, rows, 4, 8, dtype=torch.float64)
        torch.testing.assert_close(compiled(q), call(q), rtol=0, atol=1e-12)


def test_a_mask_has_to_cover_the_longest_document_and_no_more() -> None:
    x = torch.randn(1, 60, 2, 4, dtype=torch.float64)
    pattern = from_block_mask(torch.rand(1, 4, 4) < 0.7, 10)
    out = attend(x, x, x, pattern, cu_seqlens=torch.tensor([0, 30, 60], dtype=torch.int32))
    for part in (slice(0, 30), slice(30, 60)):
        alone = attend(x[:, part], x[:, part], x[:, part], pattern)
        torch.testing.assert_close(out[:, part], alone, rtol=0, atol=1e-12)


def test_the_bias_of_a_window_lies_as_the_cpu_kernel_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows in one piece: a bias of other strides is written out for every problem, at twice the time of a call."""
    strides = set()
    for name in ("forward", "backward"):
        compute = getattr(fused, name)

        def noting(*args: Any, compute: Any = compute, **options: Any) -> Any:
            # The bias follows query, key and value, or the six tensors of a backward pass.
            bias = args[3] if len(args) == 4 else args[6]
            if bias is not None:
                strides.add((bias.shape[-1] == bias.stride(-2), bias.stride(-1)))
            return compute(*args, **options)

        monkeypatch.setattr(fused, name, noting)
    x = torch.randn(1, 1500, 2, 8, requires_grad=True)
    attend(x, x, x, local_window(211, 190), impl="aten").sum().backward()
    assert strides == {(True, 1)}
