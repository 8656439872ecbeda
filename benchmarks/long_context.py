"""The long-context recipe on a small model: bits per byte before, after replacement, and after further training.

    python -m benchmarks.long_context

A Llama of some million parameters is trained on the bytes of Python's standard library in windows of 1,024, like an
existing model, by transformers' Trainer with dense attention. Then ``dilated-attention extend`` extends it to 8,192:
once with the pattern, and once with dense attention and the same training, which shows the cost of the pattern itself.
The same command resumes an extension where it stopped.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dilated_attention_pytorch.benchmarks.results import write_json
from dilated_attention_pytorch.training import ExtensionSettings, extend, resume_extension
from dilated_attention_pytorch.training.checkpoint import latest_checkpoint
from dilated_attention_pytorch.training.data.corpus import read_corpus
from dilated_attention_pytorch.training.data.windows import EvaluationWindows, TrainingWindows, evenly_spread
from dilated_attention_pytorch.training.evaluation import binned, draw_positions
from dilated_attention_pytorch.training.manifest import read_json
from dilated_attention_pytorch.training.record import STATES

from .measured_code import digest
from .study import Study, run


@dataclass(frozen=True, kw_only=True)
class LongContext(Study):
    """Settings."""

    folder: Path = Path("runs/long-context")
    """Where the runs are kept, a folder for each state of the code."""
    pretraining_steps: int = 600
    """Steps of the short model, of 8 windows."""
    steps: int = 150
    """Steps of the extension, of one window."""
    short: int = 1024
    """Length of the short model's windows, in bytes."""
    length: int = 8192
    """Length that it is extended to."""
    seed: int = 0
    """Seed of all trainings."""
    picture: Path = Path("docs/pictures/long-context.png")
    """File of the picture."""


def pretrain(folder: Path, given: LongContext) -> dict[str, Any]:
    """Train the short model unless ``folder`` has it; returns its steps and held-out bits per byte."""
    from torch.utils.data import Subset
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

    said = folder / "pretraining.json"
    if said.exists():
        return read_json(said, what="benchmark", remedy="remove the folder and begin anew")
    steps, seed, length = given.pretraining_steps, given.seed, given.short
    set_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=length,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=True,
        )
    )
    corpus = read_corpus()
    held_out = EvaluationWindows(corpus.held_out, length, length // 4)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder / "run"),
            max_steps=steps,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=8,
            learning_rate=2e-3,
            lr_scheduler_type="linear",
            warmup_steps=steps // 30,
            weight_decay=0.1,
            adam_beta2=0.95,
            bf16=True,
            use_cpu=True,
            seed=seed,
            logging_steps=max(1, steps // 10),
            save_strategy="no",
            prediction_loss_only=True,
            report_to=[],
            train_sampling_strategy="sequential",
            dataloader_pin_memory=False,
        ),
        train_dataset=TrainingWindows(corpus.training, length, 8 * steps, seed=seed, file_start_fraction=0.0),
    )
    trainer.train()
    nats = trainer.evaluate(Subset(held_out, evenly_spread(len(held_out), 2)) if given.tiny else held_out)["eval_loss"]
    model.save_pretrained(folder)
    record = {
        "steps": steps,
        "seed": seed,
        "bytes_per_step": 8 * length,
        "bits_per_byte": nats / math.log(2),
    }
    write_json(said, record)
    return record


def extended(settings: ExtensionSettings, folder: Path) -> dict[str, Any]:
    """Record of an extension, which is started, or continued if unfinished.

    Raises:
        SystemExit: it was stopped.
    """
    if not (folder / "model.safetensors").exists():
        console = Console()
        outcome = resume_extension(folder, console) if latest_checkpoint(folder) else extend(settings, folder, console)
        if outcome.stopped_by is not None:
            raise SystemExit(128 + outcome.stopped_by)
    record = read_json(folder / "training.json", what="benchmark", remedy="remove the folder and begin anew")
    for entry in record["measured"].values():
        entry["by_position"] = binned(torch.tensor(entry["by_position"], dtype=torch.float64))
    return record


def draw(record: dict[str, Any], file: Path) -> None:
    """Write the picture of an extension: bits per byte by position, in every state of the model."""
    length = str(record["settings"]["context_length"])
    measured = {name: record["measured"][state] for state, name in STATES.items()}
    curves = {
        f"{name}, mean {found['bits_per_byte'][length]:.3f}": found["by_position"] for name, found in measured.items()
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    draw_positions(file, curves, record["own_length"])


def measure(given: LongContext) -> dict[str, Any]:
    """Train the short model, and extend it with the pattern and with dense attention."""
    folder = given.folder / digest("training")
    pretraining = pretrain(folder / "short", given)
    few: dict[str, Any] = {"eval_windows": 1, "final_eval_windows": 1} if given.tiny else {}
    records = {}
    for name, pattern in (("dilated", ""), ("dense", f"DilatedPattern([{given.length}], [1])")):
        settings = ExtensionSettings(
            model=str(folder / "short"),
            context_length=given.length,
            pattern=pattern,
            steps=given.steps,
            batch_tokens=given.length,
            learning_rate=5e-4,
            seed=given.seed,
            eval_steps=100,
            save_steps=100,
            **few,
        )
        records[name] = extended(settings, folder / name)
        for state, measured in records[name]["measured"].items():
            print(f"{name}, {state}: {measured['bits_per_byte']}", flush=True)
    draw(records["dilated"], given.picture)
    return {"pretraining": pretraining, "runs": records}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        tiny = {
            "folder": Path(scratch),
            "pretraining_steps": 1,
            "steps": 1,
            "short": 32,
            "length": 128,
            "picture": Path(scratch) / "context.png",
        }
        run(LongContext, measure, text=__doc__, name="long_context", group="training", tiny=tiny)
