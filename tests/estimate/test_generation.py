"""What generation takes: the cache's own bytes, and the peak of the calls themselves, to the byte."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from dilated_attention_pytorch import DilatedPattern, Pattern, attend, local_window
from dilated_attention_pytorch.data_sheets import sheet_of
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.estimate import Generation, generation_footprint, plan_generation, plan_run
from dilated_attention_pytorch.estimate.attention import operator_bytes
from dilated_attention_pytorch.estimate.generation import (
    MOST_CALLS,
    BegunCache,
    CacheCall,
    CacheMoment,
    cache_bytes,
    calls_of,
    traced_call,
    walk,
)
from dilated_attention_pytorch.estimate.live_bytes import LiveBytes
from dilated_attention_pytorch.estimate.memory import evaluation_footprint, parts_of
from dilated_attention_pytorch.estimate.step import moments, trace_step
from dilated_attention_pytorch.kernels.select import refusal
from dilated_attention_pytorch.models import LongNetCache, LongNetConfig, LongNetLM, generate
from dilated_attention_pytorch.models.cache import grown_slots
from dilated_attention_pytorch.models.cache_index import CacheIndex
from dilated_attention_pytorch.training import PRESETS, TrainSettings
from support.processes import environment

DILATED = {"segment_lengths": (16, 64, 256), "dilation_rates": (1, 2, 4)}
SHIFTED = {**DILATED, "layer_segment_shifts": (0, 5)}
LONGER = {"segment_lengths": (64, 128, 512), "dilation_rates": (1, 2, 8)}
RULES = {"layer_patterns": ("local_window(25)", "local_window(5) + DilatedPattern([16, 128], [2, 4])")}
HYBRID = {**RULES, "key_convolution": 3, "layer_rope_thetas": (0.0, 0.0, 1e4), "layer_scale_lengths": (16, 0)}
LENGTHS = [(1, 1, 16), (175, 2, 16), (375, 13, 128)]


def _settings(pattern: dict[str, Any], **changes: Any) -> TrainSettings:
    model = LongNetConfig(vocab_size=101, embed_dim=32, num_layers=5, num_heads=4, num_kv_heads=2, **pattern)
    given = {"batch_size": 3, "tokenizer": Path("tokens"), "precision": "float32", **changes}
    return dataclasses.replace(PRESETS["tiny"](), model=model, **given)


def _mark_of(patterns: Sequence[Pattern], num_kv_heads: int, call: CacheCall) -> CacheMoment:
    """Slots before and after a call, if one call before it has stored all earlier tokens."""
    before, after = {}, {}
    for pattern in patterns:
        cache_index = CacheIndex(pattern, num_kv_heads, torch.device("cpu"))
        stored = cache_index.advance(call.seen).num_slots if call.seen else 0
        before[pattern] = grown_slots(0, stored, cache_index.max_slots())
        stored = cache_index.advance(call.num_new).num_slots
        after[pattern] = grown_slots(before[pattern], stored, cache_index.max_slots())
    return CacheMoment(call, before, after)


@pytest.mark.parametrize("pattern", [DILATED, RULES, HYBRID], ids=["dilated", "rules", "hybrid"])
@pytest.mark.parametrize(("prompt", "new_tokens", "chunk"), LENGTHS)
def test_the_cache_has_the_bytes_that_were_planned(
    pattern: dict[str, Any], prompt: int, new_tokens: int, chunk: int
) -> None:
    settings = _settings(pattern)
    model, cache = LongNetLM(settings.model).eval(), LongNetCache(settings.model)
    ids = torch.zeros(settings.batch_size, prompt, dtype=torch.int64)
    assert len(list(generate(model, ids, new_tokens, chunk_size=chunk, cache=cache))) == new_tokens
    generation = Generation(prompt=prompt, new_tokens=new_tokens, chunk_size=chunk)
    assert cache_bytes(settings, generation) == cache.num_bytes
    assert generation_footprint(settings, generation).cache <= cache.num_bytes


@pytest.mark.parametrize("rope_thetas", [(0.0, 0.0, 1e4), (0.0, 1e4), (1e4,)])
def test_few_layers_show_what_every_layer_takes(rope_thetas: tuple[float, ...]) -> None:
    """Layers with and without positions take other temporaries, whether or not they have one pattern."""
    settings = _settings(
        {"layer_patterns": ("local_window(25)",), "layer_rope_thetas": rope_thetas}, precision="bfloat16"
    )
    settings.model = dataclasses.replace(settings.model, num_layers=12, embed_dim=256)
    generation = Generation(prompt=300, new_tokens=3, chunk_size=300)
    moments = [
        sum(parts_of(moment).values())
        for mark in generation.walk(settings).marks
        for moment in traced_call(settings.model, mark, settings.batch_size, torch.bfloat16)
    ]
    assert generation_footprint(settings, generation).total == max(moments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pattern", [DILATED, RULES], ids=["dilated", "rules"])
def test_a_call_on_tensors_that_hold_nothing_has_the_bytes_of_the_real_one(
    pattern: dict[str, Any], dtype: torch.dtype
) -> None:
    settings = _settings(pattern)
    patterns = tuple(dict.fromkeys(settings.model.different_patterns))
    for mark in walk(patterns, 2, 375, 13, 128).marks:
        fake, real = (
            max(sum(moment.counts) for moment in traced_call(settings.model, mark, 3, dtype, is_fake=is_fake))
            for is_fake in (True, False)
        )
        assert fake == real


WALKED = {"dilated": (DILATED, (97, 8)), "longer": (LONGER, (375, 40)), "rules": (RULES, (97, 8))}
"""Patterns, and the prompt and chunk of each in every run."""


@pytest.mark.parametrize(
    ("name", "prompt", "chunk"),
    [
        pytest.param(name, *lengths, marks=[] if lengths == in_every_run else [pytest.mark.slow])
        for name, (_, in_every_run) in WALKED.items()
        for lengths in ((97, 8), (375, 40), (377, 8))
    ],
)
def test_no_call_of_a_generation_takes_more_than_those_that_are_looked_at(name: str, prompt: int, chunk: int) -> None:
    model = dataclasses.replace(_settings(WALKED[name][0]).model, num_layers=2)
    patterns = tuple(dict.fromkeys(model.different_patterns))
    cache_indices = {pattern: CacheIndex(pattern, 2, torch.device("cpu")) for pattern in patterns}
    slots, every = dict.fromkeys(patterns, 0), []
    for call in calls_of(prompt, 3, chunk):
        before = dict(slots)
        for one, cache_index in cache_indices.items():
            slots[one] = grown_slots(slots[one], cache_index.advance(call.num_new).num_slots, cache_index.max_slots())
        every.append(CacheMoment(call, before, dict(slots)))

    def most(marks: Sequence[CacheMoment]) -> int:
        return max(sum(each.counts) for mark in marks for each in traced_call(model, mark, 3, torch.float32))

    assert most(walk(patterns, 2, prompt, 3, chunk).marks) == most(every)


@pytest.mark.parametrize("pattern", [DILATED, RULES], ids=["dilated", "rules"])
def test_the_peak_of_a_generation_is_planned_within_a_twentieth(pattern: dict[str, Any]) -> None:
    # Indices of the cache's bookkeeping are not planned: of wide heads they are a small part.
    settings = _settings(pattern)
    settings.model.embed_dim, settings.model.ffn_dim = 256, 704
    planned = generation_footprint(settings, Generation(prompt=375, new_tokens=2, chunk_size=128))
    live = LiveBytes()
    with torch.no_grad(), live:
        model = LongNetLM(settings.model).eval()
        live.is_recording = True
        for _ in generate(model, torch.zeros(3, 375, dtype=torch.int64), 2, chunk_size=128):
            pass
    peak = max(sum(moment.counts) for moment in live.moments)
    assert planned.total - planned.attention == pytest.approx(peak, rel=0.05)


PEAK_OF_A_CALL = """
import sys
import torch
from dilated_attention_pytorch import attend
from dilated_attention_pytorch.memory import peak_memory
from dilated_attention_pytorch.patterns import pattern_from_spec

dtype, pattern = getattr(torch, sys.argv[1]), pattern_from_spec(sys.argv[2])
query, key, value = (torch.randn(4, 4096, 2, 64, dtype=dtype) for _ in range(3))
attend(query[:, :64], key[:, :64], value[:, :64], pattern, is_causal=True, impl="native")
found = peak_memory(lambda: attend(query, key, value, pattern, is_causal=True, impl="native"), query.device)
assert found is not None
print(found[0])
"""
WINDOW, GROUPS = local_window(2047), DilatedPattern([1024, 4096], [1, 2])
BLOCKS_OF_THEIR_OWN = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
"""For glibc: what is freed goes back to the system at once, whatever the program did before."""


@pytest.mark.skipif(refusal("native", torch.device("cpu"), torch.float32, 64) is not None, reason="no native kernels")
@pytest.mark.parametrize(
    ("pattern", "dtype"),
    [
        (WINDOW, torch.bfloat16),
        (GROUPS, torch.float32),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in ((WINDOW, torch.float32), (GROUPS, torch.bfloat16))),
        *(pytest.param(pattern, torch.float16, marks=pytest.mark.slow) for pattern in (WINDOW, GROUPS)),
    ],
    ids=str,
)
def test_a_call_takes_by_itself_what_is_planned(pattern: Pattern, dtype: torch.dtype) -> None:
    # Keys and values that the kernels pack; threads have some more, and norms are taken of rows in float32.
    query, key, value = (torch.randn(4, 4096, 2, 64, dtype=dtype) for _ in range(3))
    live = LiveBytes(own_bytes=operator_bytes)
    with live:
        live.is_recording = True
        attend(query, key, value, pattern, is_causal=True, impl="native")
    (planned,) = (moment.own for moment in live.moments if moment.own)
    command = [sys.executable, "-c", PEAK_OF_A_CALL, str(dtype).removeprefix("torch."), pattern.spec]
    program = subprocess.run(
        command, env=environment(**BLOCKS_OF_THEIR_OWN), capture_output=True, text=True, check=True, timeout=300
    )
    results = query.nbytes + 4 * query[..., 0].numel()
    assert planned == pytest.approx(int(program.stdout) - results, abs=3e6 + 0.1 * planned)


PEAK_OF_GRADIENTS = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from dilated_attention_pytorch import DilatedPattern, attend
from dilated_attention_pytorch.estimate.attention import operator_bytes
from dilated_attention_pytorch.estimate.live_bytes import LiveBytes
from dilated_attention_pytorch.memory import peak_memory
from dilated_attention_pytorch.ops import Scores

def attended(dtype, length):
    leaves = [torch.randn(2, length, 64, width, dtype=dtype, requires_grad=True) for width in (4, 4, 12)]
    slopes = torch.rand(64, requires_grad=True)
    pattern = DilatedPattern([128, 512], [1, 2])
    return attend(*leaves, pattern, scores=Scores(slopes=slopes), impl="native"), [*leaves, slopes]

def gradients(out, leaves):
    return torch.autograd.grad(out, leaves, torch.ones_like(out))

for dtype in (torch.float32, torch.bfloat16):
    gradients(*attended(dtype, 64))
    of_call = attended(dtype, 4096)
    found, _ = peak_memory(lambda: gradients(*of_call), torch.device("cpu"))
    out, leaves = of_call
    found -= out.nbytes + sum(leaf.nbytes for leaf in leaves[:3]) + 4 * 64 * (2 * 4096 - 1)
    with FakeTensorMode(), LiveBytes(own_bytes=operator_bytes) as live:
        live.is_recording = True
        gradients(*attended(dtype, 4096))
    (planned,) = (moment.own for moment in live.moments if moment.attention == "attend_backward")
    print(found, planned)
"""


@pytest.mark.skipif(refusal("native", torch.device("cpu"), torch.float32, 64) is not None, reason="no native kernels")
def test_gradients_of_slopes_and_of_wide_values_take_what_is_planned() -> None:
    command = [sys.executable, "-c", PEAK_OF_GRADIENTS]
    program = subprocess.run(
        command, env=environment(**BLOCKS_OF_THEIR_OWN), capture_output=True, text=True, check=True, timeout=300
    )
    for line in program.stdout.splitlines():
        found, planned = map(int, line.split())
        assert planned == pytest.approx(found, abs=1e6 + 0.05 * planned)


def test_a_text_of_a_billion_tokens_is_planned_with_a_full_cache() -> None:
    settings = _settings(DILATED)
    most = 16 + 32 + 64
    found = generation_footprint(settings, Generation(prompt=10**9, new_tokens=500))
    assert found.cache == 2 * 3 * 5 * 2 * 8 * 4 * most
    assert MOST_CALLS < 10**9 // 4096


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("vocab_size", [101, 20011], ids=["one block of the loss", "blocks of the loss"])
def test_a_forward_pass_on_tensors_that_hold_nothing_has_the_bytes_of_the_real_one(
    precision: str, vocab_size: int
) -> None:
    settings = _settings(DILATED, precision=precision, context_length=601)
    settings.model.vocab_size = vocab_size
    fake, real = (
        [
            max(sum(one.counts) for one in series)
            for series in trace_step(settings, is_training=False, is_fake=told).values()
        ]
        for told in (True, False)
    )
    assert fake == real


def test_a_forward_pass_of_many_layers_and_blocks_follows_from_few() -> None:
    settings = _settings(DILATED, context_length=3001, batch_size=1)
    settings.model.vocab_size, settings.model.num_layers = 20011, 9
    told = max(sum(moment.counts) for moment in moments(settings, is_training=False))
    trace = trace_step(settings, is_training=False)
    assert told == max(sum(moment.counts) for series in trace.values() for moment in series)
    found = evaluation_footprint(settings, 1)
    assert found.weights == 4 * settings.model.num_parameters
    assert (found.gradients, found.optimizer, found.cache) == (0, 0, 0)


@pytest.mark.parametrize("pattern", [SHIFTED, RULES], ids=["dilated", "rules"])
@pytest.mark.parametrize(("seen", "num_new"), [(0, 50), (1, 1), (100, 28), (128, 1), (131, 70)])
def test_a_cache_that_is_begun_holds_the_rows_of_one_that_has_read_them(
    pattern: dict[str, Any], seen: int, num_new: int
) -> None:
    config = dataclasses.replace(_settings(pattern).model, num_layers=7)
    model, real, begun = LongNetLM(config).eval(), LongNetCache(config), BegunCache(config)
    patterns, call = tuple(dict.fromkeys(config.different_patterns)), CacheCall(seen, num_new)
    ids = torch.randint(config.vocab_size, (3, seen + num_new), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        if seen:
            model(ids[:, :seen], cache=real)
        begun.begin(_mark_of(patterns, 2, call), 3, torch.zeros(0, 8))
        assert begun.tokens_seen == [seen] * 3
        if seen:
            assert begun.num_bytes == real.num_bytes
            for layer in range(config.num_layers):
                assert begun.rows_per_head(layer) == real.rows_per_head(layer)
                assert begun.positions(layer, 2, 1) == real.positions(layer, 2, 1)
                # The same rows in the same slots: with the real ones in them the next call is the real one.
                stored = real._row_groups[0].storage[layer]
                if stored[0].numel():
                    for mine, other in zip(begun.stored(layer), stored, strict=True):
                        mine.copy_(other)
        assert_close(model(ids[:, seen:], cache=begun), model(ids[:, seen:], cache=real))
    assert begun.num_bytes == real.num_bytes


def test_names_of_predicted_seconds_say_what_to_do_instead() -> None:
    with pytest.raises(
        ImportError, match=r"measure_generation_here is not here: the seconds .*estimate\.plan_generation"
    ):
        getattr(importlib.import_module("dilated_attention_pytorch.capacity"), "measure_generation_here")  # noqa: B009


def test_what_is_not_planned_is_refused() -> None:
    with pytest.raises(RunError, match="--prompt must be at least 1, got 0"):
        Generation(prompt=0)
    with pytest.raises(RunError, match="one process that holds all weights"):
        plan_generation(_settings(DILATED), 2, sheet_of("H200"), Generation(prompt=8))
    with pytest.raises(RunError, match="V100 has no rate of it"):
        plan_generation(_settings(DILATED, precision="bfloat16"), 1, sheet_of("V100"), Generation(prompt=8))
    with pytest.raises(RunError, match="got 'generation'; plan_generation plans a generation's memory"):
        plan_run(_settings(DILATED), 1, sheet_of("H200"), purpose="generation")  # type: ignore[arg-type]
    with pytest.raises(RunError, match="one process that holds all weights"):
        generation_footprint(_settings(DILATED, context_parallel=2), Generation(prompt=8))
    with pytest.raises(RunError, match="leave --data-parallel fsdp and --tensor-parallel 1 out"):
        evaluation_footprint(_settings(DILATED, data_parallel="fsdp"), 2)
