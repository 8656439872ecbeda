"""A model is a folder here, in the hub's cache, or on a hub that answers; a mistyped folder is said at once."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from transformers import LlamaConfig, LlamaForCausalLM, T5Config

from dilated_attention_pytorch.training import RunError
from dilated_attention_pytorch.training.pretrained import check_source, load_config, num_parameters

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """Where nobody listens, until the socket that has it does; the hub is said to be there."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        host, port = listener.getsockname()
        listener.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://{host}:{port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield host, port


def test_a_hub_that_answers_is_left_to_answer(address: tuple[str, int]) -> None:
    check_source("--model a/b", "a/b")


def test_a_hub_that_does_not_is_named_beside_the_folder(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(RunError, match=r"there is no such folder \(looked for from .* \(127\.0\.0\.1: Connection ref"):
        check_source("--model a/b", "a/b")
    # Behind a proxy a connection of our own says nothing.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    check_source("--model a/b", "a/b")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RunError, match=r"no hub to ask .* \(HF_HUB_OFFLINE is set\)"):
        check_source("--model a/b", "a/b")


@pytest.mark.parametrize("changes", [
    {"bos_token_id": "x"}, {"__class__": "x"}, {"hidden_size": []}, {"max_position_embeddings": "x"},
    {"vocab_size": -1}, {"dtype": "x"}, {"model_type": []}, {"rope_parameters": "x"}, {"num_attention_heads": 0},
], ids=str)  # fmt: skip
def test_a_configuration_that_transformers_does_not_take_is_refused_in_words(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    values = LlamaConfig(vocab_size=256, max_position_embeddings=32, **SIZES).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**values, **changes}))
    with pytest.raises(RunError, match=r"^--model x: .*(describes no |is missing|cannot be loaded)"):
        num_parameters("--model x", load_config("--model x", tmp_path))


@pytest.mark.parametrize("model", ["./a", "a/b/c", "../a", "/a/b", "a b", "a/b/"])
def test_what_is_no_name_of_the_hub_is_a_folder_that_is_missing(
    model: str, address: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # whatever lies beside the folder of the tests
    with pytest.raises(RunError, match=r"there is no such folder \(looked for from .*\); name a folder with config"):
        check_source(f"--model {model}", model)


def test_weights_are_counted_without_making_them(tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=97, **SIZES)
    assert num_parameters("x", config) == sum(weight.numel() for weight in LlamaForCausalLM(config).parameters())
    largest = LlamaConfig(vocab_size=1 << 20, **{**SIZES, "hidden_size": 1 << 20, "num_attention_heads": 2})
    assert num_parameters("x", largest) > 1 << 40
    with pytest.raises(RunError, match=r"--model x: its config.json describes no causal language model"):
        num_parameters("--model x", T5Config())
