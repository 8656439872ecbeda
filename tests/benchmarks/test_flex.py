"""What FlexAttention is told is the pattern: it is compiled in the benchmark only, and passes the gate there."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import from_block_mask, local_window, strided_blocks
from dilated_attention_pytorch.benchmarks.flex import FlexBlocks, FlexPattern
from support.benchmark_cases import counts_of, small_case

# Raised by PyTorch's own modules when the compiler is loaded.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

LONG = {"rows": 700, "segment_lengths": (130, 256, 640), "dilation_rates": (1, 3, 5)}


@pytest.mark.parametrize("offset_rule", ["modulo", "block"])
@pytest.mark.parametrize("causal", [False, True])
def test_mask_and_scores_say_what_the_counts_say(offset_rule: str, causal: bool) -> None:
    case = small_case(offset_rule=offset_rule, causal=causal, heads=6, kv_heads=3)
    flex = FlexPattern(case, torch.device("cpu"))
    head, query, key = torch.meshgrid(
        torch.arange(case.heads), torch.arange(case.rows), torch.arange(case.rows), indexing="ij"
    )
    counts = counts_of(case)[0][0].repeat_interleave(2, 0)
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(flex.mask(zero, head, query, key), counts > 0)
    scores = flex.score(torch.zeros(counts.shape), zero, head, query, key)
    assert torch.allclose(scores[counts > 0], counts[counts > 0].float().log())


@pytest.mark.parametrize("causal", [False, True])
def test_the_map_of_blocks_leaves_nothing_out_and_asks_the_mask_where_it_has_to(causal: bool) -> None:
    case = small_case(causal=causal, **LONG)
    mask = FlexPattern(case, torch.device("cpu")).block_mask
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
@pytest.mark.parametrize("name", ["mask", "strided", "window"])
def test_blocks_and_windows_are_told_whole(name: str, causal: bool) -> None:
    rows, heads, kv_heads = 700, 4, 2
    generator = torch.Generator().manual_seed(5)
    pattern = {
        "mask": from_block_mask(torch.rand(kv_heads, 6, 6, generator=generator) < 0.5, 128),
        "strided": strided_blocks(3, block_size=128),
        "window": local_window(200, 131),
    }[name]
    flex = FlexBlocks(pattern, rows, heads, kv_heads, is_causal=causal, device=torch.device("cpu"))
    positions = torch.arange(rows)
    seen = (pattern.counts(positions, positions, kv_heads, is_causal=causal) > 0).repeat_interleave(2, 0)
    head, query, key = torch.meshgrid(torch.arange(heads), positions, positions, indexing="ij")
    assert torch.equal(flex.mask(torch.zeros((), dtype=torch.int64), head, query, key), seen)
    pad = -rows % 128
    blocks = torch.nn.functional.pad(seen, (0, pad, 0, pad)).unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
    assert torch.equal(flex.block_mask.to_dense()[0] > 0, blocks.any(4).any(2))
    assert flex.block_mask.full_kv_num_blocks is not None
    assert torch.equal(flex.block_mask.full_kv_num_blocks[0], blocks.all(4).all(2).sum(-1, dtype=torch.int32))


def test_patterns_that_flexattention_is_not_told_are_refused() -> None:
    for pattern in (local_window(3) + local_window(5), strided_blocks(3, block_size=100)):
        with pytest.raises(ValueError, match="expected"):
            FlexBlocks(pattern, 700, 2, 2, is_causal=False, device=torch.device("cpu"))
