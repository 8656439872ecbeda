"""Runs over tokens, documents and mixtures: bits of the bytes predicted, the same samples however they are stopped."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.estimate.flops import longnet_flops
from dilated_attention_pytorch.training import TrainSettings, resume, train
from dilated_attention_pytorch.training.callbacks import read_metrics
from dilated_attention_pytorch.training.data.run_data import RunData, read_data, read_tokenizer
from dilated_attention_pytorch.training.data.sources import Sources
from dilated_attention_pytorch.training.data.tokenizer import BYTES, train_tokenizer
from dilated_attention_pytorch.training.data.windows import IGNORED, EvaluationWindows
from dilated_attention_pytorch.training.evaluated_model import open_model
from dilated_attention_pytorch.training.model_evaluation import EvalSettings, evaluate_model
from dilated_attention_pytorch.training.trained_model import load_model
from training.data.test_records import write_jsonl
from training.runs import (
    Heard,
    assert_same_weights,
    quiet,
    record_samples,
    samples_of,
    small_settings,
    stopped_run,
    tiny_settings,
    write_texts,
)
from training.test_spreading import go_on_over

MIXED = {"data_weights": (0.7, 0.3), "packing": "documents", "max_tokens": 300, "max_batch_size": 6, "batch_size": 1}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text files, records, and a tokenizer of 300 tokens."""
    world = tmp_path_factory.mktemp("data-runs")
    write_texts(world / "texts")
    write_jsonl(world / "a.jsonl", [f"record {number}: " + "x y z " * (number % 40) for number in range(300)])
    sources = Sources([world / "texts"], "text", None)
    sources.survey()
    train_tokenizer(sources.texts_to_train_on(), 300).save(world)
    return world


def over_tokens(settings: TrainSettings, world: Path, **changes: Any) -> TrainSettings:
    model = dataclasses.replace(settings.model, vocab_size=300)
    return dataclasses.replace(
        settings, model=model, tokenizer=world / "tokenizer.json", data=(world / "texts", world / "a.jsonl"), **changes
    )


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="windows"),
        pytest.param({"packing": "documents"}, id="documents", marks=pytest.mark.slow),
        pytest.param(MIXED, id="mixture"),  # of documents
    ],
)
def test_the_loss_is_in_bits_of_the_bytes_that_are_predicted(
    changes: dict[str, Any], world: Path, tmp_path: Path
) -> None:
    settings = over_tokens(tiny_settings(world, steps=4, precision="float32", log_steps=2), world, **changes)
    outcome = train(settings, tmp_path / "run", quiet())
    evaluation = read_data(settings, read_tokenizer(settings), None).evaluation()
    model = load_model(outcome.run).eval()
    nats, predicted = 0.0, b""
    pieces = read_tokenizer(settings).token_bytes
    for index in range(len(evaluation)):
        sample = evaluation[index]
        labels = sample["labels"]
        with torch.no_grad():
            logits = model(sample["input_ids"][None], cu_seqlens=sample.get("cu_seqlens")).logits[0, :-1]
        kept = labels[1:] != IGNORED
        nats += float(functional.cross_entropy(logits[kept], labels[1:][kept], reduction="sum"))
        predicted += b"".join(pieces[token] if token else b"\0" for token in labels[1:][kept].tolist())
    assert predicted == evaluation.predicted()
    assert outcome.bits_per_byte == pytest.approx(nats / math.log(2) / len(predicted), rel=1e-5)
    entries = [entry for entry in read_metrics(outcome.run) if "bits_per_byte" in entry]
    assert [entry["step"] for entry in entries] == [2, 4]
    assert all(2 < entry["bits_per_byte"] < 9 for entry in entries)


def test_eval_reads_the_records_and_the_tokens_of_the_run(world: Path, tmp_path: Path) -> None:
    records = [f"record {number}: <|endoftext|> é " + "x y z " * (number % 40) for number in range(300)]
    write_jsonl(tmp_path / "b.jsonl", records, "content")
    settings = over_tokens(
        tiny_settings(world, steps=1, precision="float32", context_length=64), world, text_field="content"
    )
    settings = dataclasses.replace(settings, data=(tmp_path / "b.jsonl",))
    run = train(settings, tmp_path / "run", quiet()).run
    asked = EvalSettings(context_lengths=(33,), windows=3, recall_texts=0, precision="float32", device="cpu")
    result = json.loads(evaluate_model(str(run), asked, tmp_path / "eval.json", quiet()).read_text())
    model, tokenizer = load_model(run).eval(), read_tokenizer(settings)
    (corpus,) = read_data(settings, tokenizer, None).corpora
    windows = EvaluationWindows(corpus.held_out, 33, 3)
    nats, text = 0.0, b""
    for index in range(len(windows)):
        tokens = windows[index]["input_ids"]
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1]
        nats += float(functional.cross_entropy(logits, tokens[1:], reduction="sum"))
        text += b"".join(tokenizer.token_bytes[token] if token else b"\0" for token in tokens[1:].tolist())
    count = len(text)
    assert result["bits_per_byte"]["33"] == pytest.approx(nats / math.log(2) / count, rel=1e-5)


def test_eval_measures_a_mixture_on_what_the_run_held_out(world: Path, tmp_path: Path) -> None:
    for name in "ab":
        lines = [f"{name} {number}: line\n" for number in range(4000)]
        (tmp_path / f"{name}.txt").write_text("".join(lines))
    paths = (tmp_path / "a.txt", tmp_path / "b.txt")
    settings = dataclasses.replace(tiny_settings(world, steps=1), data=paths, data_weights=(0.7, 0.3))
    run = train(settings, tmp_path / "run", quiet()).run
    texts, weights = open_model(str(run), "cpu").held_out((), "", print)
    assert weights == (0.7, 0.3)
    for path, text in zip(paths, texts, strict=True):
        held_out = text.data[1:].numpy().tobytes()
        assert path.read_bytes().endswith(held_out)
        assert len(held_out) < 0.06 * path.stat().st_size


@pytest.mark.parametrize(
    "changes",
    [
        # Both are evaluated on rows.
        pytest.param({"packing": "documents"}, id="rows", marks=pytest.mark.slow),
        pytest.param(MIXED, id="batches of a mixture"),
    ],
)
def test_eval_of_a_run_over_documents_reads_each_alone_as_training_does(
    changes: dict[str, Any], world: Path, tmp_path: Path
) -> None:
    settings = over_tokens(tiny_settings(world, steps=2, precision="float32"), world, **changes)
    outcome = train(settings, tmp_path / "run", quiet())
    asked = EvalSettings(
        context_lengths=(33, settings.context_length),
        windows=settings.final_eval_windows,
        recall_texts=0,
        precision="float32",
        device="cpu",
    )
    said = Heard()
    result = json.loads(evaluate_model(str(outcome.run), asked, tmp_path / "eval.json", said).read_text())
    assert result["packing"] == "documents"
    assert "held-out documents, each read alone" in said.said
    assert result["bits_per_byte"][str(settings.context_length)] == pytest.approx(outcome.bits_per_byte, rel=1e-5)
    # At 33 tokens the same are predicted, from at most 32 before them in their own document.
    evaluation = read_data(settings, read_tokenizer(settings), None).evaluation()
    model, nats = load_model(outcome.run).eval(), []
    for index in range(len(evaluation)):
        row = evaluation[index]
        for first, after in pairwise(row["cu_seqlens"].tolist()):
            for start in range(first, after - 1, 32):
                piece = row["input_ids"][start : min(start + 33, after)]
                with torch.no_grad():
                    nats.append(functional.cross_entropy(model(piece[None, :-1]).logits[0], piece[1:], reduction="sum"))
    expected = float(torch.stack(nats).sum()) / math.log(2) / len(evaluation.predicted())
    assert result["bits_per_byte"]["33"] == pytest.approx(expected, rel=1e-5)


def test_a_tokenizer_of_a_mixture_is_trained_on_what_each_source_does_not_hold_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for name, count in (("a", 500), ("b", 300)):
        text = "".join(f"{name}{number * number} line\n" for number in range(count)).encode()
        (tmp_path / f"{name}.txt").write_bytes(text)
        texts.append(text[: len(text) - len(text) // 20])
    words = ["tokenizer", str(tmp_path / "a.txt"), str(tmp_path / "b.txt"), "--vocab-size", "400", "--output-file"]
    for flags, name in (["--mixture"], "mixture.json"), ([], "joined.json"):
        main([*words, str(tmp_path / name), *flags])
    expected = train_tokenizer(texts, 400).text
    assert (tmp_path / "mixture.json").read_text() == expected
    assert (tmp_path / "joined.json").read_text() != expected


@pytest.mark.parametrize("drawn", [(), (3, 90)], ids=["own windows", "drawn windows"])
@pytest.mark.parametrize("changes", [{"packing": "documents"}, MIXED], ids=["rows", "batches of a mixture"])
def test_operations_are_those_of_every_document_by_itself(
    changes: dict[str, Any], drawn: tuple[int, ...], world: Path
) -> None:
    settings = over_tokens(tiny_settings(world), world, **changes)
    if drawn:
        windows = {"layer_patterns": ("local_window(9)",), "layer_segment_shifts": (0,)}
        model = dataclasses.replace(settings.model, segment_lengths=(), dilation_rates=(), **windows)
        settings = dataclasses.replace(settings, model=model, random_local_windows=drawn)
    data = read_data(settings, read_tokenizer(settings), None)
    training = data.training(3)
    work = data.work(training, 3)
    flops = [longnet_flops(settings.model).under(settings.stages_by_step.patterns_at(step)) for step in range(2)]
    assert len(set(flops)) == (2 if drawn else 1)
    lengths = [training[index]["cu_seqlens"].diff().tolist() for index in range(6)]
    expected = (3 * flops[index // 3].of_text(length) for index, row in enumerate(lengths) for length in row)
    assert work.flops_after(2) == sum(expected)
    assert work.tokens_after(2) == sum(map(sum, lengths))
    assert (work.tokens_after(0), work.flops_after(0)) == (0, 0)


def test_a_run_over_a_mixture_that_was_stopped_ends_with_the_same_bits_and_samples(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = over_tokens(tiny_settings(world), world, gradient_accumulation=2, **MIXED)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes((world / "tokenizer.json").read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        record_samples(patch, tmp_path / "seen-whole")
        # Batches that other processes load are the same.
        whole = train(dataclasses.replace(settings, workers=1), tmp_path / "whole", quiet())
    with pytest.MonkeyPatch.context() as patch:
        record_samples(patch, tmp_path / "seen")
        stopped_run(patch, dataclasses.replace(settings, tokenizer=tokenizer), tmp_path / "run", 4)
        tokenizer.unlink()  # the run has its own
        torch.manual_seed(7)
        ended = resume(tmp_path / "run", quiet())
    assert samples_of(tmp_path / "seen") == samples_of(tmp_path / "seen-whole")
    assert_same_weights(ended.run, whole.run)
    assert (ended.bits_per_byte, ended.sample) == (whole.bits_per_byte, whole.sample)
    record = json.loads((ended.run / "training.json").read_text())
    assert record["corpus"]["held_out_tokens"] > 100
    monkeypatch.setattr("sys.stdin", io.StringIO())
    main(["generate", str(ended.run), "--prompt", "def f", "--max-new-tokens", "9", "--seed", "0", "--device", "cpu"])
    assert capsys.readouterr().out.startswith("def f")


def test_the_prompt_of_a_run_is_the_beginning_of_a_held_out_file(world: Path, tmp_path: Path) -> None:
    def prompt(settings: TrainSettings) -> str:
        return read_data(settings, read_tokenizer(settings), None).prompt()

    tokens = dataclasses.replace(over_tokens(tiny_settings(world / "texts"), world), data=(world / "texts",))
    for settings in (tiny_settings(world / "texts"), tokens):
        held_out = bytes(read_data(tiny_settings(world / "texts"), BYTES, None).corpora[0].held_out.file(0)[1:])
        assert prompt(settings) == "def f" + held_out.decode()[5:24].rpartition(" ")[0]
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / "texts" / f"{number}.txt").write_text("\n\n  Ishmael\x1b\n" * 30)
    assert prompt(tiny_settings(tmp_path / "texts")) == "Ishmael"
    assert RunData((), dataclasses.replace(tiny_settings(tmp_path), data=()), BYTES).prompt() == "def main("


@pytest.mark.slow
def test_one_process_and_then_four_read_what_one_reads(world: Path, tmp_path: Path) -> None:
    """Packed rows of documents, two processes at each, from a mixture."""
    settings = over_tokens(
        small_settings(world, steps=6, save_steps=3, batch_size=1, gradient_accumulation=4, eval_steps=6),
        world,
        data_weights=(0.6, 0.4),
        packing="documents",
    )
    with pytest.MonkeyPatch.context() as patch:
        record_samples(patch, tmp_path / "seen-whole")
        whole = train(settings, tmp_path / "whole", quiet())
    with pytest.MonkeyPatch.context() as patch:
        record_samples(patch, tmp_path / "seen")
        stopped_run(patch, settings, tmp_path / "run", 2)
    go_on_over(4, tmp_path / "run", None, {"context_parallel": 2}, tmp_path / "seen")
    assert samples_of(tmp_path / "seen") == samples_of(tmp_path / "seen-whole")
    curves = [
        {entry["step"]: entry["bits_per_byte"] for entry in read_metrics(run) if "bits_per_byte" in entry}
        for run in (whole.run, tmp_path / "run")
    ]
    assert list(curves[1]) == [1, 2, 3, 4, 5, 6]
    assert curves[1] == pytest.approx(curves[0], abs=1e-5)
    results = [json.loads((run / "training.json").read_text())["result"] for run in (whole.run, tmp_path / "run")]
    assert results[1]["bits_per_byte"] == pytest.approx(results[0]["bits_per_byte"], abs=1e-5)
