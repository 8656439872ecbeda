"""Contestants that can be brought to compute on a CPU equal the oracle: else their times would be of something else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch.benchmarks import flex
from dilated_attention_pytorch.benchmarks.contestants import CONTESTANTS, Contestant
from dilated_attention_pytorch.benchmarks.exactness import row_counts
from dilated_attention_pytorch.benchmarks.shapes import Case
from support.benchmark_cases import counts_of, oracle, small_case
from support.oracle import dense_attention

# Raised by PyTorch's own modules when the compiler is loaded, and where FlexAttention is not compiled.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
]
BY_NAME = {entry.name: entry for entry in CONTESTANTS}
# Needs a GPU in any case; held to the oracle elsewhere.
ELSEWHERE = ("ours, triton", "ours, model cache", "dense SDPA, cuDNN")
CPU = torch.device("cpu")


@pytest.fixture
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention without its compiler."""
    monkeypatch.setattr(flex.torch, "compile", lambda function, **_: function)


def expected_of(case: Case, contestant: Contestant, operands: tuple[Tensor, ...]) -> Tensor:
    if contestant.computes == "pattern" and case.block_density is None:
        return oracle(case, *operands)
    t = torch.arange(case.rows)
    counts = torch.stack(
        [torch.stack([row_counts(case, p, g, contestant.computes, CPU) for p in t]) for g in range(case.kv_heads)]
    )
    no_zero_pad_keys = torch.zeros(1, case.kv_heads, case.rows)
    return dense_attention(*operands, counts[None], no_zero_pad_keys, case.head_dim**-0.5)[0]


def blocks_case(case: Case, density: float = 0.4) -> Case:
    return replace(case, segment_lengths=(), dilation_rates=(), block_density=density, block_size=128, rows=390)


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in ELSEWHERE])
def test_a_contestant_equals_the_oracle(name: str, heads: int, causal: bool) -> None:
    # The native kernels and the compiled FlexAttention do not compute in float64.
    dtype = "float32" if name in ("ours, native", "FlexAttention") else "float64"
    case = small_case(causal=causal, heads=4, kv_heads=heads, dtype=dtype, rows=101)
    contestant = BY_NAME[name]
    if name.startswith("ours") and contestant.refusal(case, CPU) is not None:
        pytest.skip("not on this machine")
    takes_blocks = "published" not in name and contestant.computes == "pattern"
    for one in (case, blocks_case(case)) if takes_blocks else (case,):
        operands = one.operands(CPU)
        has_gradient = name != "FlexAttention"  # which has none on a CPU
        operands = tuple(x if has_gradient else x.detach() for x in operands)
        out = contestant.prepare(one, operands)(*operands)
        exact = tuple(x.detach().double().requires_grad_() for x in operands)
        expected = expected_of(one, contestant, exact)
        tolerance = 1e-11 if dtype == "float64" else 3e-5
        grad = torch.randn_like(expected)
        pairs = [(out, expected)]
        if has_gradient:
            grads = torch.autograd.grad(out, operands, grad.to(out.dtype))
            pairs += zip(grads, torch.autograd.grad(expected, exact, grad), strict=True)
        for got, want in pairs:
            assert float((got - want).detach().abs().max()) < tolerance


@pytest.mark.parametrize("causal", [False, True])
def test_a_block_mask_is_its_pattern(causal: bool) -> None:
    case = replace(blocks_case(small_case(heads=4, kv_heads=2, causal=causal)), block_size=32)
    positions = torch.arange(case.rows)
    counts = case.pattern.counts(positions, positions, case.kv_heads, is_causal=causal)
    mask = case.block_mask()
    seen = mask.repeat_interleave(32, 1).repeat_interleave(32, 2)[:, : case.rows, : case.rows]
    assert torch.equal(counts.bool(), seen.tril() if causal else seen)
    assert case.num_pairs("pattern") == 2 * int(counts.sum())
    assert mask.sum(-1).unique().tolist() == [round(0.4 * mask.shape[-1])]
    assert mask.diagonal(dim1=1, dim2=2).all()


@pytest.mark.parametrize("name", [name for name in BY_NAME if "SDPA, " in name])
def test_who_needs_a_gpu_says_so(name: str) -> None:
    case = replace(small_case(), dtype="bfloat16", head_dim=64)
    reason = BY_NAME[name].refusal(case, CPU)
    assert reason is not None
    assert "CUDA devices" in reason


def test_on_a_gpu_dense_attention_is_timed_by_kernel() -> None:
    cuda = torch.device("cuda")
    for dtype, by_kernel in (("bfloat16", True), ("float32", False)):
        case = replace(small_case(), dtype=dtype, head_dim=64)
        dense = BY_NAME["dense SDPA"].refusal(case, cuda)
        pinned = [BY_NAME[f"dense SDPA, {kernel}"].refusal(case, cuda) for kernel in ("flash", "cuDNN")]
        assert (dense is None) == (not by_kernel)
        assert [reason is None for reason in pinned] == [by_kernel] * 2
    wide = replace(small_case(), dtype="bfloat16", head_dim=136)
    assert "heads of 8, 16, ... 128" in str(BY_NAME["dense SDPA, cuDNN"].refusal(wide, cuda))


def test_counts_of_the_small_case_are_those_of_the_gate() -> None:
    case = small_case(heads=6, kv_heads=3)
    counts, _ = counts_of(case)
    for g, p in ((0, 0), (1, 37), (2, 100)):
        assert torch.equal(row_counts(case, p, g, "pattern", CPU), counts[0, g, p].double())
