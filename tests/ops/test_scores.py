"""Caps, biases and sinks against the dense oracle: every output and gradient, on drawn calls."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention_pytorch import (
    DilatedPattern,
    attend,
    attend_with_lse,
    from_block_mask,
    global_tokens,
    local_window,
    merge,
)
from dilated_attention_pytorch.kernels.select import Impl, refusal
from dilated_attention_pytorch.ops import Scores, attend_blocks, attention_map, attention_maps
from support.drawn import SWEEP, block_calls, calls, examples
from support.processes import fork
from support.scored_calls import NAMES, ScoredCall, check_budget, gradients, scored

P = DilatedPattern([16, 64], [1, 4])
_ON_A_CPU: tuple[Impl, ...] = ("reference", "aten", "native")
IMPLS = [impl for impl in _ON_A_CPU if refusal(impl, torch.device("cpu"), torch.float32, 8) is None]


def check_float64(call: ScoredCall, impl: Impl, worst: dict[str, float]) -> None:
    tensors, *of = call.tensors(torch.float64)
    found = gradients(call, tensors, lambda leaves: call.attend(leaves, impl), *of)
    expected = gradients(call, tensors, call.oracle, *of)
    assert torch.equal(found["lse"].isinf(), expected["lse"].isinf())
    for name, want in expected.items():
        error = (found[name] - want).nan_to_num(posinf=0.0).abs().max().item() if want.numel() else 0.0
        assert error <= 1e-10, (name, error)
        worst[name] = max(worst.get(name, 0.0), error)


@pytest.mark.parametrize(("kind", "number"), [("dilated", 120), ("block", 80)])
def test_float64_equals_the_oracle_to_1e_10(kind: str, number: int, figure: Any) -> None:
    worst: dict[str, float] = {}
    drawn = 0

    @examples(number)
    @given(scored(calls() if kind == "dilated" else block_calls()))
    def check(call: ScoredCall) -> None:
        nonlocal drawn
        check_float64(call, "aten", worst)
        drawn += 1

    check()
    assert drawn >= (10 if SWEEP else 1) * number
    assert worst.keys() == {"out", "lse", "q", "k", "v", *NAMES[1:]}
    figure(f"scores in float64, {drawn} drawn {kind} calls, largest errors", {k: f"{v:.1e}" for k, v in worst.items()})


@examples(60)
@given(scored(calls()))
def test_the_reference_equals_the_oracle(call: ScoredCall) -> None:
    check_float64(call, "reference", {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("impl", ["native", "aten"])
def test_low_precision_stays_within_the_error_budget(impl: Impl, dtype: torch.dtype, figure: Any) -> None:
    if refusal(impl, torch.device("cpu"), dtype, 1) is not None:
        pytest.skip("not on this machine")
    used: dict[str, float] = {}

    @examples(40)
    @given(scored(st.one_of(calls(), block_calls())))
    def check(call: ScoredCall) -> None:
        check_budget(call, dtype, impl, used)

    check()
    figure(f"scores, {impl}, {dtype}, largest part of the error budget used", {k: f"{v:.2f}" for k, v in used.items()})


@pytest.mark.parametrize("impl", ["aten", "native"])
def test_gated_blocks_take_the_same_terms(impl: Any) -> None:
    """Blocks that a pattern has, too, and gates of one: equal to the pattern."""
    if refusal(impl, torch.device("cpu"), torch.float32, 8) is not None:
        pytest.skip("not on this machine")
    q, k, v = (torch.randn(2, 64, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    terms = [x.requires_grad_() for x in (torch.randn(4), torch.rand(4) / 8, torch.randn(4, 41), torch.randn(2, 64, 2))]
    scores = Scores(2.0, *terms)
    blocks = torch.tensor([[0, -1], [0, 1], [1, 2], [2, 3]]).expand(2, 2, 4, 2)
    gates = torch.zeros(2, 2, 4, 2, requires_grad=True)
    mask = torch.zeros(1, 4, 4, dtype=torch.bool)
    for i, listed in enumerate(blocks[0, 0].tolist()):
        mask[0, i, [j for j in listed if j >= 0]] = True
    by_lists = attend_blocks(q, k, v, blocks, gates, block_size=16, is_causal=True, scores=scores, impl=impl)
    by_pattern = attend_with_lse(q, k, v, from_block_mask(mask, 16), is_causal=True, scores=scores, impl="reference")
    leaves = [q, k, v, *terms]
    of = torch.randn_like(by_lists.out)
    found = [*by_lists, *torch.autograd.grad((by_lists.out * of).sum() + by_lists.lse.sum(), leaves)]
    expected = [*by_pattern, *torch.autograd.grad((by_pattern.out * of).sum() + by_pattern.lse.sum(), leaves)]
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_slabs_of_keys_merge_and_sinks_are_added_once() -> None:
    q, k, v = torch.randn(3, 1, 100, 4, 8, dtype=torch.float64)
    sinks, slopes = torch.randn(2, 4, dtype=torch.float64)
    whole = attend(q, k, v, P, is_causal=True, scores=Scores(3.0, sinks, slopes))
    partials = [
        attend_with_lse(
            q, k[:, rows], v[:, rows], P, is_causal=True, key_offset=rows.start, scores=Scores(3.0, s, slopes)
        )
        for rows, s in ((slice(0, 40), sinks), (slice(40, 100), None))
    ]
    torch.testing.assert_close(merge(partials).out, whole)


@pytest.mark.parametrize("softcap", [1e-40, 0.5, 50.0, 1e30, 1e300])
def test_a_scale_of_zero_leaves_the_biases(softcap: float) -> None:
    q, k, v = (torch.randn(1, 9, 2, 4, requires_grad=True) for _ in range(3))
    slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    results = []
    for impl in IMPLS:
        out = attend(q, k, v, P, is_causal=True, scale=0.0, impl=impl, scores=Scores(softcap, slopes=slopes))
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, slopes))])
        assert not results[-1][1].any()
    for got, want in zip(results[-1], results[0], strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("impl", IMPLS)
def test_caps_out_of_the_range_of_float32_are_caps(impl: Impl) -> None:
    q, k, v = torch.randn(3, 1, 9, 2, 4, generator=torch.Generator().manual_seed(0))
    uncapped = attend(q, k, v, P, is_causal=True, impl=impl)
    equal = attend(q, k, v, P, is_causal=True, impl=impl, scale=0.0)
    q[0, 3] = 0.0
    for softcap, expected in ((1e-300, equal), (1e300, uncapped)):
        leaf = q.clone().requires_grad_()
        out = attend(leaf, k, v, P, is_causal=True, impl=impl, scores=Scores(softcap))
        rows = [row for row in range(9) if row != 3]
        torch.testing.assert_close(out[:, rows], expected[:, rows])
        torch.testing.assert_close(out[:, 3], equal[:, 3])
        (grad,) = torch.autograd.grad(out.square().sum(), leaf)
        assert grad.isfinite().all()
        assert grad[0, 3].any()  # the slope of a cap at 0 is 1


def test_alibi_at_a_distance_of_a_million_keeps_its_digits() -> None:
    """The nearest key is far, as for a slab of old keys: only differences of distances count."""
    q, k, v = torch.randn(3, 1, 64, 2, 16, dtype=torch.float64)
    slopes = torch.tensor([0.5, 0.03125], dtype=torch.float64)
    call = {"query_offset": 1 << 20, "key_offset": 0}
    pattern = local_window(1 << 21)
    exact = attend(q, k, v, pattern, scores=Scores(slopes=slopes), **call)  # type: ignore[arg-type]
    for impl in ("aten", "reference"):
        single = attend(
            *(x.float() for x in (q, k, v)), pattern, scores=Scores(slopes=slopes.float()), impl=impl, **call
        )  # type: ignore[call-overload]
        torch.testing.assert_close(single.double(), exact, rtol=0, atol=2e-5)


def test_t5_buckets_are_those_of_its_formula() -> None:
    transformers = pytest.importorskip("transformers.models.t5.modeling_t5")
    bucket_of = transformers.T5Attention._relative_position_bucket
    distance = torch.arange(-300, 301)
    for is_bidirectional in (True, False):
        for buckets, most in ((32, 128), (8, 20), (16, 64), (4, 100)):
            table = torch.randn(buckets, 3)
            bias = Scores.t5(table, most, is_bidirectional=is_bidirectional).distance_bias
            assert bias is not None
            found = bias[:, distance.clamp(-most, most) + most]
            expected = table[bucket_of(distance, is_bidirectional, buckets, most)].T
            assert torch.equal(found, expected), (is_bidirectional, buckets, most)


@pytest.mark.parametrize("queries", [[0, 17, 99], "mean"])
def test_maps_have_the_terms(queries: Any) -> None:
    q, k, v = (torch.randn(2, 100, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    scores = Scores(2.0, *(x.double() for x in (torch.randn(4), torch.rand(4), torch.randn(4, 9), torch.randn(2, 100))))
    with attention_maps(queries) as maps:
        out = attend(q, k, v, P, scores=scores)
    expected = out.mean(1, keepdim=True) if queries == "mean" else out[:, queries]
    for found in (*maps, attention_map(q, k, P, queries, scores=scores)):
        torch.testing.assert_close(torch.einsum("brhm,bmhd->brhd", found, v.repeat_interleave(2, 2)), expected)


@pytest.mark.parametrize("queries", [[0, 17, 99], "mean"])
def test_maps_have_distances_in_the_plane(queries: Any) -> None:
    q, k, v = (torch.randn(2, 100, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    scores = Scores(slopes=torch.rand(4).double(), coordinates=torch.randint(20, (2, 100, 2)))
    out = attend(q, k, v, P, scores=scores)
    expected = out.mean(1, keepdim=True) if queries == "mean" else out[:, queries]
    found = attention_map(q, k, P, queries, scores=scores)
    torch.testing.assert_close(torch.einsum("brhm,bmhd->brhd", found, v.repeat_interleave(2, 2)), expected)


def test_packed_documents_count_distances_within_each() -> None:
    q, k, v = torch.randn(3, 1, 70, 2, 8, dtype=torch.float64)
    scores = Scores(distance_bias=torch.randn(2, 31, dtype=torch.float64), slopes=torch.tensor([0.1, 0.2]).double())
    boundaries = torch.tensor([0, 30, 70], dtype=torch.int32)
    packed = attend(q, k, v, P, is_causal=True, cu_seqlens=boundaries, scores=scores)
    alone = [
        attend(*(x[:, rows] for x in (q, k, v)), P, is_causal=True, scores=scores)
        for rows in (slice(30), slice(30, 70))
    ]
    torch.testing.assert_close(packed, torch.cat(alone, 1))


def test_it_is_one_graph_with_gradients() -> None:
    sinks, slopes = torch.randn(4, requires_grad=True), torch.rand(4, requires_grad=True)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = Scores(3.0, sinks, slopes)
        return attend(q, k, v, P + global_tokens(2), is_causal=True, scores=scores).square().sum()

    q, k, v = (torch.randn(1, 80, 4, 8, requires_grad=True) for _ in range(3))
    leaves = [q, k, v, sinks, slopes]
    expected = torch.autograd.grad(loss(q, k, v), leaves)
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(q, k, v), leaves)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_other_derivatives_are_refused_or_dense() -> None:
    q, k, v = (torch.randn(1, 20, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    slopes = torch.rand(2, dtype=torch.float64, requires_grad=True)
    scores = Scores(2.0, slopes=slopes)

    def second(impl: Impl) -> Tensor:
        (grad,) = torch.autograd.grad(attend(q, k, v, P, scores=scores, impl=impl).square().sum(), q, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), slopes)[0]

    assert second("reference").isfinite().all()
    with pytest.raises(
        NotImplementedError, match='no second or forward-mode derivatives: attend with impl="reference"'
    ):
        second("aten")
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda *x: attend(*x[:3], P, scores=Scores(sinks=x[3])), (q, k, v, sinks))


@pytest.mark.parametrize("impl", ["aten", "native"])
def test_memory_is_linear_in_rows(impl: Impl) -> None:
    """One tensor of N x N scores of all heads would take 537 MB."""
    if refusal(impl, torch.device("cpu"), torch.float32, 8) is not None:
        pytest.skip("not on this machine")

    def grown() -> None:
        torch.set_num_threads(1)

        def step(rows: int) -> None:
            q, k, v = (torch.randn(1, rows, 8, 16, requires_grad=True) for _ in range(3))
            terms = [torch.rand(8, requires_grad=True), torch.rand(8), torch.randn(8, 65, requires_grad=True)]
            scores = Scores(5.0, *terms, torch.randn(1, rows, requires_grad=True))
            attend(q, k, v, DilatedPattern([4096], [1]), scores=scores, impl=impl).sum().backward()

        step(64)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        step(4096)
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)

    ended = fork(grown).ended()
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < 120, "MB"


X, SLOPES = torch.zeros(1, 6, 4, 8), torch.zeros(4)
WRONG: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: Scores(softcap=0.0), ValueError, "softcap must be a positive number, or None for no cap, got 0.0"),
    (lambda: Scores(softcap=True), ValueError, "softcap must be a positive number, or None for no cap, got True"),
    (lambda: Scores(sinks=[0.0]), TypeError, "sinks must be a floating tensor [H], got list"),  # type: ignore[arg-type]
    (lambda: Scores(slopes=torch.zeros(2, 1)), ValueError, "slopes must have the shape [H], got [2, 1]"),
    (lambda: Scores(key_bias=torch.zeros(2, 1).bool()), TypeError,
     "key_bias must be a floating tensor [B, M] or [B, M, G], got torch.bool"),
    (lambda: Scores(distance_bias=torch.zeros(2, 4)), ValueError,
     "distance_bias must have the shape [H, 2 W + 1], for the distances -W to W, got [2, 4]"),
    (lambda: Scores.t5(torch.zeros(3, 2), is_bidirectional=True), ValueError,
     "table must have a multiple of 4 buckets, and max_distance more than 0 positions, got 3 buckets and max_distance"),
    (lambda: attend(X, X, X, P, scores=Scores(sinks=torch.zeros(3))), ValueError,
     "sinks of scores must be [H] = [4], got [3]"),
    (lambda: attend(X, X, X, P, scores=Scores(slopes=torch.zeros(4).double())), TypeError,
     "slopes of scores must not be float64 for scores in torch.float32: convert with slopes.to(torch.float32)"),
    (lambda: attend(X, X, X, P, scores=Scores(key_bias=torch.zeros(1, 5))), ValueError,
     "key_bias of scores must be [B, M] or [B, M, G] = [1, 6], got [1, 5]"),
    (lambda: attend(X, X, X, P, scores=Scores(distance_bias=torch.zeros(2, 5))), ValueError,
     "distance_bias of scores must be [H = 4, 2 W + 1], got [2, 5]"),
    (lambda: attend(X, X, X, P, scores=Scores(sinks=torch.zeros(4, device="meta"))), ValueError,
     "sinks of scores must be on query's device cpu, got meta"),
    (lambda: Scores(coordinates=torch.zeros(1, 6, 2)), ValueError,
     "coordinates give slopes their distances, and distance_bias counts positions: pass slopes without distance_bias, "
     "got no slopes"),
    (lambda: Scores(slopes=SLOPES, distance_bias=torch.zeros(4, 3), coordinates=torch.zeros(1, 6, 2)), ValueError,
     "pass slopes without distance_bias, got distance_bias"),
    (lambda: Scores(slopes=SLOPES, coordinates=torch.zeros(6, 2)), ValueError,
     "coordinates must have the shape [B, M, 2], got [6, 2]"),
    (lambda: Scores(slopes=SLOPES, coordinates=[(0, 1)]), TypeError,  # type: ignore[arg-type]
     "coordinates must be a tensor [B, M, 2] of real numbers, got list"),
    (lambda: Scores(slopes=SLOPES, coordinates=torch.zeros(1, 6, 2, requires_grad=True)), ValueError,
     "coordinates have no gradient, got a tensor that requires one: pass coordinates.detach()"),
    (lambda: attend(X, X, X, P, scores=Scores(slopes=SLOPES, coordinates=torch.zeros(1, 5, 2))), ValueError,
     "coordinates of scores must be [B, M, 2] = [1, 6, 2] on query's device cpu, got [1, 5, 2] on cpu"),
    (lambda: attend(X, X, X, P, query_offset=1, scores=Scores(slopes=SLOPES, coordinates=torch.zeros(1, 6, 2))),
     ValueError, "with coordinates, queries must lie at positions of keys, 0 to 5: got 6 queries from position 1 on"),
    (lambda: attend(X[:, :1], X, X, P, is_causal=True, query_offset=torch.tensor(5),
                    scores=Scores(slopes=SLOPES, coordinates=torch.zeros(1, 6, 2))),
     NotImplementedError, "coordinates of scores need query_offset as an integer, got a tensor"),
    (lambda: attend(X, X, X, P, scores={"softcap": 3.0}), TypeError,  # type: ignore[arg-type]
     "scores must be dilated_attention_pytorch.ops.Scores(...) or None, got dict"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_calls(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert message in str(raised.value)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(1, 41), (2, 41, 1)], ids=str)
def test_one_bias_of_keys_for_all_sequences_or_heads_is_that_of_each(shape: tuple[int, ...], impl: Impl) -> None:
    dtype, rounding = (torch.float32, 1e-5) if impl == "native" else (torch.float64, 1e-12)
    q, k, v = (torch.randn(2, 41, heads, 5, dtype=dtype) for heads in (6, 3, 3))
    one = torch.randn(shape, dtype=dtype, requires_grad=True)
    each = (one if one.dim() == 3 else one[..., None]).expand(2, 41, 3).detach().clone().requires_grad_()
    results = [attend(q, k, v, P, scores=Scores(key_bias=bias), impl=impl) for bias in (one, each)]
    assert torch.equal(*results)
    of_one, of_each = (
        torch.autograd.grad(out.sin().sum(), bias)[0] for out, bias in zip(results, (one, each), strict=True)
    )
    of_all = of_each.sum(dim=2, keepdim=True) if one.dim() == 3 else of_each.sum(dim=(0, 2))[None]
    torch.testing.assert_close(of_one, of_all, rtol=rounding, atol=rounding)
