"""The page of a plan holds its numbers, and pictures of other lengths and devices that are plans too."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.data_sheets import sheet_of
from dilated_attention_pytorch.estimate import Device, longest_context, plan_run
from dilated_attention_pytorch.estimate.batch import with_length
from dilated_attention_pytorch.estimate.memory import footprint
from dilated_attention_pytorch.estimate.page import PARTS, SECONDS, Pictures, page, pictures_of
from dilated_attention_pytorch.training import PRESETS


def test_a_page_holds_everything_that_it_shows() -> None:
    settings = dataclasses.replace(PRESETS["tiny"](), precision="float32")
    plan = plan_run(settings, 1, sheet_of("RTX 4090"))
    memory = ((128, dict.fromkeys(PARTS, 10**9)), (256, dict.fromkeys(PARTS, 2 * 10**9)))
    seconds = ((1, "", dict.fromkeys(SECONDS, 1.0)), (2, "--data-parallel fsdp", dict.fromkeys(SECONDS, 0.5)))
    pictures = Pictures(memory=memory, memory_bytes=24 * 10**9, seconds=seconds, frontier=((1, 1024), (2, 2048)))
    text = "".join(page("A run on <this>", plan, ["one & two"], settings.to_dict(), pictures))
    assert "<title>A run on &lt;this&gt;</title>" in text
    assert "<p>one &amp; two</p>" in text
    assert f"{plan.seconds.total:.3g} s" in text
    assert all(f'id="chart-{name}"' in text for name in ("memory", "seconds", "frontier"))
    assert "--data-parallel fsdp" in text
    assert "<th>model.segment_lengths</th><td>64, 256</td>" in text
    # Nothing is fetched: the program that draws is within.
    assert "<script src=" not in text
    assert "<link " not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"packing": "documents", "batch_size": 1, "max_tokens": 8192}], ids=["windows", "documents"]
)
def test_pictures_are_plans(changes: dict[str, Any]) -> None:
    told = {"precision": "float32", "optimizer": "adamw", "context_length": 4096, **changes}
    settings = dataclasses.replace(PRESETS["tiny"](), **told)
    device = Device(sheet=dataclasses.replace(sheet_of("RTX 4090"), memory_bytes=10**8))
    pictures = pictures_of(settings, 1, device)
    for length, parts in pictures.memory:
        found = dataclasses.asdict(footprint(with_length(settings, length), 1))
        assert parts == {name: found[name] for name in PARTS}
    assert [number for number, _, _ in pictures.seconds] == [1, 2, 4, 8]
    assert pictures.frontier[0] == (1, longest_context(settings, 1, 10**8))
    longest = [tokens for _, tokens in pictures.frontier]
    assert longest == sorted(longest)


def test_the_command_writes_page_and_json_of_a_generation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html, output = tmp_path / "plan.html", tmp_path / "plan.json"
    words = "plan --preset tiny --hardware H200 --precision float32 --for generation --prompt 100 --new-tokens 4"
    main([*words.split(), "--html", str(html), "--output", str(output)])
    written = json.loads(output.read_text())
    assert written["purpose"] == "generation"
    assert written["tokens"] == 2 * 4
    assert written["fits"]
    assert "seconds" not in written
    page_of = html.read_text()
    assert "key/value cache" in page_of
    assert "<h2>Seconds</h2>" not in page_of
    printed = capsys.readouterr().out
    assert "seconds of the generation" not in printed
    assert "8 new tokens in the generation; its seconds are not predicted: time `dilated-attention generate`" in printed
    assert "its seconds are not predicted" in page_of
