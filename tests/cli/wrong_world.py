"""What wrong command lines are about: texts good and bad, runs finished, stopped and damaged."""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import json
import lzma
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from cli.wrong_command_lines import ROWS
from dilated_attention_pytorch.training import train
from dilated_attention_pytorch.training.data.tokenizer import train_tokenizer
from dilated_attention_pytorch.training.manifest import sealed
from training.runs import change_sealed, quiet, seal_again, stopped_run, tiny_settings, write_texts


def make_world(world: Path) -> Path:
    """Texts good and bad, a run that is finished, one that was stopped, and damaged copies of both."""
    texts = write_texts(world / "texts")
    settings = tiny_settings(texts, steps=3, log_steps=1)
    train(settings, world / "finished", quiet())
    with pytest.MonkeyPatch.context() as monkeypatch:
        stopped_run(monkeypatch, settings, world / "stopped", 1)

    (world / "settings").mkdir()
    for row in ROWS:
        (world / "settings" / row.file).write_text(row.toml.replace("{}", str(world)))
    bad = world / "bad"
    (bad / "textless").mkdir(parents=True)
    (bad / "textless" / "image.png").write_bytes(b"\x89PNG\0\0")
    (bad / "empty.txt").touch()
    (bad / "odd").mkdir()
    (bad / "odd" / "empty").touch()
    os.mkfifo(bad / "odd" / "a-pipe")
    os.mkfifo(bad / "pipe")
    (bad / "binary.bin").write_bytes(bytes(range(256)) * 9)
    (bad / "latin.txt").write_bytes("é".encode("latin-1") * 999)
    (bad / "short.txt").write_text("short\n" * 11)
    (bad / "good.jsonl").write_text('{"text": "good"}\n')
    (bad / "cut.jsonl").write_text('{"text": "good"}\n{\n')
    (bad / "blank.jsonl").write_text('{"text": ""}\n')
    (bad / "bad.parquet").write_bytes(b"PAR1" * 9)
    (bad / "saved").mkdir()
    (bad / "saved" / "state.json").write_text("{}")
    for split in ("train", "test"):
        (bad / "splits" / split).mkdir(parents=True)
        (bad / "splits" / split / "state.json").write_text("{}")
    (bad / "splits" / "dataset_dict.json").write_text("{}")
    text = b"text that is compressed\n" * 99
    (bad / "packed").mkdir()
    for file, compressed in (
        ("text.gz", gzip.compress(text)),
        ("gz.jsonl", gzip.compress(text)),
        ("packed/text.txt", gzip.compress(text)),
        ("text.bz2", bz2.compress(text)),
        ("text.xz", lzma.compress(text)),
        ("text.zst", pa.Codec("zstd").compress(text, asbytes=True)),
    ):
        (bad / file).write_bytes(compressed)
    with zipfile.ZipFile(bad / "text.zip", "w") as archive:
        archive.writestr("text.txt", text)
    tokenizer = train_tokenizer([path.read_bytes() for path in sorted(texts.iterdir())], 300)
    (world / "tokenizer.json").write_text(tokenizer.text)
    over_tokens = dataclasses.replace(
        settings, tokenizer=world / "tokenizer.json", model=dataclasses.replace(settings.model, vocab_size=300)
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        stopped_run(monkeypatch, over_tokens, world / "tokens", 1)
    (world / "taken").mkdir()
    (world / "taken" / "notes.txt").write_text("precious")
    (world / "file").write_text("precious")
    (world / "old.png").write_bytes(b"precious")
    (world / "reports").mkdir()
    (world / "reports" / "report.txt").write_text("precious")

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=32, **sizes)).save_pretrained(world / "short")
    (world / "extension").mkdir()
    (world / "extension" / "training.json").write_text(sealed({"kind": "extension", "settings": {"model": "x"}}))

    def copy(source: str, name: str) -> Path:
        return Path(shutil.copytree(world / source, world / name))

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def flip(path: Path) -> None:
        whole = bytearray(path.read_bytes())
        whole[-3] ^= 4
        path.write_bytes(whole)

    def change(path: Path, **values: Any) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    cut(copy("tokens", "other-tokenizer") / "tokenizer.json")
    (world / "tokens" / "tokenizer.json").unlink()
    shutil.rmtree(copy("stopped", "unbegun") / "checkpoint-2")
    cut(copy("stopped", "truncated") / "checkpoint-2" / "model.safetensors")
    cut(copy("stopped", "cut-optimizer") / "checkpoint-2" / "optimizer.pt")
    (copy("stopped", "no-scheduler") / "checkpoint-2" / "scheduler.pt").unlink()
    change(copy("stopped", "changed-config") / "checkpoint-2" / "config.json", rope_theta=77.0)
    change(copy("stopped", "other-model") / "checkpoint-2" / "config.json", rope_theta=77.0)
    seal_again(world / "other-model" / "checkpoint-2")
    copy("stopped", "other-run")
    change_sealed(world / "other-run" / "training.json", run="00")
    (copy("stopped", "no-manifest") / "checkpoint-2" / "manifest.json").unlink()
    change(copy("stopped", "changed-settings") / "training.json", processes=2)
    unsealed = json.loads((copy("stopped", "earlier") / "training.json").read_text())
    del unsealed["sha256"]
    (world / "earlier" / "training.json").write_text(json.dumps(unsealed))
    cut(copy("stopped", "bad-settings") / "training.json")
    record = json.loads((world / "stopped" / "training.json").read_text())
    copy("stopped", "other-text")
    change_sealed(world / "other-text" / "training.json", corpus={**record["corpus"], "training_bytes": 1})
    cut(copy("finished", "cut-weights") / "model.safetensors")
    (copy("finished", "no-config") / "config.json").unlink()
    flip(copy("finished", "flipped") / "model.safetensors")
    flip(copy("stopped", "flipped-checkpoint") / "checkpoint-2" / "model.safetensors")
    # Folders without a manifest, as save_pretrained makes them.
    foreign, unfit, contrary = {"model_type": "gpt2"}, {"embed_dim": 64, "hidden_size": 64}, {"embed_dim": 64}
    for name, values in (("foreign", foreign), ("unfit", unfit), ("contrary", contrary)):
        (copy("finished", name) / "manifest.json").unlink()
        change(world / name / "config.json", **values)
    return world
