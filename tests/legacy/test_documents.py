"""The Python blocks of the documents of the earlier package: each runs, or is told what to write."""

from __future__ import annotations

import re
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dilated_attention_pytorch import LongNetConfig, LongNetLM
from support.pages import DOCS

BLOCKS: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("documents.toml").read_text())["block"]
PAGE = (DOCS / "migration.md").read_text()


def surroundings() -> dict[str, Any]:
    """What the documents take as given around their blocks, small enough for a test."""
    config = LongNetConfig(embed_dim=16, num_layers=1, num_heads=2, segment_lengths=[2048, 4096], dilation_rates=[1, 2])
    heads = {name: torch.randn(1, 12, 2, 8) for name in ("q", "k", "v", "query", "key", "value")}
    tokens = torch.randint(256, (1, 12))
    return {
        **heads,
        "torch": torch,
        "nn": nn,
        "model": LongNetLM(config),
        "attention_layer": nn.Linear(4, 4),
        "inputs": tokens,
        "input_ids": tokens,
        "embed_dim": 16,
        "num_heads": 2,
        "segments": [2048, 4096],
        "dilations": [1, 2],
        "segment_lengths": [2048, 4096],
        "dilation_rates": [1, 2],
        "dataloader": [],
    }


@pytest.fixture(autouse=True)
def _settings_of_torch_stay() -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    tf32, benchmark = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = tf32, benchmark


def run(block: dict[str, Any]) -> None:
    scope = surroundings()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old names warn, and so do what the documents take of torch.cuda.amp
        for part in ("before", "text", "after"):
            exec(compile(block.get(part, ""), f"block {block['number']}, {part}", "exec"), scope)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block['number']}-{block['kind']}")
def test_a_block_runs_or_says_what_to_write(block: dict[str, Any]) -> None:
    if "bitsandbytes" in block.get("before", "") + block["text"]:
        pytest.importorskip("bitsandbytes")
    if block["kind"] == "page":
        assert block["says"] in PAGE
    elif block["kind"] == "answered":
        with pytest.raises((ImportError, RuntimeError, TypeError, ValueError), match=re.escape(block["says"])):
            run(block)
    else:
        run(block)


def test_the_page_counts_the_blocks() -> None:
    kinds = Counter(block["kind"] for block in BLOCKS)
    sentence = r"(\d+) Python blocks: (\d+) run, (\d+) stop with an error .*?, and (\d+) are answered by this table"
    figures = re.search(sentence.replace(" ", r"\s+"), PAGE)
    assert figures is not None
    assert tuple(map(int, figures.groups())) == (len(BLOCKS), kinds["runs"], kinds["answered"], kinds["page"])
    assert [block["number"] for block in BLOCKS] == list(range(1, 43))


def test_every_function_that_the_documents_define_has_its_counterpart_on_the_page() -> None:
    defined = {
        name for block in BLOCKS for name in re.findall(r"^(?:def|class) (\w+)", block["text"], flags=re.MULTILINE)
    }
    assert len(defined) > 15
    assert {name for name in defined if f"`{name}`" not in PAGE} == set()
