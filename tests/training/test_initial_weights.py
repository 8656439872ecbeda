"""Runs that begin with the weights of another run or of a saved model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.cli.train import defaults_of
from dilated_attention_pytorch.models import LongNetConfig, LongNetForCausalLM
from dilated_attention_pytorch.training import RunError, TrainSettings, resume, train
from dilated_attention_pytorch.training.data.tokenizer import train_tokenizer
from dilated_attention_pytorch.training.run_checkpoints import RunCheckpoints
from training.runs import Heard, assert_same_weights, quiet, stopped_run, tiny_settings

STILL: dict[str, Any] = {"steps": 1, "learning_rate": 1e-30, "muon_learning_rate": 1e-30, "weight_decay": 0.0}
"""A step that changes no bit of a weight."""


@pytest.fixture(scope="module")
def source(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny_settings(texts), tmp_path_factory.mktemp("initial") / "source", quiet()).run


def with_model(settings: TrainSettings, **changes: Any) -> TrainSettings:
    return dataclasses.replace(settings, model=dataclasses.replace(settings.model, **changes))


def record_of(run: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run / "training.json").read_text())
    return record


def test_a_run_begins_with_the_weights_of_another_under_another_pattern(
    texts: Path, source: Path, tmp_path: Path
) -> None:
    settings = tiny_settings(texts, init_from=source, seed=7, **STILL)
    settings = with_model(settings, segment_lengths=(32, 128), layer_segment_shifts=(0,), rope_theta=500.0)
    console = Heard()
    run = train(settings, tmp_path / "run", console).run
    assert_same_weights(run, source)
    assert LongNetForCausalLM.from_pretrained(run).config.segment_lengths == [32, 128]
    digest = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    assert record_of(run)["init_from"] == {"path": str(source), "sha256": digest}
    assert f"weights: those of {source} (SHA-256 {digest})" in console.said
    assert record_of(run)["settings"]["init_from"] == str(source)


def test_an_unfinished_run_and_a_saved_model_give_their_weights_too(
    texts: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_run(monkeypatch, tiny_settings(texts), tmp_path / "stopped", 4)
    settings = tiny_settings(texts, init_from=tmp_path / "stopped", **STILL)
    run = train(settings, tmp_path / "from stopped", quiet()).run
    assert_same_weights(run, tmp_path / "stopped" / "checkpoint-5")
    assert record_of(run)["init_from"]["path"] == str(tmp_path / "stopped" / "checkpoint-5")
    LongNetForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "saved")
    run = train(dataclasses.replace(settings, init_from=tmp_path / "saved"), tmp_path / "from saved", quiet()).run
    assert_same_weights(run, tmp_path / "saved")


def test_a_stopped_run_goes_on_without_the_folder_that_it_began_from(
    texts: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    settings = tiny_settings(texts, init_from=copy)
    whole = train(settings, tmp_path / "whole", quiet()).run
    stopped_run(monkeypatch, settings, tmp_path / "run", 4)
    shutil.rmtree(copy)
    resume(tmp_path / "run", quiet())
    assert_same_weights(tmp_path / "run", whole)


def test_before_the_first_checkpoint_a_run_begins_again_with_the_same_weights_only(
    texts: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, other = Path(shutil.copytree(source, tmp_path / "copy")), tmp_path / "other"
    settings = tiny_settings(texts, init_from=copy, **STILL)

    def die(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunCheckpoints, "staging", die)
        with pytest.raises(KeyboardInterrupt):
            train(settings, tmp_path / "run", quiet())
    LongNetForCausalLM.from_longnet_config(settings.model).save_pretrained(other)
    shutil.move(copy, tmp_path / "kept")
    shutil.copytree(other, copy)
    with pytest.raises(RunError, match=r"are not those that the run began with .*; restore them, or start a new run"):
        train(settings, tmp_path / "run", quiet(), may_resume=True)
    shutil.rmtree(copy)
    shutil.move(tmp_path / "kept", copy)
    train(settings, tmp_path / "run", quiet(), may_resume=True)
    assert_same_weights(tmp_path / "run", source)


def test_weights_that_do_not_fit_are_refused_before_anything_is_written(
    texts: Path, source: Path, tmp_path: Path
) -> None:
    settings = tiny_settings(texts, init_from=source)
    for changes, words in (
        ({"embed_dim": 64, "activation": "gelu"}, r"--model.embed-dim 32 there and 64 here, --model.activation swiglu"),
        ({"shifted_keys": True}, "--model.shifted-keys False there and True here; leave these flags out"),
    ):
        with pytest.raises(RunError, match=f"^--init-from .*: its weights do not fit .*{words}"):
            train(with_model(settings, **changes), tmp_path / "run", quiet())
    text = b"".join(path.read_bytes() for path in texts.iterdir())
    tokenizer, saved = tmp_path / "tokenizer.json", tmp_path / "saved"
    tokenizer.write_text(train_tokenizer([text], 300).text)
    of_tokens = with_model(dataclasses.replace(settings, tokenizer=tokenizer), vocab_size=300)
    with pytest.raises(RunError, match=r"--model\.vocab-size 256 there and 300 here"):
        train(of_tokens, tmp_path / "run", quiet())
    LongNetForCausalLM.from_longnet_config(of_tokens.model).save_pretrained(saved)
    (saved / "tokenizer.json").write_text(train_tokenizer([text[: len(text) // 2]], 300).text)
    with pytest.raises(RunError, match="its tokens are not those of this run's tokenizer"):
        train(dataclasses.replace(of_tokens, init_from=saved), tmp_path / "run", quiet())
    assert not (tmp_path / "run").exists()


def test_the_command_line_takes_sizes_and_tokenizer_from_the_folder(
    texts: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = LongNetConfig(
        vocab_size=300, embed_dim=24, num_layers=1, num_heads=2, segment_lengths=[32], dilation_rates=[1]
    )
    saved = tmp_path / "saved"
    LongNetForCausalLM.from_longnet_config(model).save_pretrained(saved)
    text = b"".join(path.read_bytes() for path in texts.iterdir())
    (saved / "tokenizer.json").write_text(train_tokenizer([text], 300).text)
    defaults = defaults_of(["--init-from", str(saved)])
    assert (defaults.init_from, defaults.tokenizer, defaults.model) == (saved, saved, model)
    (tmp_path / "run.toml").write_text(f'preset = "tiny"\ninit_from = "{saved}"\n[model]\ndropout = 0.5\n')
    defaults = defaults_of(["--config", str(tmp_path / "run.toml")])
    assert defaults.model == dataclasses.replace(model, dropout=0.5)
    words = ["train", "--preset", "tiny", "--data", str(texts), "--steps", "1", "--init-from", str(saved)]
    main([*words, "--output", str(tmp_path / "run"), "--model.segment-lengths", "64"])
    assert f"weights: those of {saved} (SHA-256 " in capsys.readouterr().out
    assert record_of(tmp_path / "run")["settings"]["model"]["segment_lengths"] == [64]


def test_the_command_line_takes_the_vocabulary_from_the_tokenizer(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(train_tokenizer([path.read_bytes() for path in texts.iterdir()], 300).text)
    assert defaults_of(["--tokenizer", str(tokenizer)]).model.vocab_size == 300
    assert defaults_of([f"--tokenizer={tmp_path}"]).model.vocab_size == 300
    words = ["train", "--preset", "tiny", "--data", str(texts), "--tokenizer", str(tokenizer)]
    with pytest.raises(SystemExit):
        main([*words, "--model.vocab-size", "256", "--output", str(tmp_path / "run")])
    assert "has 300 tokens and the model 256; leave --model.vocab-size out" in capsys.readouterr().err
