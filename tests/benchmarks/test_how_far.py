"""How far it goes: bytes by the formula are those of the plan, memory is linear, the page is made of the results."""

from __future__ import annotations

import json

import pytest
from benchmarks.how_far_page import PAGE, PICTURE, page
from benchmarks.measured_code import is_stale

from benchmarks import how_far
from dilated_attention_pytorch.planning.layout import Shards
from dilated_attention_pytorch.planning.shards import ShardedCall
from dilated_attention_pytorch.planning.traffic import sent_rows

RESULTS = json.loads(how_far.FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("devices", [8, 64, 512])
def test_keys_that_reach_the_last_device_are_those_of_the_plan(devices: int) -> None:
    settings = how_far.settings_of("1B", 1 << 20)
    call = ShardedCall(settings.model.pattern(0), settings.model.num_heads, True, 0, None)
    taken = sent_rows(call, Shards(1 << 20, devices, "contiguous")).taken
    head_dim = settings.model.embed_dim // settings.model.num_heads
    in_plan = 3 * settings.model.num_layers * int(taken.max()) * 2 * head_dim * 2
    # Segments end with shards; rates that do not divide them leave a row more or less for a head.
    assert how_far.key_bytes(settings, devices) == pytest.approx(in_plan, rel=2e-3)


def test_weights_are_gathered_twice_and_their_gradients_added_up_once() -> None:
    settings = how_far.settings_of("1B", 1 << 20)
    weights = settings.model.num_parameters
    assert how_far.weight_bytes(settings, 1) == 0
    assert how_far.weight_bytes(settings, 4) == pytest.approx(12 * weights * 3 / 4)


def test_the_devices_of_the_file_are_the_fewest() -> None:
    line, memory = RESULTS["planned"]["lines"][1], RESULTS["planned"]["memory_bytes"]
    settings = how_far.settings_of(line["model"], line["tokens"])
    assert line["devices"] > how_far.NODE
    total = how_far.memory_of(settings, line["devices"]).total
    assert total < memory
    assert total == line["total"] or is_stale(RESULTS)
    assert how_far.memory_of(settings, line["devices"] // 2).total >= memory


def test_every_step_of_the_file_fits_and_is_bounded_by_its_longest_part() -> None:
    planned = RESULTS["planned"]
    assert [(line["model"], line["tokens"]) for line in planned["lines"]] == [
        (model, tokens) for model in how_far.MODELS for tokens in how_far.TOKENS
    ]
    for line in planned["lines"]:
        assert sum(line["memory"].values()) == line["total"] < planned["memory_bytes"]
        assert line["least_seconds"] == max(line["seconds"].values()) == line["seconds"][line["bound"]]


def test_the_papers_count_of_operations_is_twice_ours() -> None:
    for line in RESULTS["longnet"]["operations"]:
        assert 2 * line["pairs"] == pytest.approx(line["paper"], rel=1e-3)
        assert line["paper"] <= line["bound"]


def test_the_page_is_made_of_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(RESULTS)
    assert PICTURE.exists()
