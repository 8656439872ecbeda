"""The long-context recipe on a small model: bits per byte before, after replacement, and after further training.

    python -m benchmarks.long_context

A Llama of some million parameters is trained on the bytes of Python's standard library in windows of 1,024, like an
existing model, by transformers' Trainer with dense attention. Then ``dilated-attention extend`` extends it to 8,192:
once with the pattern, and once with dense attention and the same training, which shows the cost of the pattern itself.
The same command resumes all runs where they stopped.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dilated_attention_pytorch.benchmarks.results import module_command, origin, write_json
from dilated_attention_pytorch.training import ExtensionSettings, extend, resume_extension
from dilated_attention_pytorch.training.checkpoint import latest_checkpoint
from dilated_attention_pytorch.training.corpus import read_corpus
from dilated_attention_pytorch.training.manifest import read_json
from dilated_attention_pytorch.training.windows import EvaluationWindows, TrainingWindows, evenly_spread

from .measured_code import digest
from .options import parse, parser_of, write_results

SHORT, LONG = 1024, 8192
KV_HEADS = 4
PICTURE = Path("docs/pictures/long-context.png")


def pretrain(folder: Path, steps: int, seed: int, length: int, windows: int | None) -> dict[str, Any]:
    """Train the short model unless ``folder`` has it; returns its number of steps and held-out bits per byte.

    The bits per byte are those of so many held-out windows, None for all.
    """
    from torch.utils.data import Subset
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

    said = folder / "pretraining.json"
    if said.exists():
        record = read_json(said, what="benchmark", remedy="remove the folder and begin anew")
        _refuse_unless_equal(folder, {name: record[name] for name in ("steps", "seed")}, {"steps": steps, "seed": seed})
        return record
    set_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=KV_HEADS,
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
            eval_strategy="steps",
            eval_steps=max(1, steps // 4),
            save_steps=max(1, steps // 4),
            save_total_limit=1,
            prediction_loss_only=True,
            report_to=[],
            train_sampling_strategy="sequential",
            dataloader_pin_memory=False,
        ),
        train_dataset=TrainingWindows(corpus.training, length, 8 * steps, seed=seed, file_start_fraction=0.0),
        eval_dataset=Subset(held_out, evenly_spread(len(held_out), 64)),
    )
    trainer.train(resume_from_checkpoint=(folder / "run").is_dir() and any((folder / "run").glob("checkpoint-*")))
    judged = held_out if windows is None else Subset(held_out, evenly_spread(len(held_out), windows))
    bits = trainer.evaluate(judged)["eval_loss"] / math.log(2)
    model.save_pretrained(folder)
    record = {"steps": steps, "seed": seed, "bytes_per_step": 8 * length, "bits_per_byte": bits}
    write_json(said, record)
    return record


def _refuse_unless_equal(folder: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    if found != wanted:
        differing = {name: (found.get(name), value) for name, value in wanted.items() if found.get(name) != value}
        sys.exit(f"{folder} holds a run with other settings (there, asked for: {differing}): name another --folder")


def extended(settings: ExtensionSettings, folder: Path, console: Console, short: int) -> dict[str, Any]:
    """Record of an extension run, which is started, or continued if unfinished."""
    if (folder / "training.json").exists():
        record = read_json(folder / "training.json", what="benchmark", remedy="remove the folder and begin anew")
        asked = settings.complete(short, KV_HEADS).to_dict()
        chosen = ("precision", "device", "threads")  # chosen by the machine if the settings leave them open
        _refuse_unless_equal(
            folder, *({k: v for k, v in s.items() if k not in chosen} for s in (record["settings"], asked))
        )
    if not (folder / "model.safetensors").exists():
        outcome = resume_extension(folder, console) if latest_checkpoint(folder) else extend(settings, folder, console)
        if outcome.stopped_by is not None:
            sys.exit(128 + outcome.stopped_by)
    return read_json(folder / "training.json", what="benchmark", remedy="remove the folder and begin anew")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/long-context"),
        help="where the runs are kept, a folder for each state of the code",
    )
    parser.add_argument("--pretraining-steps", type=int, default=600, help="steps of 8,192 bytes of the short model")
    parser.add_argument("--steps", type=int, default=150, help="steps of 8,192 bytes of the extension")
    parser.add_argument("--pattern", default="", help="see dilated-attention extend --help")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parse(parser, "long_context.json")
    if arguments.tiny:
        arguments.folder = arguments.output.parent / "long-context"
        arguments.pretraining_steps, arguments.steps = 1, 1
    short_length, length = (32, 128) if arguments.tiny else (SHORT, LONG)
    few: dict[str, Any] = {"eval_windows": 1, "final_eval_windows": 1} if arguments.tiny else {}
    arguments.folder /= digest("training")
    here = origin(module_command())
    console = Console()
    short = arguments.folder / "short"
    pretraining = pretrain(
        short, arguments.pretraining_steps, arguments.seed, short_length, windows=2 if arguments.tiny else None
    )
    patterns = {"dilated": arguments.pattern, "dense": f"DilatedPattern([{length}], [1])"}
    records = {}
    for name, pattern in patterns.items():
        console.rule(name)
        settings = ExtensionSettings(
            model=str(short),
            length=length,
            pattern=pattern,
            steps=arguments.steps,
            batch_tokens=length,
            learning_rate=5e-4,
            seed=arguments.seed,
            eval_steps=100,
            save_steps=100,
            **few,
        )
        records[name] = extended(settings, arguments.folder / name, console, short_length)
    table = Table("", "attention", *(f"bits per byte reading {size:,}" for size in (short_length, length)))
    for state in ("before", "replaced", "trained"):
        for name, record in records.items():
            if state == "before" and name == "dense":
                continue
            bits = record["measured"][state]["bits_per_byte"]
            attention = "dense" if state == "before" else record["settings"]["pattern"]
            table.add_row(state, attention, *(f"{bits[str(size)]:.3f}" for size in (short_length, length)))
    console.print(table)
    for record in records.values():
        for entry in record["measured"].values():
            del entry["by_position"]
    write_results(arguments.output, "training", {"machine": here, "pretraining": pretraining, "runs": records})
    picture = arguments.output.with_suffix(".png") if arguments.tiny else PICTURE
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_bytes((arguments.folder / "dilated" / "context.png").read_bytes())


if __name__ == "__main__":
    main()
