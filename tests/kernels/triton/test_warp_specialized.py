"""The warp-specialised forward against the dense oracle: in the emulator under drawn schedules, or on a GPU of 9.0."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention_pytorch import DilatedPattern, attend
from dilated_attention_pytorch.kernels import select
from dilated_attention_pytorch.kernels.triton import consumer, hopper, warp_specialized
from dilated_attention_pytorch.kernels.triton.configurations import Configuration
from dilated_attention_pytorch.kernels.triton.plan import plan_of
from dilated_attention_pytorch.kernels.triton.problem import Problem
from dilated_attention_pytorch.parallel import agreement
from support.drawn import SWEEP, DrawnCall, Sizes, block_calls, calls
from support.gluon_emulator import EmulatedKernel
from support.gluon_machine import Wrong
from support.oracle import Groups, Rule
from support.planned import with_candidates
from support.triton_calls import DEVICE, check, check_drawn_calls

KERNEL = warp_specialized.warp_specialized_kernel
SIZES = Sizes(
    st.one_of(st.sampled_from([1, 17, 63, 64, 65, 127, 129]), st.integers(1, 150)),
    batch=2,
    kv_heads=2,
    head_dims=(48, 64, 96, 128),
    groups=3,
    summands=(1, 1, 1, 2),
    segments=st.one_of(st.integers(5, 160), st.just(64)),
)
DRAWS, RULED_DRAWS = 3, 5
needs_emulator = pytest.mark.skipif(DEVICE == "cuda", reason="the schedules are the device's")


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU: the kernel in the emulator, two stages of small blocks, and nothing that asks for a device."""
    if DEVICE == "cpu":
        with_candidates(monkeypatch, Configuration(128, 16, 4, 2))
        monkeypatch.setattr(warp_specialized, "warp_specialized_kernel", EmulatedKernel(KERNEL, 1))
        monkeypatch.setattr(select, "_gluon_refusal", lambda *_: None)
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this GPU has another compute capability than 9.0")


def check_forward(call: DrawnCall, dtype: torch.dtype, used: dict[str, float]) -> None:
    """One call within the error budget; its operands lie at addresses that can be copied from as blocks."""
    check(call, dtype, used, impl="gluon", with_gradients=False, room=8)


@pytest.mark.parametrize("ruled", [False, True], ids=["dilated", "windows and blocks"])
def test_drawn_calls_stay_within_the_error_budget(ruled: bool, figure: Any) -> None:
    dtype = torch.float16 if ruled else torch.bfloat16

    def check_computed(call: DrawnCall, used: dict[str, float]) -> None:
        call.seed -= call.seed % 5 == 0  # rows of stride 1
        call.batch = min(call.batch, 2 if call.num_queries < 70 else 1)
        groups = [one for one in call.summands if isinstance(one, Groups)]
        call.is_causal |= any(one.tail == "zero_padded" for one in groups)
        check_forward(call, dtype, used)

    drawn_calls = (block_calls if ruled else calls)(with_padding=False, sizes=SIZES)
    check_drawn_calls(
        f"warp-specialised, {dtype}, {'windows and blocks' if ruled else 'dilated'}",
        RULED_DRAWS if ruled else DRAWS,
        drawn_calls.filter(lambda call: call.num_queries * call.ratio > 16),
        check_computed,
        figure,
    )


PACKED = {"cu_seqlens": torch.tensor([0, 3, 60, 131, 131, 140], dtype=torch.int32)}
# fmt: off
CASES: dict[str, tuple[int, int, int, int, tuple[Groups | Rule, ...], bool, dict[str, Any]]] = {
    "the paper's pattern, scaled down by 256": (
        131, 2, 1, 64, (Groups((8, 16, 32, 64, 128), (1, 2, 4, 6, 12)),), True, {}),
    "a window, causal": (199, 1, 1, 64, (Rule("window", (33, 0)),), True, {}),
    "a window to both sides": (199, 1, 1, 128, (Rule("window", (40, 7)),), False, {}),
    "three query heads a key/value head": (67, 2, 3, 64, (Groups((67,), (1,)),), True, {}),
    "heads of 48, in blocks of 64 columns": (131, 1, 1, 48, (Groups((16, 90), (1, 3)),), True, {}),
    "heads of 104": (67, 1, 2, 104, (Rule("window", (33, 0)),), True, {}),
    "packed documents": (140, 1, 1, 64, (Groups((16, 90), (1, 3)),), False, PACKED),
    "tiles that see nothing": (190, 1, 1, 64, (Groups((200,), (150,)),), False, {}),
}
# fmt: on


@pytest.mark.parametrize("case", CASES)
def test_chosen_calls_stay_within_the_error_budget(case: str) -> None:
    rows, kv_heads, ratio, head_dim, summands, causal, options = CASES[case]
    call = DrawnCall(1, rows, rows, kv_heads, ratio, head_dim, summands, 4, causal, None, options)
    check_forward(call, torch.bfloat16, {})


@pytest.mark.parametrize("keys", [1, 2, 15, 16, 17, 31, 32, 33, 47])
def test_runs_may_end_anywhere_in_a_block(keys: int) -> None:
    """Every tail of a block of 16, and one block to three for two stages."""
    call = DrawnCall(1, 20, keys, 1, 1, 64, (Rule("window", (300, 300)),), keys, False, None, {})
    check_forward(call, torch.float16, {})


def test_its_gradient_is_that_of_the_other_kernels() -> None:
    call = DrawnCall(1, 40, 40, 1, 2, 64, (Groups((16, 64), (1, 3)),), 3, True, None, {})
    check(call, torch.bfloat16, {}, impl="gluon", room=8)


# What is left out or changed, in which text, and by what.
WAIT, ARRIVE = "mbarrier.wait(stages.{})", "mbarrier.arrive(stages.{})"
MUTATIONS: dict[str, tuple[str, str]] = {
    "keys are read before they have arrived": (WAIT.format("key_full.index(stage), turn"), "pass"),
    "values are read before they have arrived": (WAIT.format("value_full.index(stage), turn"), "pass"),
    "keys are overwritten while they are read": (WAIT.format("key_free.index(stage), phase ^ 1"), "pass"),
    "values are overwritten while they are read": (WAIT.format("value_free.index(stage), phase ^ 1"), "pass"),
    "the phase of free keys is wrong": ("key_free.index(stage), phase ^ 1", "key_free.index(stage), phase"),
    "the phase of free values is wrong": ("value_free.index(stage), phase ^ 1", "value_free.index(stage), phase"),
    "the phase of filled keys is wrong": ("key_full.index(stage), turn", "key_full.index(stage), turn ^ 1"),
    "the phase of filled values is wrong": ("value_full.index(stage), turn", "value_full.index(stage), turn ^ 1"),
    "scores are read before their product is done": (
        "warpgroup_mma_wait(PENDING, deps=[score])",
        "warpgroup_mma_wait(PENDING + 1, deps=[score])",
    ),
    "scores without a product before are read before theirs is done": (
        "warpgroup_mma_wait(PENDING, deps=[score])",
        "warpgroup_mma_wait(1, deps=[score])",
    ),
    "the output is read before its product is done": (
        "warpgroup_mma_wait(0, deps=[out,",
        "warpgroup_mma_wait(1, deps=[out,",
    ),
    "values are freed while their product is under way": (
        "        out, weight, total = warpgroup_mma_wait(0, deps=[out, weight, total])\n"
        "        mbarrier.arrive(stages.value_free.index(before))\n",
        "        mbarrier.arrive(stages.value_free.index(before))\n"
        "        out, weight, total = warpgroup_mma_wait(0, deps=[out, weight, total])\n",
    ),
    "the wrong values are freed": (ARRIVE.format("value_free.index(before)"), ARRIVE.format("value_free.index(stage)")),
    "one stage of keys is as many": (
        "key_full.index(stage), stages.key_blocks.index(stage))",
        "key_full.index(stage), stages.key_blocks.index(0))",
    ),
    "keys are never freed": (ARRIVE.format("key_free.index(stage)"), "pass"),
    "values are never freed": (ARRIVE.format("value_free.index(before)"), "pass"),
    "one warpgroup is enough to free keys": ("key_free.index(stage), count=PARTS", "key_free.index(stage), count=1"),
    "one warpgroup is enough to free values": (
        "value_free.index(stage), count=PARTS",
        "value_free.index(stage), count=1",
    ),
    "a copy announces too few bytes": (
        "key_full.index(stage), BLOCK_RUN * BLOCK_D * 2",
        "key_full.index(stage), BLOCK_RUN * BLOCK_D",
    ),
    "a copy announces nothing": ("mbarrier.expect(stages.value_full.index(stage), BLOCK_RUN * BLOCK_D * 2)", "pass"),
    "the query is not fenced": ("other=0.0))\n    fence_async_shared()", "other=0.0))"),
    "the barriers are not fenced": ("count=PARTS)\n    fence_async_shared()", "count=PARTS)"),
    "a descriptor is written while copies read it": ("range(gl.maximum(index - STAGES, 0), settled)", "range(0)"),
    "one descriptor for all runs, as if there were two": (
        "            index = _copy_run(KEY, VALUE, line + constants.LINE, index, first, call, stages, constants)\n"
        "        line += 2 *",
        "            pass\n        line +=",
    ),
    "the wait for copies is that of the run before": ("index, first, call, stages", "index, 0, call, stages"),
    "values of the block before are multiplied from the wrong stage": (
        "probability, stages.value_blocks.index(before)",
        "probability, stages.value_blocks.index(stage)",
    ),
    "the last product is from the wrong stage": ("last = (index + constants.STAGES - 1)", "last = index"),
    "keys that are passed are not waited for": (WAIT.format("key_full.index(place), turn"), "pass"),
    "values that are passed are not waited for": (WAIT.format("value_full.index(place), turn"), "pass"),
    "keys that are passed are never freed": (ARRIVE.format("key_free.index(place)"), "pass"),
    "values that are passed are never freed": (ARRIVE.format("value_free.index(place)"), "pass"),
    "the product before blocks that are passed is left for later": ("num_passed > 0", "num_passed > 100"),
    "a product is settled twice": ("            is_pending = index * 0\n", ""),
    "a block before which no product is to come waits for one": ("is_pending == 0", "is_pending > 1"),
    "the last product is never settled": (
        "    softmax = _settled(softmax, index, is_pending, stages, constants)\n    _p",
        "    _p",
    ),
    "the first block of a run is computed twice": ("            block += 1\n", ""),
    "values of a product before blocks that are passed are never freed": (
        ARRIVE.format("value_free.index(last)"),
        "pass",
    ),
    "too many blocks are passed": ("num_passed = num_blocks - to_block", "num_passed = num_blocks - to_block + 1"),
    "the end of a run is not passed": ("num_passed = num_blocks - to_block", "num_passed = 0 * block"),
    "the beginning of a run is not passed": ("num_passed += block  #", "num_passed += 0  #"),
    "the end of the last run is not passed": (
        "    _pass_blocks(index, num_passed, stages, constants)\n    _st",
        "    _st",
    ),
    "tails are not masked": ("    if MASKED:\n", "    if False:\n"),
}


SCHEDULES = 40
PATTERN = DilatedPattern([12, 40, 117], [1, 1, 1])


def mutated(what: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel with a mutation, in its own module or in that of the warps that compute."""
    old, new = MUTATIONS[what]
    sources = {module.__name__: inspect.getsource(module) for module in (consumer, warp_specialized)}
    assert sum(source.count(old) for source in sources.values()) == 1, f"{old!r} is not there once"
    for name, source in sources.items():
        file = folder / f"mutated_{name.rpartition('.')[2]}.py"
        file.write_text(source.replace(old, new).replace("from .consumer import", "from .mutated_consumer import"))
        spec = importlib.util.spec_from_file_location(f"{warp_specialized.__package__}.{file.stem}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module.warp_specialized_kernel


@functools.cache
def _example(is_causal: bool) -> tuple[Problem, Tensor, tuple[Tensor, Tensor]]:
    """Runs of one block, of three and of eight, all with tails, and what is planned for them.

    Each half of the tile passes runs of the other half, and under the causal mask ends of runs: more blocks than there
    are stages.
    """
    rows = 117
    q, k, v = (torch.randn(1, rows, 1, 64).bfloat16() for _ in range(3))
    problem = Problem(q, k, v, PATTERN.groups, is_causal, 0.125)
    kernel = plan_of(problem).warp_specialized
    order = hopper.order_of(problem, kernel)
    return problem, order, hopper.runs_of(problem, kernel, kernel.walk(kernel.choice.candidates[0]), order)


@pytest.fixture
def result(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, int, bool], tuple[Tensor, Tensor]]:
    """Output and log-sum-exp of a kernel under one schedule, with bits that no schedule changes."""
    with_candidates(monkeypatch, Configuration(128, 16, 4, 3))

    def compute(kernel: Any, seed: int, is_causal: bool) -> tuple[Tensor, Tensor]:
        problem, order, runs = _example(is_causal)
        monkeypatch.setattr(hopper, "order_of", lambda *_: order)
        monkeypatch.setattr(hopper, "runs_of", lambda *_: runs)
        monkeypatch.setattr(warp_specialized, "warp_specialized_kernel", EmulatedKernel(kernel, 1000 * seed))
        return hopper.forward(problem)

    return compute


@needs_emulator
@pytest.mark.parametrize("causal", [False, True])
def test_every_schedule_gives_the_same_bits(
    causal: bool, result: Callable[[Any, int, bool], tuple[Tensor, Tensor]]
) -> None:
    first = result(KERNEL, 0, causal)
    problem, *_ = _example(causal)
    exact = (x.double() for x in (problem.query, problem.key, problem.value))
    want = attend(*exact, PATTERN, is_causal=causal, scale=0.125, impl="reference")
    torch.testing.assert_close(first[0].double(), want, atol=0.02, rtol=0)
    for seed in range(1, 60 if SWEEP else 4):
        assert all(torch.equal(a, b) for a, b in zip(first, result(KERNEL, seed, causal), strict=True))


@needs_emulator
@pytest.mark.parametrize("what", MUTATIONS)
def test_mutations_of_the_synchronisation_are_caught(
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    result: Callable[[Any, int, bool], tuple[Tensor, Tensor]],
) -> None:
    kernel = mutated(what, tmp_path, monkeypatch)
    causal = what != "tails are not masked"  # the causal mask hides them
    right = result(KERNEL, 0, causal)
    for seed in range(1, SCHEDULES):
        try:
            found = result(kernel, seed, causal)
        except Wrong:
            return
        if not all(torch.equal(a, b) for a, b in zip(right, found, strict=True)):
            return
    pytest.fail(f"not caught in {SCHEDULES} schedules")


def test_what_it_does_not_compute_is_refused() -> None:
    q, k, v = (torch.randn(1, 40, 2, 64, device=DEVICE).bfloat16() for _ in range(3))
    ragged, padded = DilatedPattern([16], [3]), DilatedPattern([16], [3], tail="zero_padded")
    mask = torch.zeros(1, 40, dtype=torch.bool, device=DEVICE)
    odd = torch.randn(1, 40, 2, 67, device=DEVICE).bfloat16()[..., :64]
    for message, call in (
        ("without asking a key_padding_mask", lambda: attend(q, k, v, ragged, key_padding_mask=mask, impl="gluon")),
        ("it has no dropout", lambda: attend(q, k, v, ragged, dropout_p=0.5, impl="gluon")),
        ('no keys of a tail="zero_padded"', lambda: attend(q, k, v, padded, impl="gluon")),
        ("up to 16 lines of queries", lambda: attend(q[:, :16], k, v, ragged, impl="gluon")),
        ("multiples of 16 bytes, got strides of (5360, 134, 67)", lambda: attend(q, k, odd, ragged, impl="gluon")),
    ):
        with pytest.raises(NotImplementedError) as raised:
            call()
        assert message in str(raised.value)
        assert 'impl="triton" can' in str(raised.value)
    ranks = type("Ranks", (), {"heads": None, "rows": None})
    with pytest.raises(NotImplementedError, match="keys come from other ranks"):
        agreement._check_strategy(ranks, "ring", q, k, ragged, "gluon", is_one_sequence=True)
