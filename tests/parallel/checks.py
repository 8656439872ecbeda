"""Laws of ``parallel.attend`` that the ranks of a group check together: every function runs on all of them."""

from __future__ import annotations

import functools
import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from dilated_attention_pytorch import (
    DilatedPattern,
    LongNetConfig,
    LongNetLM,
    MultiheadDilatedAttention,
    Pattern,
    attend,
    attend_with_lse,
    local_window,
    parallel,
    random_blocks,
)
from dilated_attention_pytorch.kernels.compilation import refusal_to_load
from dilated_attention_pytorch.ops import implementation
from support.error_budget import budget
from support.operators import implementations_run
from support.oracle import Groups, Rule, dense_attention, dense_counts

Check = Callable[[DeviceMesh], Any]
LAYOUTS = ("contiguous", "zigzag")
BY_ROWS = ("ring", "gather")


def name_of(check: Check) -> str:
    return (check.func if isinstance(check, functools.partial) else check).__name__


def run_checks(checks: list[Check]) -> dict[str, tuple[str | None, Any]]:
    """For every check its error, if it failed on this rank, and what it measured."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("rows",))
    found = {}
    for check in checks:
        torch.manual_seed(0)
        try:
            found[name_of(check)] = (None, check(mesh))
        except Exception:  # noqa: BLE001 - reported by the test of this name
            found[name_of(check)] = (traceback.format_exc(), None)
    return found


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def operands(rows: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = ((2, rows, heads, dim), (2, rows, kv_heads, dim), (2, rows, kv_heads, dim), (2, rows, heads, dim))
    return [draw(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def by_ranks(
    whole: list[Tensor], pattern: Any, mesh: DeviceMesh, layout: str, mask: Tensor | None = None, **options: Any
) -> list[Tensor]:
    """Output and gradients of query, key and value, put together."""
    q, k, v, grad = (parallel.shard(x, mesh, layout=layout) for x in whole)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if mask is not None:
        options["key_padding_mask"] = parallel.shard(mask, mesh, layout=layout)
    length = whole[0].shape[1]
    out = parallel.attend(*leaves, pattern, mesh=mesh, layout=layout, sequence_length=length, **options)
    out.backward(grad)
    results = (out.detach(), *(leaf.grad for leaf in leaves))
    return [parallel.unshard(x, mesh, layout=layout, sequence_length=length) for x in results]


def by_one(whole: list[Tensor], pattern: Any, **options: Any) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in whole[:3]]
    out = attend(*leaves, pattern, **options)
    out.backward(whole[3])
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def largest(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(found, expected, strict=True))


PATTERN = DilatedPattern([8, 24, 50, 200], [1, 2, 3, 5], segment_shift=[0, 7])
Route = tuple[str, Pattern]
"""A strategy, and the pattern of the calls that it computes."""
ROUTES: list[Route] = [(strategy, PATTERN) for strategy in (*BY_ROWS, "heads")]


def dropout_drops_what_one_process_drops(mesh: DeviceMesh, routes: Sequence[Route] = ROUTES[:2]) -> float:
    whole, worst = operands(101, 4, 2, 5), 0.0
    for index, (strategy, pattern) in enumerate(routes):
        for layout in LAYOUTS:
            options = {"is_causal": (layout == "zigzag") != bool(index % 2), "dropout_p": 0.3}
            torch.manual_seed(3)
            expected = by_one(whole, pattern, **options)
            torch.manual_seed(3)
            found = by_ranks(whole, pattern, mesh, layout, strategy=strategy, **options)
            worst = max(worst, largest(found, expected))
    assert worst < 1e-12
    return worst


def dropout_by_heads_draws_apart_and_keeps_the_mean(mesh: DeviceMesh) -> float:
    """With equal queries, keys and values in all heads, heads differ by what is dropped alone."""
    heads = mesh.size()
    pattern = DilatedPattern([64], [1])
    q = draw(1, 64, 1, 4).expand(-1, -1, heads, -1).contiguous()
    shards = [parallel.shard(q, mesh) for _ in range(3)]
    outs = []
    for seed in range(50):
        torch.manual_seed(seed)
        out = parallel.attend(*shards, pattern, mesh=mesh, strategy="heads", sequence_length=64, dropout_p=0.5)
        outs.append(parallel.unshard(out, mesh, sequence_length=64))
    assert all(not torch.equal(outs[0][:, :, 0], outs[0][:, :, head]) for head in range(1, heads))
    mean, kept = torch.stack(outs).mean(0), attend(q, q, q, pattern)
    error = float((mean - kept).abs().max())
    assert error < 6 * float(torch.stack(outs).std(0).max()) / math.sqrt(50)
    return error


def low_precision_stays_within_the_error_budget(
    mesh: DeviceMesh,
    routes: Sequence[Route] = ROUTES,
    summands: Sequence[Groups | Rule] = (Groups((8, 24, 50, 200), (1, 2, 3, 5), shift=(0, 7)),),
) -> dict[str, str]:
    """The routes have the pattern of ``summands``, which is how the oracle has it."""
    used = {}
    for dtype in (torch.float32, torch.bfloat16):
        whole = operands(101, 4, 2, 16, dtype)
        exact = [x.double() for x in whole]
        for is_causal in (False, True):
            counted = [dense_counts(one, 101, 101, 2, is_causal=is_causal, batch=2) for one in summands]
            counts, zero_pad_keys = (torch.stack(some).sum(0) for some in zip(*counted, strict=True))
            leaves = [x.clone().requires_grad_() for x in exact[:3]]
            out, _ = dense_attention(*leaves, counts, zero_pad_keys, 0.25)
            out.backward(exact[3])
            expected = [out.detach(), *(leaf.grad for leaf in leaves)]
            k, v = (x.repeat_interleave(2, 2) for x in exact[1:3])
            bounds = budget(exact[0], k, v, exact[3], counts.repeat_interleave(2, 1).double(), 0.25, dtype)
            per_kv = [
                bounds.out,
                bounds.grad_query,
                *(x.unflatten(2, (2, 2)).sum(3) for x in (bounds.grad_key, bounds.grad_value)),
            ]
            # Every rank rounds its part of a gradient of keys once more before it travels.
            for strategy, pattern in routes:
                for layout in LAYOUTS:
                    found = by_ranks(whole, pattern, mesh, layout, strategy=strategy, is_causal=is_causal)
                    for name, mine, theirs, bound in zip("okqv", found, expected, per_kv, strict=True):
                        part = float(((mine.double() - theirs).abs() / bound.clamp(min=1e-30)).max())
                        key = f"{dtype} {strategy}"
                        used[key] = max(used.get(key, 0.0), part)
                        assert part < 1.0, (name, dtype, strategy, layout, is_causal, part)
    return {key: f"{part:.2f}" for key, part in used.items()}


def inputs_of_any_magnitude_have_the_gradients_of_one_process(mesh: DeviceMesh) -> float:
    """Scores of up to 1e16: the ranks agree about probabilities that no log-sum-exp in float32 tells apart."""
    ruled = local_window(9) + random_blocks(0.3, block_size=8, seed=2) + DilatedPattern([40], [2])
    cases = (("ring", PATTERN), ("gather", PATTERN), ("heads", PATTERN), ("ring", ruled))
    mask = torch.rand(2, 101, generator=torch.Generator().manual_seed(5)) < 0.3
    worst = 0.0
    for size in (1e-6, 1e2, 1e5, 1e8):
        q, k, v, grad = operands(101, 4, 2, 16, torch.float32)
        whole = [q * size, k * size, v, grad]
        for index, (strategy, pattern) in enumerate(cases):
            padding, options = mask if index % 2 else None, {"is_causal": index > 1}
            exact = [x.double() for x in whole]
            expected = by_one(exact, pattern, impl="reference", key_padding_mask=padding, **options)
            found = by_ranks(whole, pattern, mesh, LAYOUTS[index % 2], padding, strategy=strategy, **options)
            for name, mine, theirs in zip("oqkv", found, expected, strict=True):
                error = float((mine - theirs).abs().max()) / (max(1.0, size) if name in "qk" else 1.0)
                assert error < 3e-3 if size == 1e2 else error < 1e-5, (name, size, strategy, error)
                worst = max(worst, error)
            if strategy != "heads" and size > 1e2:  # heads draw apart
                outs = []
                for computed in (by_one, by_ranks):
                    torch.manual_seed(3)
                    places = (mesh, "contiguous") if computed is by_ranks else ()
                    how = {"strategy": strategy} if computed is by_ranks else {}
                    outs.append(computed(whole, pattern, *places, dropout_p=0.3, **how, **options))
                for mine, theirs in zip(outs[1][::3], outs[0][::3], strict=True):
                    assert float((mine - theirs).abs().max()) < 3e-3, (size, strategy)
    return worst


def what_is_not_finite_stays_with_what_sees_it(mesh: DeviceMesh) -> None:
    whole = operands(73, 4, 2, 5)
    spoilt = [x.clone() for x in whole]
    spoilt[1][:, 50:], spoilt[2][:, 60:] = math.nan, math.inf
    for x in (whole[3], spoilt[3]):
        x[:, 50:] = 0.0
    for strategy in ("ring", "gather", "heads"):
        for layout in LAYOUTS:
            clean = by_ranks(whole, PATTERN, mesh, layout, strategy=strategy, is_causal=True)
            dirty = by_ranks(spoilt, PATTERN, mesh, layout, strategy=strategy, is_causal=True)
            for a, b in zip(clean[:2], dirty[:2], strict=True):  # output and gradient of the queries
                torch.testing.assert_close(b[:, :50], a[:, :50])


def native_kernels_give_the_same(mesh: DeviceMesh) -> float | None:
    """In float32 against one process in float64: every route, grouped heads, dropout, and padding with NaN in it.

    None on a machine that cannot compile them.
    """
    if refusal_to_load() is not None:
        return None
    mask = torch.arange(101).expand(2, -1) % 7 == 3
    worst = 0.0
    for strategy in ("ring", "gather", "heads"):
        for index, (layout, is_causal, padding, dropout_p) in enumerate(
            (
                ("zigzag", True, None, 0.0),
                ("contiguous", False, mask, 0.0),
                ("zigzag", False, mask, 0.3),
            )
        ):
            if dropout_p and strategy == "heads":  # which draws apart
                continue
            pattern = PATTERN if strategy == "gather" or index else PATTERN + local_window(9, 4)
            whole = operands(101, 4, 2, 16, torch.float32)
            exact = [x.double() for x in whole]
            if padding is not None:
                whole[1][padding], whole[2][padding] = math.nan, math.nan
            options = {"is_causal": is_causal, "dropout_p": dropout_p}
            torch.manual_seed(3)
            expected = by_one(exact, pattern, key_padding_mask=padding, **options)
            torch.manual_seed(3)
            found = by_ranks(whole, pattern, mesh, layout, padding, strategy=strategy, impl="native", **options)
            for mine, theirs in zip(found, expected, strict=True):
                worst = max(worst, float((mine - theirs).norm() / theirs.norm()))
    assert worst < 1e-5, worst
    return worst


def what_lies_at_padded_keys_is_never_read(mesh: DeviceMesh, routes: Sequence[Route] = ROUTES) -> None:
    whole = operands(60, 4, 4, 5)
    mask = torch.rand(2, 60, generator=torch.Generator().manual_seed(5)) < 0.4
    mask[0] = True
    poisoned = [x.clone() for x in whole]
    poisoned[1][mask], poisoned[2][mask] = math.nan, math.inf
    for strategy, pattern in routes:
        for layout in LAYOUTS:
            clean, dirty = (
                by_ranks(tensors, pattern, mesh, layout, mask, strategy=strategy, is_causal=True)
                for tensors in (whole, poisoned)
            )
            assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True)), (strategy, pattern, layout)
            assert not clean[0][0].any()  # a sequence of padding alone
            assert largest(clean, by_one(whole, pattern, is_causal=True, key_padding_mask=mask)) < 1e-12


def the_future_changes_nothing_before_it(mesh: DeviceMesh, routes: Sequence[Route] = ROUTES) -> None:
    whole = operands(73, 4, 2, 5)
    changed = [x.clone() for x in whole[:3]]
    for x in changed:
        x[:, 50:] += 1.0
    for strategy, pattern in routes:
        for layout in LAYOUTS:
            before, after = (
                by_ranks([*tensors, whole[3]], pattern, mesh, layout, strategy=strategy, is_causal=True)[0]
                for tensors in (whole[:3], changed)
            )
            assert torch.equal(before[:, :50], after[:, :50]), (strategy, pattern, layout)
            assert not torch.equal(before[:, 50:], after[:, 50:])


def autocast_casts_as_it_does_locally(mesh: DeviceMesh) -> float:
    whole = operands(64, 4, 4, 8, torch.float32)
    worst = 0.0
    for strategy in ("ring", "gather", "heads"):
        with torch.autocast("cpu", torch.bfloat16):
            out = parallel.attend(
                *(parallel.shard(x, mesh) for x in whole[:3]), PATTERN, mesh=mesh, strategy=strategy, sequence_length=64
            )
            expected = attend(*whole[:3], PATTERN)
        assert out.dtype == expected.dtype == torch.bfloat16
        worst = max(worst, float((parallel.unshard(out, mesh, sequence_length=64) - expected).abs().max()))
    assert worst < 0.04  # a few units in the last place of bfloat16
    return worst


def nothing_is_sent_where_segments_end_with_shards(mesh: DeviceMesh) -> None:
    rows = 16 * mesh.size()
    whole = operands(rows, 4, 4, 5)
    for strategy in BY_ROWS:
        with parallel.count_traffic() as traffic:
            q, k, v, grad = (parallel.shard(x, mesh) for x in whole)
            q.requires_grad_()
            parallel.attend(q, k, v, DilatedPattern([4, 16], [1, 3]), mesh=mesh, strategy=strategy).backward(grad)
        assert (traffic.sent, traffic.received) == (0, 0)


def shard_and_unshard_are_inverse(mesh: DeviceMesh) -> None:
    for length in (0, 1, 2, 17, 24):
        for layout in LAYOUTS:
            whole = draw(2, length, 3)
            rows = parallel.shard(whole, mesh, layout=layout).requires_grad_()
            places = parallel.positions(length, mesh, layout=layout)
            assert torch.equal(whole[:, places], rows)
            back = parallel.unshard(rows, mesh, layout=layout, sequence_length=length)
            assert torch.equal(back, whole)
            weights = draw(2, length, 3, seed=1)
            (back * weights).sum().backward()
            assert torch.equal(rows.grad, weights[:, places])
            ids = torch.arange(length)
            assert torch.equal(parallel.shard(ids, mesh, layout=layout, dim=0), places)


def positions_and_labels_are_those_of_the_whole(mesh: DeviceMesh) -> None:
    tokens = torch.arange(1, 24).repeat(2, 1)
    boundaries = torch.tensor([0, 5, 5, 16, 23], dtype=torch.int32)
    whole = torch.cat([torch.arange(size) for size in (5, 11, 7)])
    following = torch.cat([tokens[0, 1:], torch.tensor([-100])])
    for layout in LAYOUTS:
        places = parallel.positions(23, mesh, layout=layout)
        assert torch.equal(parallel.positions(23, mesh, layout=layout, cu_seqlens=boundaries), whole[places])
        assert torch.equal(parallel.shard_labels(tokens, mesh, layout=layout)[1], following[places])
        packed = following.clone()
        packed[[4, 15]] = -100
        found = parallel.shard_labels(tokens, mesh, layout=layout, cu_seqlens=boundaries)
        assert torch.equal(found[0], packed[places])


def a_model_on_packed_documents_is_the_whole_one(mesh: DeviceMesh) -> None:
    """Positions that begin anew in every document, labels that end with it, gradients of the weights."""
    config = LongNetConfig(
        vocab_size=31,
        embed_dim=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        segment_lengths=[8, 32],
        dilation_rates=[1, 3],
        layer_segment_shifts=[0, 5],
    )
    model = LongNetLM(config).double()
    tokens = torch.randint(31, (2, 57), generator=torch.Generator().manual_seed(1))
    boundaries = torch.tensor([0, 20, 21, 57], dtype=torch.int32)
    targets = tokens.roll(-1, 1)
    targets[:, [19, 20, 56]] = -100
    whole = model(tokens, cu_seqlens=boundaries)
    functional.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    for layout in LAYOUTS:
        model.zero_grad()
        model.attention = functools.partial(parallel.attend, mesh=mesh, strategy="ring", layout=layout)
        rows = parallel.shard(tokens, mesh, layout=layout)
        places = parallel.positions(57, mesh, layout=layout, cu_seqlens=boundaries)
        logits = model(rows, positions=places, cu_seqlens=boundaries)
        assert largest([parallel.unshard(logits, mesh, layout=layout, sequence_length=57)], [whole]) < 1e-11
        mine = parallel.shard_labels(tokens, mesh, layout=layout, cu_seqlens=boundaries)
        functional.cross_entropy(logits.flatten(0, 1), mine.flatten(), reduction="sum").backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            dist.all_reduce(parameter.grad)
            assert largest([parameter.grad], [gradient]) < 1e-10


def ranks_may_need_other_gradients(mesh: DeviceMesh) -> None:
    """One rank's loss alone has the log-sum-exp in it, and one rank alone wants the gradient of the query."""
    whole = operands(40, 4, 4, 5)
    rank, rows = mesh.get_local_rank(), parallel.positions(40, mesh)
    for strategy in ("ring", "gather", "heads"):
        q, k, v, grad = (parallel.shard(x, mesh) for x in whole)
        q.requires_grad_(rank == 0), k.requires_grad_(), v.requires_grad_()
        out, lse = parallel.attend_with_lse(q, k, v, PATTERN, mesh=mesh, strategy=strategy, sequence_length=40)
        ((out * grad).sum() + (lse.sum() if rank == 0 else 0.0)).backward()
        leaves = [x.clone().requires_grad_() for x in whole[:3]]
        all_out, all_lse = attend_with_lse(*leaves, PATTERN)
        first = parallel.unshard(torch.full((1, len(rows)), float(rank == 0)), mesh, sequence_length=40).bool()
        ((all_out * whole[3]).sum() + all_lse[:, first[0]].sum()).backward()
        found = [*([q.grad] if rank == 0 else []), k.grad, v.grad]
        expected = [leaf.grad[:, rows] for leaf in leaves[0 if rank == 0 else 1 :]]
        assert largest(found, expected) < 1e-12, strategy


def autocast_on_some_ranks_is_a_disagreement(mesh: DeviceMesh) -> None:
    shards = [parallel.shard(x, mesh) for x in operands(40, 4, 4, 8, torch.float32)[:3]]
    for strategy in ("ring", "gather", "heads"):
        is_cast = torch.autocast("cpu", torch.bfloat16, enabled=mesh.get_local_rank() == 0)
        with is_cast, pytest.raises(parallel.RankFailure, match=r"rank [01] has dtype torch\."):
            parallel.attend(*shards, PATTERN, mesh=mesh, strategy=strategy, sequence_length=40)
        parallel.attend(*shards, PATTERN, mesh=mesh, strategy=strategy, sequence_length=40)


def a_compiled_module_breaks_its_graph_at_the_call(mesh: DeviceMesh) -> float:
    """What is around the call is compiled; the call itself is not."""
    whole = operands(10 * mesh.size(), 4, 4, 5)
    expected = by_one([2 * whole[0], *whole[1:]], PATTERN, is_causal=True)
    q, k, v, grad = (parallel.shard(x, mesh) for x in whole)

    def call(query: Tensor) -> Tensor:
        return 3 * parallel.attend(2 * query, k, v, PATTERN, mesh=mesh, strategy="ring", is_causal=True)

    q.requires_grad_()
    out = torch.compile(call, backend="aot_eager")(q)
    out.backward(grad)
    found = [parallel.unshard(x, mesh) for x in (out.detach(), q.grad)]
    worst = largest(found, [3 * expected[0], 6 * expected[1]])
    assert worst < 1e-11
    return worst


def modules_are_the_local_ones(mesh: DeviceMesh) -> None:
    torch.manual_seed(1)
    local = MultiheadDilatedAttention(24, 4, [8, 40], [1, 3], num_kv_heads=2).double()
    ring = parallel.RingMultiheadDilatedAttention(
        24, 4, [8, 40], [1, 3], num_kv_heads=2, ring_size=mesh.size(), layout="zigzag"
    ).double()
    ring.load_state_dict(local.state_dict())
    x = draw(2, 10 * mesh.size(), 24)
    expected, _ = local(x, x, x, is_causal=True)
    rows = parallel.shard(x, mesh, layout="zigzag")
    out, _ = ring(rows, rows, rows, is_causal=True)
    assert largest([parallel.unshard(out, mesh, layout="zigzag")], [expected]) < 1e-12
    out.sum().backward()
    expected.sum().backward()
    for mine, theirs in zip(ring.parameters(), local.parameters(), strict=True):
        total = mine.grad.clone()
        dist.all_reduce(total)
        assert largest([total], [theirs.grad]) < 1e-11
    q, k, v, _ = operands(10 * mesh.size(), 4, 4, 5)
    whole = attend(q, k, v, DilatedPattern([8, 40], [1, 3]))
    shards = [parallel.shard(x, mesh) for x in (q, k, v)]
    modules: list[nn.Module] = [
        parallel.ParallelDilatedAttention([8, 40], [1, 3]),
        parallel.RingDilatedAttention([8, 40], [1, 3]),
        parallel.DistributedDilatedAttention([8, 40], [1, 3]),
        parallel.DistributedDilatedAttention([8, 40], [1, 3], sequence_parallel=False, model_parallel=True),
        parallel.HeadParallelDilatedAttention([8, 40], [1, 3]),
    ]
    if mesh.size() == 4:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "heads"))
        modules += [
            parallel.HybridRingDilatedAttention([8, 40], [1, 3], mesh=both),
            parallel.DistributedDilatedAttention([8, 40], [1, 3], model_parallel=True, mesh=both),
        ]
    for module in modules:
        assert largest([parallel.unshard(module(*shards), mesh)], [whole]) < 1e-12, module


def auto_takes_a_strategy_that_can(mesh: DeviceMesh) -> None:
    q, k, v, _ = operands(24, mesh.size(), mesh.size(), 5)
    padded = DilatedPattern([8, 20], [1, 3], tail="zero_padded")
    shards = [parallel.shard(x, mesh) for x in (q, k, v)]
    out = parallel.attend(*shards, padded, mesh=mesh)
    assert largest([parallel.unshard(out, mesh)], [attend(q, k, v, padded)]) < 1e-12
    out, lse = parallel.attend_with_lse(*shards, PATTERN, mesh=mesh)
    whole = attend_with_lse(q, k, v, PATTERN)
    assert largest([parallel.unshard(out, mesh), parallel.unshard(lse, mesh)], list(whole)) < 1e-12


def implementation_reaches_every_strategy(mesh: DeviceMesh) -> None:
    """Calls that name no implementation are computed by that of the context, and refused where it cannot be."""
    pattern, whole = DilatedPattern([8, 32], [1, 4]), operands(37, 4, 4, 8, torch.float32)
    for strategy in (*BY_ROWS, "heads"):
        with implementation("aten"):
            call = functools.partial(by_ranks, whole, pattern, mesh, "contiguous", strategy=strategy)
            assert implementations_run(call) == {"aten"}
        if strategy != "heads":
            refused = pytest.raises(NotImplementedError, match='impl="reference" needs whole sequences')
            with implementation("reference"), refused:
                by_ranks(whole, pattern, mesh, "contiguous", strategy=strategy)
