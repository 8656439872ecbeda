"""The measures of a trained model: against direct computations, and against models whose answers are known."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from dilated_attention_pytorch.training import RunError, model_evaluation, train
from dilated_attention_pytorch.training.data.corpus import read_corpus
from dilated_attention_pytorch.training.data.tokenizer import train_tokenizer
from dilated_attention_pytorch.training.evaluated_model import EvaluatedModel
from dilated_attention_pytorch.training.model_evaluation import EvalSettings, evaluate_model
from dilated_attention_pytorch.training.recall import CUE_LETTERS, NEEDLE_LETTERS, associations, needle
from dilated_attention_pytorch.training.record import Outcome
from dilated_attention_pytorch.training.trained_model import load_model
from training.runs import quiet, tiny_settings, write_texts


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("evaluation")
    settings = tiny_settings(write_texts(folder / "texts"), steps=3, log_steps=1, precision="float32")
    return train(settings, folder / "run", quiet())


def test_bits_per_byte_are_those_of_a_direct_computation_at_every_length(finished: Outcome, tmp_path: Path) -> None:
    settings = EvalSettings(context_lengths=(33, 65, 257), windows=2, recall_texts=0, precision="float32", device="cpu")
    file = evaluate_model(str(finished.run), settings, tmp_path / "eval.json", quiet())
    result = json.loads(file.read_text())
    text = read_corpus([finished.run.parent / "texts"]).held_out.data.long()
    model = load_model(finished.run).model.eval()
    starts = [0, (len(text) - 1) // 256 // 2 * 256]
    assert result["windows"] == 2
    for length in (33, 65, 257):
        bits = []
        for start in starts:
            window = text[start : start + 257]
            for first in range(0, 256, length - 1):
                piece = window[first : first + length]
                with torch.no_grad():
                    bits.append(functional.cross_entropy(model(piece[None, :-1])[0], piece[1:], reduction="none"))
        assert result["bits_per_byte"][str(length)] == pytest.approx(torch.cat(bits).mean().item() / math.log(2), 1e-5)
        by_position = torch.stack(bits).mean(dim=0) / math.log(2)
        (_, first), *_, (_, last) = result["by_position"][str(length)]
        assert first == pytest.approx(by_position[0].item(), rel=1e-5)
        assert by_position.min() < last < by_position.max()
    assert (result["own_length"], result["precision"]) == (256, "float32")
    assert (tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG")


def _bytes_of(text: str) -> list[int]:
    return list(text.encode())


def test_a_needle_comes_twice_at_its_distance() -> None:
    text = torch.arange(1000) % 97 + 128  # no letters
    task = needle(text, 300, 7, _bytes_of)
    (asked,) = task.again
    rest = NEEDLE_LETTERS - CUE_LETTERS
    again, first = (task.tokens[slice(*rows)] for rows in (asked.rows, task.first))
    assert torch.equal(again, first)
    assert len(again) == rest == asked.num_bytes
    assert asked.rows[0] - task.first[0] == asked.distance == 300
    assert asked.rows[1] == len(task.tokens)
    letters = (task.tokens >= ord("a")) & (task.tokens <= ord("z"))
    assert int(letters.sum()) == 2 * NEEDLE_LETTERS
    assert not torch.equal(needle(text, 300, 8, _bytes_of).tokens, task.tokens)


@pytest.mark.parametrize("length", [256, 2000])
def test_every_pair_that_is_asked_for_stands_in_the_text_at_its_distance(length: int) -> None:
    task = associations(length, 3, _bytes_of)
    assert length // 2 < len(task.tokens) <= length
    assert len(task.again) >= 4
    data = bytes(task.tokens.tolist())
    for asked in task.again:
        key, value = data[asked.rows[0] - 5 : asked.rows[0]], data[slice(*asked.rows)]
        assert data.index(key + value) == asked.rows[0] - asked.distance - 5
        assert asked.num_bytes == len(value) == 5


class _Copying(nn.Module):
    """Expects what followed the last time that the last four tokens came, and, where they did not, every byte alike."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, tokens: Tensor, use_cache: bool = False, labels: Any = None) -> Any:
        ids: Sequence[int] = tokens[0].tolist()
        logits = torch.zeros(1, len(ids), 256)
        seen: dict[tuple[int, ...], int] = {}
        for row in range(len(ids)):
            context = tuple(ids[max(0, row - 3) : row + 1])
            if context in seen:
                logits[0, row, seen[context]] = 30.0
            if row + 1 < len(ids):
                seen[context] = ids[row + 1]
        return SimpleNamespace(logits=logits)


def test_a_model_that_copies_recalls_everything_and_one_that_does_not_recalls_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_texts(tmp_path / "texts")
    results: dict[str, Any] = {}
    distances: list[int] = []

    def noted(text: Tensor, distance: int, *given: Any) -> Any:
        distances.append(distance)
        return needle(text, distance, *given)

    monkeypatch.setattr(model_evaluation, "needle", noted)
    for name, model in (("copying", _Copying()), ("uniform", _Uniform())):
        opened = EvaluatedModel(
            model=model,
            tokenizer=None,
            own_length=256,
            vocab_size=256,
            data=(texts,),  # type: ignore[arg-type]
        )
        monkeypatch.setattr(model_evaluation, "open_model", lambda *given, opened=opened: opened)
        monkeypatch.setattr(model_evaluation, "row_logits", lambda model: None)
        monkeypatch.setattr("dilated_attention_pytorch.training.evaluation.row_logits", lambda model: None)
        settings = EvalSettings(
            context_lengths=(256, 512), windows=1, recall_texts=2, precision="float32", device="cpu"
        )
        file = evaluate_model("x", settings, tmp_path / f"{name}.json", quiet())
        results[name] = json.loads(file.read_text())
    for row in results["copying"]["needle"]:
        assert row["again"] < 1e-6
        assert row["first"] == pytest.approx(8.0)
    assert [row["distance"] for row in results["copying"]["needle"]] == [128, 384]
    assert distances == [128, 127, 384, 383] * 2  # a dilation rate meets one residue of them only
    assert {row["answered"] for row in results["copying"]["associations"]} == {1.0}
    assert results["uniform"]["bits_per_byte"] == {"256": pytest.approx(8.0), "512": pytest.approx(8.0)}
    assert [row["again"] for row in results["uniform"]["needle"]] == [pytest.approx(8.0)] * 2
    assert {row["answered"] for row in results["uniform"]["associations"]} == {0.0}
    assert sum(row["asked"] for row in results["uniform"]["associations"]) > 8


class _Uniform(_Copying):
    """Expects every byte alike; the first of those that are likeliest is 0, which no text holds."""

    def forward(self, tokens: Tensor, use_cache: bool = False, labels: Any = None) -> Any:
        return SimpleNamespace(logits=torch.zeros(1, tokens.shape[1], 256))


def test_a_model_of_transformers_is_measured_beyond_its_length(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=256, max_position_embeddings=32, num_attention_heads=2, **sizes)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "short")
    texts = write_texts(tmp_path / "texts")
    settings = EvalSettings(data=(texts,), windows=1, precision="float32", device="cpu")
    result = json.loads(evaluate_model(str(tmp_path / "short"), settings, None, quiet()).read_text())
    assert list(result["bits_per_byte"]) == ["16", "32", "64"]
    window = read_corpus([texts]).held_out.data[:64].long()
    with torch.no_grad():
        expected = functional.cross_entropy(model(window[None, :-1]).logits[0], window[1:]).item() / math.log(2)
    assert result["bits_per_byte"]["64"] == pytest.approx(expected, rel=1e-5)
    assert result["needle"] == result["associations"] == []  # too short for them
    with pytest.raises(RunError, match=r"eval.json exists; nothing in it was changed"):
        evaluate_model(str(tmp_path / "short"), settings, None, quiet())


def test_tokens_that_the_model_does_not_know_are_refused(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=280, max_position_embeddings=32, num_attention_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    train_tokenizer([path.read_bytes() for path in sorted(texts.iterdir())], 300).save(tmp_path / "model")
    settings = EvalSettings(data=(texts,), context_lengths=(16,), precision="float32", device="cpu")
    with pytest.raises(RunError, match=r"the text holds token 29\d and the model knows 280 tokens \(vocab_size in con"):
        evaluate_model(str(tmp_path / "model"), settings, tmp_path / "x.json", quiet())
    assert not (tmp_path / "x.json").exists()


def test_a_model_with_a_table_of_positions_is_refused_beyond_it_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    settings = {"data": (write_texts(tmp_path / "texts"),), "recall_texts": 0, "precision": "float32", "device": "cpu"}
    for lengths in ((16, 32), (16, 33)):  # of 33 tokens the last is predicted, not read
        evaluate_model(
            str(tmp_path / "model"),
            EvalSettings(context_lengths=lengths, **settings),
            tmp_path / f"{lengths[1]}.json",
            quiet(),
        )
    monkeypatch.setattr(model_evaluation, "bits_of_tokens", lambda *given: pytest.fail("it was measured"))
    with pytest.raises(
        RunError, match=r"model cannot read 34 tokens \(index out of range .*; give --context-lengths up to 32"
    ):
        evaluate_model(
            str(tmp_path / "model"), EvalSettings(context_lengths=(16, 34), **settings), tmp_path / "x", quiet()
        )


def test_a_mistake_of_ours_is_not_taken_for_a_length_that_is_too_long(
    finished: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> None:
        raise IndexError("a mistake of ours")

    monkeypatch.setattr(model_evaluation, "bits_of_tokens", fail)
    with pytest.raises(IndexError, match="a mistake of ours"):
        evaluate_model(
            str(finished.run), EvalSettings(context_lengths=(64,), device="cpu"), tmp_path / "x.json", quiet()
        )
