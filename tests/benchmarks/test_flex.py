"""Which blocks the compiled FlexAttention leaves out; what it computes is compared in test_contestants.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dilated_attention_pytorch.benchmarks.flex import FlexCase
from support.benchmark_cases import counts_of, small_case

# Raised by PyTorch's own modules when the compiler is loaded.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

LONG = {"rows": 700, "segment_lengths": (130, 256, 640), "dilation_rates": (1, 3, 5)}


@pytest.mark.parametrize("causal", [False, True])
def test_the_map_of_blocks_leaves_nothing_out_and_asks_the_mask_where_it_has_to(causal: bool) -> None:
    case = small_case(causal=causal, **LONG)
    mask = FlexCase(case, torch.device("cpu")).block_mask
    seen = counts_of(case)[0][0] > 0
    pad = -case.rows % 128
    blocks = torch.nn.functional.pad(seen, (0, pad, 0, pad)).unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
    kept = mask.to_dense()[0, 0] > 0
    assert not (blocks.any(4).any(2).any(0) & ~kept).any()
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    for row, (number, columns) in enumerate(
        zip(mask.full_kv_num_blocks[0, 0], mask.full_kv_indices[0, 0], strict=True)
    ):
        for column in columns[:number]:
            assert blocks[:, row, :, column].all()


@pytest.mark.parametrize("causal", [False, True])
def test_a_block_pattern_is_told_whole(causal: bool) -> None:
    case = small_case(rows=700, heads=4, kv_heads=2, causal=causal)
    case = replace(case, segment_lengths=(), dilation_rates=(), block_density=0.5, block_size=128)
    flex = FlexCase(case, torch.device("cpu"))
    positions = torch.arange(case.rows)
    seen = (case.pattern.counts(positions, positions, 2, is_causal=causal) > 0).repeat_interleave(2, 0)
    head, query, key = torch.meshgrid(torch.arange(4), positions, positions, indexing="ij")
    assert torch.equal(flex.mask(torch.zeros((), dtype=torch.int64), head, query, key), seen)
    pad = -case.rows % 128
    blocks = torch.nn.functional.pad(seen, (0, pad, 0, pad)).unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
    assert torch.equal(flex.block_mask.to_dense()[0] > 0, blocks.any(4).any(2))
    assert flex.block_mask.full_kv_num_blocks is not None
    assert torch.equal(flex.block_mask.full_kv_num_blocks[0], blocks.all(4).all(2).sum(-1, dtype=torch.int32))
