"""Seconds of generations on this machine: what measured calls predict, and the caches that are begun for them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from dilated_attention_pytorch.capacity import Device, Generation, plan_run
from dilated_attention_pytorch.capacity.generation_here import GenerationHere, _Probe, measure_generation_here
from dilated_attention_pytorch.capacity.storage import Call, mark_of
from dilated_attention_pytorch.capacity.traced_call import BegunCache
from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.models import LongNetCache, LongNetConfig, LongNetLM
from dilated_attention_pytorch.training import PRESETS, TrainSettings
from dilated_attention_pytorch.training.stages import StageSettings

DILATED = {"segment_lengths": (16, 64), "dilation_rates": (1, 4), "layer_segment_shifts": (0, 5)}
RULES = {"layer_patterns": ("local_window(25)", "local_window(5) + DilatedPattern([16, 64], [2, 4])")}


def _settings(pattern: dict[str, Any], **changes: Any) -> TrainSettings:
    model = LongNetConfig(vocab_size=101, embed_dim=32, num_layers=7, num_heads=4, num_kv_heads=2, **pattern)
    given = {"batch_size": 3, "tokenizer": Path("tokens"), "precision": "float32", **changes}
    return dataclasses.replace(PRESETS["tiny"](), model=model, **given)


def _chunk_seconds(layers: int, call: Call, texts: int) -> float:
    return texts * (1e-3 + layers * (2e-3 + 1e-5 * call.num_new + 1e-7 * min(call.seen, 400) * call.num_new))


def _token_seconds(layers: int, seen: int) -> float:
    return 1e-4 + layers * (2e-4 + 1e-7 * seen)


@pytest.fixture
def _made_up_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that take exactly as long as their sizes say."""
    monkeypatch.setattr(_Probe, "_chunk", lambda _, layers, call, texts: _chunk_seconds(layers, call, texts))
    monkeypatch.setattr(_Probe, "_token", lambda _, layers, seen: _token_seconds(layers, seen))


@pytest.mark.usefixtures("_made_up_machine")
@pytest.mark.parametrize("pattern", [DILATED, RULES], ids=["dilated", "rules"])
@pytest.mark.parametrize(("prompt", "new_tokens", "chunk"), [(1, 1, 16), (100, 4, 128), (395, 3, 128)])
def test_a_machine_whose_seconds_grow_with_layers_is_predicted_exactly(
    pattern: dict[str, Any], prompt: int, new_tokens: int, chunk: int, tmp_path: Path
) -> None:
    settings = _settings(pattern)
    generation = Generation(prompt=prompt, new_tokens=new_tokens, chunk_size=chunk)
    here = measure_generation_here(settings, generation, "cpu", is_quiet=True, folder=tmp_path)
    plan = plan_run(
        settings, 1, Device(sheet=here.sheet, generation_here=here), purpose="generation", generation=generation
    )
    calls = [Call(seen, min(chunk, prompt - seen)) for seen in range(0, prompt, chunk)]
    expected = sum(_chunk_seconds(7, call, 3) for call in calls)
    token = sum(_token_seconds(7, prompt + number) for number in range(new_tokens)) / new_tokens
    assert plan.seconds.prompt == pytest.approx(expected, rel=1e-9)
    assert here.token_seconds(settings) == pytest.approx(token, rel=1e-9)
    assert plan.seconds.total == pytest.approx(expected + (new_tokens - 1) * token, rel=1e-9)
    assert not plan.seconds.is_bound
    assert plan.rates.tokens_per_second == pytest.approx(3 * new_tokens / plan.seconds.total)
    assert plan.bounded_by == ("tokens" if plan.seconds.tokens > plan.seconds.prompt else "prompt")


@pytest.mark.usefixtures("_made_up_machine")
def test_settings_of_documents_or_stages_are_no_matter_to_a_generation(tmp_path: Path) -> None:
    generation = Generation(prompt=2000, new_tokens=4, chunk_size=1024)
    staged = StageSettings(lengths=(64, 256))
    of_all = (
        _settings(DILATED, batch_size=1),
        _settings(DILATED, batch_size=1, packing="documents", max_tokens=512),
        _settings(DILATED, batch_size=1, stages=staged),
    )
    found = [measure_generation_here(one, generation, "cpu", is_quiet=True, folder=tmp_path) for one in of_all]
    assert len({(here.calls, here.chunk, here.last, here.token) for here in found}) == 1
    seconds = [dataclasses.astuple(here.seconds(one, generation)) for here, one in zip(found, of_all, strict=True)]
    # Least squares of the same numbers may differ in the last bit, by where they lie in memory.
    assert_close(seconds[1:], [seconds[0]] * 2, rtol=1e-12, atol=0)


@pytest.mark.usefixtures("_made_up_machine")
def test_of_many_chunks_and_tokens_some_stand_for_all(tmp_path: Path) -> None:
    settings, generation = _settings(DILATED), Generation(prompt=64_003, new_tokens=5000, chunk_size=64)
    here = measure_generation_here(settings, generation, "cpu", is_quiet=True, folder=tmp_path)
    calls = [Call(seen, min(64, 64_003 - seen)) for seen in range(0, 64_003, 64)]
    seconds = here.seconds(settings, generation)
    assert seconds.prompt == pytest.approx(sum(_chunk_seconds(7, call, 3) for call in calls), rel=0.01)
    token = sum(_token_seconds(7, 64_003 + number) for number in range(5000)) / 5000
    assert seconds.tokens == pytest.approx(4999 * token, rel=0.01)


def test_measured_calls_are_kept_and_those_of_other_generations_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings, generation = _settings(DILATED), Generation(prompt=150, new_tokens=12, chunk_size=64)
    first = measure_generation_here(settings, generation, "cpu", is_quiet=True, folder=tmp_path)
    assert all(one > 0 for calls in (first.chunk, first.last, first.token) for one in calls.seconds)  # type: ignore[union-attr]

    def forbidden(*_: Any) -> float:
        raise AssertionError("it was measured again")

    monkeypatch.setattr(_Probe, "_chunk", forbidden)
    monkeypatch.setattr(_Probe, "_token", forbidden)
    second = measure_generation_here(settings, generation, "cpu", is_quiet=True, folder=tmp_path, seconds=0)
    assert (second.chunk, second.last, second.token) == (first.chunk, first.last, first.token)
    others = [
        (settings, dataclasses.replace(generation, prompt=151)),
        (dataclasses.replace(settings, batch_size=2), generation),
        (dataclasses.replace(settings, precision="bfloat16"), generation),
        (_settings(RULES), generation),
    ]
    for one, lengths in others:
        with pytest.raises(RunError, match="generations of another shape, precision, number of texts"):
            first.seconds(one, lengths)
    more = dataclasses.replace(settings, model=dataclasses.replace(settings.model, num_layers=9))
    assert isinstance(first, GenerationHere)
    assert first.seconds(more, generation).total > first.seconds(settings, generation).total


@pytest.mark.parametrize("pattern", [DILATED, RULES], ids=["dilated", "rules"])
@pytest.mark.parametrize(("seen", "num_new"), [(0, 50), (1, 1), (100, 28), (128, 1), (131, 70)])
def test_a_cache_that_is_begun_holds_the_rows_of_one_that_has_read_them(
    pattern: dict[str, Any], seen: int, num_new: int
) -> None:
    config = _settings(pattern).model
    model, real, begun = LongNetLM(config).eval(), LongNetCache(config), BegunCache(config)
    patterns, call = tuple(dict.fromkeys(config.different_patterns)), Call(seen, num_new)
    ids = torch.randint(config.vocab_size, (3, seen + num_new), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        if seen:
            model(ids[:, :seen], cache=real)
        begun.begin(mark_of(patterns, 2, call), 3, torch.zeros(0, 8))
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


def test_the_command_predicts_a_generation_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lengths = ["--prompt", "300", "--new-tokens", "4", "--chunk-size", "128"]
    file = tmp_path / "plan.json"
    main(["plan", "--preset", "tiny", "--hardware", "here", "--for", "generation", *lengths, "--output", str(file)])
    seconds = json.loads(file.read_text())["seconds"]
    assert not seconds["is_bound"]
    assert 0 < seconds["tokens"] < 10
    assert 0 < seconds["prompt"] < 10
    assert seconds["products"] == seconds["reading"] == 0
