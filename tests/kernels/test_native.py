"""The native CPU kernels: what they read, how exact they are, and cases that small drawn calls do not reach."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention_pytorch import (
    DilatedPattern,
    Pattern,
    attend,
    attend_with_lse,
    global_tokens,
    local_window,
    random_blocks,
)
from dilated_attention_pytorch.kernels import native
from dilated_attention_pytorch.kernels.compilation import library_path, refusal_to_load
from dilated_attention_pytorch.kernels.select import Impl
from dilated_attention_pytorch.ops import Scores, attend_blocks
from dilated_attention_pytorch.ops.implementations import IMPLEMENTATIONS
from dilated_attention_pytorch.ops.remote import RemoteKeys, merge_rows
from dilated_attention_pytorch.precision import accumulation_dtype
from support.drawn import DrawnCall, Sizes, block_calls, calls, examples
from support.processes import environment, run_whole

pytestmark = pytest.mark.skipif(refusal_to_load() is not None, reason=str(refusal_to_load()))

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Under terms of the scores, whose gradients are sums over all pairs."""
NAMES = ("out", "lse", "grad_query", "grad_key", "grad_value")
PATTERNS: dict[str, Pattern] = {
    "dilated": DilatedPattern([16, 50, 128], [1, 2, 3]),
    "zero-padded": DilatedPattern([16, 50], [1, 3], tail="zero_padded"),
    "window": local_window(20, 3),
    "blocks": random_blocks(0.3, block_size=16, seed=1),
    "sum": local_window(9) + global_tokens(3) + DilatedPattern([64], [2]),
}


def outcome(
    operands: list[Tensor],
    pattern: Pattern,
    impl: Impl,
    terms: dict[str, Tensor] | None = None,
    softcap: float | None = None,
    coordinates: Tensor | None = None,
    **options: Any,
) -> list[Tensor]:
    """Output, log-sum-exp and gradients; the last two operands are the gradients of the outputs."""
    *leaves, grad_out, grad_lse = operands
    leaves = [x.detach().requires_grad_() for x in leaves]
    dtype = accumulation_dtype(leaves[0].dtype)
    of_scores = {name: x.to(dtype).requires_grad_() for name, x in (terms or {}).items()}
    if terms or softcap:
        options["scores"] = Scores(softcap, **of_scores, coordinates=coordinates)
    out, lse = attend_with_lse(*leaves, pattern, impl=impl, **options)
    leaves += of_scores.values()
    seen = lse.masked_fill(lse == -math.inf, 0.0)
    grads = torch.autograd.grad((out, seen), leaves, (grad_out.to(out.dtype), grad_lse.to(lse.dtype)))
    return [out.detach(), lse.detach(), *grads]


def draw(
    shape: tuple[int, int, int, int, int, int], dtype: torch.dtype, seed: int = 0, value_dim: int | None = None
) -> list[Tensor]:
    """Operands of ``(batch, queries, keys, heads, key/value heads, width)``; values are as wide as keys by default."""
    generator = torch.Generator().manual_seed(seed)
    batch, queries, keys, heads, kv_heads, width = shape
    of_values = value_dim or width
    sizes = [
        (batch, queries, heads, width),
        (batch, keys, kv_heads, width),
        (batch, keys, kv_heads, of_values),
        (batch, queries, heads, of_values),
    ]
    operands = [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]
    return [*operands, torch.randn(sizes[0][:3], generator=generator, dtype=torch.float64)]


def draw_terms(operands: list[Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Biases by distance and by key for operands of :func:`draw`, in float64."""
    generator = torch.Generator().manual_seed(seed)
    heads, of_keys = operands[0].shape[2], operands[1].shape[:3]
    # Rounded to float32: every implementation gets the same.
    return {
        "slopes": torch.rand(heads, generator=generator).double() / 64,
        "distance_bias": torch.randn(heads, 101, generator=generator).double(),
        "key_bias": torch.randn(of_keys, generator=generator).double(),
    }


def draw_in_the_plane(operands: list[Tensor], seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Like :func:`draw_terms`, with coordinates for the slopes. Some positions have none; distances are below 1, as
    the gradients of slopes are sums of them."""
    generator = torch.Generator().manual_seed(seed)
    batch, keys = operands[1].shape[:2]
    terms = draw_terms(operands, seed)
    coordinates = torch.rand(batch, keys, 2, generator=generator) / 2
    coordinates.masked_fill_(torch.rand(batch, keys, 1, generator=generator) < 0.1, math.nan)
    return {"slopes": terms["slopes"] * 512, "key_bias": terms["key_bias"]}, coordinates


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for name, got, want in zip((*NAMES, *("another gradient",) * 4), found, expected, strict=False):
        is_seen = want.isfinite()
        assert torch.equal(got.isfinite(), is_seen), name
        got, want = got.double()[is_seen], want.double()[is_seen]
        # Numbers are sums of others of about 1 that may cancel: what is left of them is off by the rounding of those.
        size = want.norm() + want.numel() ** 0.5
        if want.numel():
            assert float((got - want).norm()) <= tolerance * float(size), name


@pytest.mark.parametrize("kind", ["dilated", "block"])
def test_operands_in_storage_of_nan_give_the_same_bits(kind: str) -> None:
    @examples(20)
    @given(calls() if kind == "dilated" else block_calls())
    def check(call: DrawnCall) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            *operands, grad_lse = call.tensors(dtype)
            apart = []
            for x in operands:
                # Rows, heads and widths with NaN around them.
                batch, rows, heads, width = x.shape
                room = torch.full((batch, 2 * rows + 3, heads + 2, width + 5), math.nan, dtype=dtype)
                view = room[:, 1 : 1 + 2 * rows : 2, 1:-1, 2 : 2 + width]
                apart.append(view.copy_(x))
            options = {"is_causal": call.is_causal, "scale": call.scale, **call.options}
            for got, want in zip(
                outcome([*apart, grad_lse], call.pattern, "native", **options),
                outcome([*[x.contiguous() for x in operands], grad_lse], call.pattern, "native", **options),
                strict=True,
            ):
                assert torch.equal(got, want)
                assert not got.isnan().any()

    check()


@pytest.mark.parametrize("width", [16, 48, 64, 128])
def test_float32_is_at_most_twice_as_far_from_exact_arithmetic_as_the_fused_kernel(width: int, figure: Any) -> None:
    pattern = DilatedPattern([256, 512, 1024], [1, 2, 4])
    worst = 0.0
    for is_causal in (False, True):
        operands = draw((1, 1024, 1024, 4, 2, width), torch.float32)
        exact = outcome([x.double() for x in operands], pattern, "aten", is_causal=is_causal)
        theirs, ours = (outcome(operands, pattern, impl, is_causal=is_causal) for impl in ("aten", "native"))
        for name, mine, other, want in zip(NAMES, ours, theirs, exact, strict=True):
            ratio = float((mine - want).norm() / (other - want).norm())
            assert ratio <= 2.0, name
            worst = max(worst, ratio)
    figure(f"native, float32, heads {width} wide, largest error over that of the fused kernel", f"{worst:.2f}")


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dropout_and_padding_leave_out_what_the_reference_leaves_out(name: str, dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    for is_causal in (False, True):
        for dropout_p in (0.0, 0.37):
            operands = draw((2, 97, 97, 4, 2, 24), dtype)
            mask = None if name == "zero-padded" else torch.arange(97).expand(2, 97) % 5 == torch.arange(2)[:, None]
            options = {"is_causal": is_causal, "dropout_p": dropout_p, "key_padding_mask": mask}
            both = []
            for impl, tensors in (("native", operands), ("reference", [x.double() for x in operands])):
                torch.manual_seed(3)
                both.append(outcome(tensors, PATTERNS[name], impl, **options))  # type: ignore[arg-type]
            assert_close(*both, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_keys_and_many_queries_are_taken_in_parts(dtype: torch.dtype) -> None:
    """More keys than lie packed at a time, and more queries; on several threads keys are dealt out as well."""
    of_products = {torch.float32: 3e-6, torch.bfloat16: 1e-2}[dtype]
    for shape, pattern in (
        ((1, 150, 2 * native.KEYS_OF_WINDOW + 300, 4, 2, 8), DilatedPattern([1 << 20], [1])),
        ((1, 150, 3 * native.KEYS_OF_WINDOW, 1, 1, 8), local_window(9000, 9000)),
        ((1, 9000, 2100, 1, 1, 8), DilatedPattern([1 << 20], [1])),
        ((1, 9000, 9000, 1, 1, 8), local_window(700, 30)),
    ):
        operands = draw(shape, dtype)
        offsets = {"query_offset": 8000} if shape[1] == 150 else {}
        terms = draw_terms(operands)
        del terms["slopes"]  # its gradient is a difference of sums of distances, thousands of times as large
        in_the_plane, coordinates = draw_in_the_plane(operands)
        for of_scores, tolerance in (
            ((None, None, None), of_products),
            ((terms, 3.0, None), TOLERANCES[dtype]),
            ((in_the_plane, None, coordinates), TOLERANCES[dtype]),
        ):
            if of_scores[2] is not None and shape[1] > shape[2]:
                continue  # queries lie at positions of keys
            expected = outcome([x.double() for x in operands], pattern, "aten", *of_scores, **offsets)
            for threads in (1, 3):
                torch.set_num_threads(threads)
                assert_close(outcome(operands, pattern, "native", *of_scores, **offsets), expected, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_few_queries_read_keys_and_values_of_any_shape(dtype: torch.dtype) -> None:
    """Steps of decoding: as many queries as are taken without packing, and more heads than are read together."""
    tolerance = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]

    @examples(15)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        batch, queries, ratio, kv_heads = (data.draw(st.integers(1, most)) for most in (3, 3, 5, 5))
        keys, width = data.draw(st.integers(queries, 1300)), data.draw(st.integers(1, 140))
        operands = draw((batch, queries, keys, ratio * kv_heads, kv_heads, width), dtype, data.draw(st.integers(0, 99)))
        patterns: list[Pattern] = [
            DilatedPattern([keys], [1]),
            DilatedPattern([2048, 90], [1, 3]),
            local_window(700, 3),
        ]
        hidden = torch.rand(batch, keys, generator=torch.Generator().manual_seed(keys)) < 0.3
        options = {
            "is_causal": data.draw(st.booleans()),
            "query_offset": keys - queries,
            "key_padding_mask": hidden if data.draw(st.booleans()) else None,
        }
        pattern = data.draw(st.sampled_from(patterns))
        found = outcome(operands, pattern, "native", **options)
        assert_close(found, outcome([x.double() for x in operands], pattern, "aten", **options), tolerance)

    check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_stored_rows_are_read_where_they_lie(dtype: torch.dtype) -> None:
    """Some rows of a storage, others for every head: as if they had been copied together, and merged twice."""
    for num_rows, ratio in ((1, 1), (1, 4), (1, 16), (3, 1), (2, 3), (4, 4)):
        generator = torch.Generator().manual_seed(10 * num_rows + ratio)
        query = torch.randn(2, num_rows, 3, ratio, 40, generator=generator).to(dtype)
        stored = [torch.randn(2, 700, 5, 40, generator=generator).to(dtype)[:, :, 1:4] for _ in range(2)]
        slots = torch.stack([torch.randperm(700, generator=generator)[:590] for _ in range(3)])
        together = [x[:, slots.T, torch.arange(3)] for x in stored]
        results = []
        for keys in (RemoteKeys(*stored, seen_rows=slots), RemoteKeys(*together)):
            out, lse = torch.zeros(query.shape), torch.full(query.shape[:4], -math.inf)
            for _ in range(2):
                merge_rows(query, keys, out, lse, scale=0.2, impl=IMPLEMENTATIONS["native"])
            results.append((out, lse))
        assert all(map(torch.equal, *results))
        scores = torch.einsum("bpgrd,btgd->bpgrt", query.double(), together[0].double()) * 0.2
        expected = torch.einsum("bpgrt,btgd->bpgrd", scores.softmax(-1), together[1].double())
        tolerance = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
        assert float((results[0][0] - expected).norm()) <= tolerance * float(expected.norm())
        assert torch.allclose(results[0][1].double(), scores.logsumexp(-1) + math.log(2), atol=tolerance, rtol=0.0)


@pytest.mark.parametrize("kind", ["dilated", "block"])
def test_drawn_calls_of_several_tiles_and_all_widths(kind: str) -> None:
    """Calls that are larger than a tile of queries and a block of keys, with heads up to the widest."""
    sizes = Sizes(
        st.one_of(st.integers(1, 200), st.integers(200, 1100)),
        2,
        2,
        (3, 24, 33, 64, 80, 128, 200, 256),
        groups=2,
        summands=(1, 1, 2),
        segments=st.one_of(st.integers(1, 90), st.integers(90, 1500)),
    )

    @examples(8, is_shrunk=False)
    @given(calls(sizes=sizes) if kind == "dilated" else block_calls(sizes=sizes))
    def check(call: DrawnCall) -> None:
        options = {"is_causal": call.is_causal, "scale": call.scale, **call.options}
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
            operands = call.tensors(dtype)
            expected = outcome([x.double() for x in operands], call.pattern, "aten", **options)
            assert_close(outcome(operands, call.pattern, "native", **options), expected, tolerance)

    check()


@pytest.mark.parametrize("ratio", [1, 7, 48, *(pytest.param(ratio, marks=pytest.mark.slow) for ratio in (2, 3, 5, 16))])
def test_edges_of_bands_cut_tiles_of_any_number_of_heads(ratio: int) -> None:
    for dtype, tolerance in ((torch.float32, 3e-6), (torch.bfloat16, 1e-2)):
        for pattern in (local_window(90, 40), DilatedPattern([500, 700], [1, 3])):
            operands = draw((1, 700, 700, ratio, 1, 9), dtype, ratio)
            for is_causal in (False, True):
                expected = outcome([x.double() for x in operands], pattern, "aten", is_causal=is_causal)
                assert_close(outcome(operands, pattern, "native", is_causal=is_causal), expected, tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_terms_of_the_scores_and_values_of_their_own_width(dtype: torch.dtype) -> None:
    """Every term and their mixtures, under bands, lists and listed rows, with few and many queries and all masks."""

    @examples(30, is_shrunk=False)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        batch, ratio, kv_heads = (data.draw(st.integers(1, most)) for most in (2, 5, 2))
        keys, seed = data.draw(st.integers(1, 300)), data.draw(st.integers(0, 99))
        queries = data.draw(st.one_of(st.just(keys), st.integers(1, min(4, keys))))
        width, value_dim = (data.draw(st.sampled_from([1, 7, 16, 33, 64])) for _ in range(2))
        shape = (batch, queries, keys, ratio * kv_heads, kv_heads, width)
        operands = draw(shape, dtype, seed, value_dim)
        names = data.draw(st.sets(st.sampled_from(["slopes", "distance_bias", "key_bias"])))
        terms, coordinates = draw_in_the_plane(operands, seed) if seed % 2 else (draw_terms(operands, seed), None)
        names = names if coordinates is None else names | {"slopes"}
        terms = {name: x for name, x in terms.items() if name in names}
        softcap = data.draw(st.sampled_from([None, 0.7, 3.0]))
        hidden = torch.rand(batch, keys, generator=torch.Generator().manual_seed(seed)) < 0.3
        name = data.draw(st.sampled_from([name for name in PATTERNS if name != "zero-padded"]))
        options = {
            "is_causal": data.draw(st.booleans()),
            "query_offset": keys - queries,
            "key_padding_mask": hidden if data.draw(st.booleans()) else None,
            "dropout_p": data.draw(st.sampled_from([0.0, 0.37])),
            "coordinates": coordinates,
        }
        torch.set_num_threads(data.draw(st.sampled_from([1, 3])))
        both = []
        for impl, tensors in (("native", operands), ("reference", [x.double() for x in operands])):
            torch.manual_seed(3)
            both.append(outcome(tensors, PATTERNS[name], impl, terms, softcap, **options))  # type: ignore[arg-type]
        assert_close(*both, TOLERANCES[dtype])

    check()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("query_block_size", [16, 1])
def test_gates_are_added_to_the_terms_of_listed_blocks(dtype: torch.dtype, query_block_size: int) -> None:
    for is_causal, dropout_p, has_gates, is_in_the_plane in (
        (True, 0.0, True, False),
        (False, 0.37, True, True),
        (True, 0.0, False, False),
        (True, 0.0, True, True),
    ):
        q, k, v, of_out, of_lse = draw((2, 90, 90, 6, 2, 24), dtype, value_dim=40)
        generator = torch.Generator().manual_seed(1)
        blocks = torch.randint(-1, 6, (2, 2, -(-90 // query_block_size), 3), generator=generator)
        gates = torch.randn(blocks.shape, generator=generator).double()
        terms, coordinates = draw_in_the_plane([q, k]) if is_in_the_plane else (draw_terms([q, k]), None)
        both = []
        for impl, exact in (("native", False), ("aten", True)):
            of_scores = torch.float64 if exact else torch.float32
            leaves = [x.double() if exact else x for x in (q, k, v)] + [
                x.to(of_scores) for x in (gates, *terms.values())
            ]
            leaves = [x.requires_grad_() for x in leaves if has_gates or x.shape != gates.shape]
            torch.manual_seed(3)
            out, lse = attend_blocks(
                *leaves[:3],
                blocks,
                leaves[3] if has_gates else None,
                block_size=16,
                query_block_size=query_block_size,
                is_causal=is_causal,
                dropout_p=dropout_p,
                scores=Scores(3.0, **dict(zip(terms, leaves[-len(terms) :], strict=True)), coordinates=coordinates),
                impl=impl,  # type: ignore[arg-type]
            )
            seen = lse.masked_fill(lse == -math.inf, 0.0)
            grads = torch.autograd.grad((out, seen), leaves, (of_out.to(out.dtype), of_lse.to(lse.dtype)))
            both.append([out.detach(), lse.detach(), *grads])
        assert_close(*both, TOLERANCES[dtype])


def test_caps_of_any_size_keep_the_digits_of_scores() -> None:
    """The error of a cap is relative to the score. A cap below the smallest float32 number is a cap, too."""
    for rows in (1, 97):
        operands = draw((1, 97, 97, 4, 2, 16), torch.float32)
        operands = [x[:, -rows:] if i in (0, 3, 4) else x for i, x in enumerate(operands)]
        options: dict[str, Any] = {"query_offset": 97 - rows, "is_causal": True}
        for softcap, of_exact in ((1e5, None), (1e-50, 1e-50)):
            expected = outcome([x.double() for x in operands], PATTERNS["dilated"], "aten", None, of_exact, **options)
            assert_close(outcome(operands, PATTERNS["dilated"], "native", None, softcap, **options), expected, 3e-6)


def test_two_calls_give_the_same_bits() -> None:
    torch.set_num_threads(3)
    for pattern in PATTERNS.values():
        for dtype in (torch.float32, torch.bfloat16):
            operands = draw((2, 300, 300, 4, 2, 40), dtype)
            for terms, coordinates in ((draw_terms(operands), None), draw_in_the_plane(operands)):
                of_scores = (terms, 3.0, coordinates)
                first, second = (outcome(operands, pattern, "native", *of_scores, is_causal=True) for _ in range(2))
                assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("name", PATTERNS)
def test_what_comes_later_changes_no_bit_of_what_was_before(name: str) -> None:
    q, k, v, *_ = draw((1, 97, 97, 4, 2, 16), torch.float32)
    out = attend(q, k, v, PATTERNS[name], is_causal=True, impl="native")
    for position in (1, 16, 63, 64, 96):
        changed_key, changed_value = k.clone(), v.clone()
        changed_key[:, position:] *= 30.0
        changed_value[:, position:] += 1e4
        changed = attend(q, changed_key, changed_value, PATTERNS[name], is_causal=True, impl="native")
        assert torch.equal(out[:, :position], changed[:, :position])


def test_what_is_not_finite_and_large_scores_are_as_under_the_fused_kernel() -> None:
    """Both are found around the kernels: see tests/ops/test_extremes.py."""
    operands = draw((1, 97, 97, 4, 2, 16), torch.float32)
    operands[1][0, 40, 1] = math.nan
    operands[2][0, 70, 0] = math.inf
    large = [operands[0] * 1e5, operands[1].nan_to_num() * 1e3, *operands[2:]]
    large[2] = large[2].nan_to_num(posinf=1.0)
    for pattern in PATTERNS.values():
        for tensors in (operands, large):
            ours, theirs = (outcome(tensors, pattern, impl, is_causal=True) for impl in ("native", "aten"))
            for mine, other in zip(ours, theirs, strict=True):
                assert torch.equal(mine.isfinite(), other.isfinite())
        assert_close(ours[:2], theirs[:2], 1e-6)
        assert all(map(torch.equal, ours[2:], theirs[2:]))  # gradients of large scores are of the same products


def test_other_devices_dtypes_and_widths_are_refused() -> None:
    q = torch.randn(1, 8, 2, 16, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match='accumulate in float32; impl="aten"'):
        attend(q, q, q, local_window(3), impl="native")
    wide = torch.randn(1, 8, 2, 264)
    with pytest.raises(NotImplementedError, match="up to 256 wide, got 264"):
        attend(wide, wide, wide, local_window(3), impl="native")
    with pytest.raises(NotImplementedError, match="up to 256 wide, got 264"):
        attend(wide[..., :8], wide[..., :8], wide, local_window(3), impl="native")
    meta = torch.empty(1, 8, 2, 16, device="meta")
    with pytest.raises(NotImplementedError, match="for CPUs, not for 'meta'"):
        attend(meta, meta, meta, local_window(3), impl="native")


@pytest.mark.slow  # it compiles the kernels again
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="the other tests are of AVX2 here")
def test_kernels_of_avx2_keep_the_same_laws() -> None:
    laws = "at_most_twice and 48 or dropout_and_padding and sum or few_queries or stored_rows or several_tiles or terms"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-o", "addopts=", __file__, "-k", laws]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    environment.pop("HYPOTHESIS_PROFILE", None)  # a sweep is of the machine's own instructions
    # The user's folder, to which the one of these tests has links: else every run would compile those of AVX2.
    environment["XDG_CACHE_HOME"] = str(library_path().resolve().parents[2])
    found = run_whole(command, 600.0, env=environment)
    assert " passed" in found.stdout, found.stdout
    assert found.returncode == 0, found.stdout


def test_the_number_of_threads_changes_no_bit_of_an_output() -> None:
    for pattern in (PATTERNS["dilated"], PATTERNS["sum"], DilatedPattern([2000], [1])):
        for dtype in (torch.float32, torch.bfloat16):
            for rows in (3, 1500):
                operands = draw((1, rows, 1500, 4, 2, 24), dtype)
                both = []
                for threads in (1, 3):
                    torch.set_num_threads(threads)
                    both.append(attend(*operands[:3], pattern, query_offset=1500 - rows, impl="native"))
                assert torch.equal(*both)


def test_the_number_of_threads_changes_no_bit_of_the_gradient_of_slopes_in_the_plane() -> None:
    """Keys are dealt out to three threads in shares, of which every block has its own sum."""
    for pattern in (local_window(3000, 700), DilatedPattern([1000, 8000], [1, 3])):
        for dtype in (torch.float32, torch.bfloat16):
            operands = draw((1, 5000, 5000, 2, 1, 8), dtype)
            terms, coordinates = draw_in_the_plane(operands)
            slopes = {"slopes": terms["slopes"]}
            both = []
            for threads in (1, 3):
                torch.set_num_threads(threads)
                both.append(outcome(operands, pattern, "native", slopes, None, coordinates)[-1])
            assert torch.equal(*both)


def test_small_calls_are_computed_by_the_calling_thread() -> None:
    """A step of decoding, and a short sequence with its gradients, start no thread."""
    program = """
import os, torch
from dilated_attention_pytorch import DilatedPattern, attend
def draw(rows, dtype):
    torch.set_num_threads(1)
    drawn = [torch.randn(1, rows, 4, 16).to(dtype).requires_grad_(rows < 100) for _ in range(3)]
    torch.set_num_threads(4)
    return drawn
pattern, threads = DilatedPattern([1024, 4096], [1, 4]), lambda: len(os.listdir("/proc/self/task"))
for dtype in (torch.float32, torch.bfloat16):
    q, k, v = draw(60_000, dtype)
    row = q[:, -1:].clone()
    before = threads()
    for length in (60_000, 2000):
        attend(row, k[:, :length], v[:, :length], pattern, query_offset=length - 1, is_causal=True, impl="native")
    assert threads() == before, "a step of decoding"
    q, k, v = draw(64, dtype)
    torch.autograd.grad(attend(q, k, v, pattern, impl="native"), (q, k, v), torch.ones_like(q))
    assert threads() == before, "64 rows"
q, k, v = draw(3000, torch.float32)
attend(q, k, v, pattern, impl="native")
assert threads() > before, "3000 rows"
"""
    found = run_whole([sys.executable, "-c", program], 300.0, env=environment())
    assert (found.returncode, found.stderr) == (0, "")
