"""Which pattern a pretrained model is best extended with: bits per byte before and after a short training.

    python -m benchmarks.long_context

A Llama of 4.3 million parameters is trained on Python source in windows of 1,024 tokens by transformers' Trainer, with
dense attention and the optimizer of ``train``. Then ``dilated-attention extend`` extends it to 4 and 8 times that
length: with the candidate that ``extend`` chooses, and with each of the others; with windows and scaled positions; with
dense attention; and with blocks of keys chosen by content in all layers. For the last, which no pattern describes, this
process computes the attention: a block of queries sees its own block of keys and those whose mean key has the highest
score with the mean query, as many pairs as a window.

A text is the source of one model of transformers, file after file; files repeat parts of each other. The same command
resumes a training where it stopped.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from dilated_attention_pytorch.benchmarks.results import write_json
from dilated_attention_pytorch.integrations import register
from dilated_attention_pytorch.integrations.transformers.layers import note_attended, note_own
from dilated_attention_pytorch.nn import AdaptiveBlockAttention
from dilated_attention_pytorch.ops import attend_blocks
from dilated_attention_pytorch.patterns import pattern_from_expression
from dilated_attention_pytorch.training import PRESETS, ExtensionSettings, extend
from dilated_attention_pytorch.training.data.corpus import read_corpus
from dilated_attention_pytorch.training.data.windows import EvaluationWindows, TrainingWindows, evenly_spread
from dilated_attention_pytorch.training.evaluation import binned, chart
from dilated_attention_pytorch.training.manifest import read_json
from dilated_attention_pytorch.training.optimizer import build_optimizer
from dilated_attention_pytorch.training.pattern_choice import dense, window
from dilated_attention_pytorch.training.pretrained import load_tokenizer, tokenized

from .measured_code import digest
from .study import Study, run
from .study_texts import folder_texts, prepare

BLOCK = 64
"""Keys of a block."""
CONTENT = "blocks by content"
DENSE = "dense in all layers"
_READ = {"what": "benchmark", "remedy": "remove the folder and begin anew"}


@dataclass(frozen=True, kw_only=True)
class LongContext(Study):
    """Settings."""

    folder: Path = Path("runs/long-context")
    """Where the runs are kept, a folder for each state of the code."""
    package: str = "transformers.models"
    """The package whose source is the text."""
    vocab_size: int = 4096
    """Tokens of the tokenizer."""
    width: int = 192
    """Width of the model."""
    layers: int = 8
    """Layers of the model."""
    pretraining_steps: int = 1200
    """Steps of the short model, of 4 windows."""
    steps: int = 60
    """Steps of an extension, of as many tokens as the longest window."""
    short: int = 1024
    """Length of the short model's windows, in tokens."""
    factors: tuple[int, ...] = (4, 8)
    """The lengths that it is extended to, in windows of the short model."""
    windows: int = 16
    """Held-out windows of the longest length."""
    seed: int = 0
    """Seed of all trainings."""
    picture: Path = Path("docs/pictures/long-context.png")
    """File of the picture."""


def content_stand_in(short: int) -> str:
    """The pattern that stands for blocks chosen by content in a configuration: a window of as many keys.

    In a text of one block there is nothing to choose, and it is computed.
    """
    return f"local_window({short - 2})"


@contextlib.contextmanager
def blocks_by_content(short: int) -> Iterator[None]:
    """Context in which layers with :func:`content_stand_in` see blocks that are chosen by content."""
    from dilated_attention_pytorch.integrations.transformers import registration

    ours = registration.dilated_attention_forward

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        rows = query.shape[2]
        pattern = module.config.dilated_attention["pattern"]  # type: ignore[union-attr, index]
        if pattern != content_stand_in(short) or rows <= BLOCK:
            return ours(module, query, key, value, *rest, **options)
        note_attended(module)
        note_own(module)
        heads, kv_heads, width = query.shape[1], key.shape[1], query.shape[3]
        # Untrained, its scorer ranks blocks by the score of the mean query with the mean key.
        chooser = AdaptiveBlockAttention(
            heads,
            width,
            num_kv_heads=kv_heads,
            blocks_per_query=max(2, short // BLOCK),
            block_size=BLOCK,
            query_block_size=BLOCK // 4,
            scorer_dim=width,
            device=query.device,
        )
        with torch.no_grad():
            chosen = chooser.select(query.transpose(1, 2), key.transpose(1, 2), is_causal=True)
        found = attend_blocks(
            query,
            key,
            value,
            chosen.blocks,
            torch.zeros_like(chosen.log_gates),
            block_size=BLOCK,
            query_block_size=BLOCK // 4,
            is_causal=True,
            heads_first=True,
        )
        return found.out.transpose(1, 2), None

    # Every set_pattern registers what the module holds, so this is what has to change.
    registration.dilated_attention_forward = attention
    try:
        register()
        yield
    finally:
        registration.dilated_attention_forward = ours
        register()


def pretrain(folder: Path, texts: Path, tokenizer: Path, given: LongContext) -> dict[str, Any]:
    """Train the short model unless ``folder`` has it; returns its steps and held-out bits per token."""
    from torch.utils.data import Subset
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
    from transformers.trainer_utils import get_last_checkpoint

    said = folder / "pretraining.json"
    if said.exists():
        return read_json(said, **_READ)
    steps, seed, length, unfinished = given.pretraining_steps, given.seed, given.short, folder / "run"
    set_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=given.vocab_size,
            hidden_size=given.width,
            intermediate_size=given.width // 3 * 8,
            num_hidden_layers=given.layers,
            num_attention_heads=given.width // 32,
            num_key_value_heads=given.width // 32,
            max_position_embeddings=length,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=True,
        )
    )
    corpus = read_corpus([texts])
    model.config.save_pretrained(folder)
    words = load_tokenizer("the tokenizer", str(tokenizer), model.config)
    assert words is not None
    words.save_pretrained(folder)
    held_out = EvaluationWindows(tokenized(corpus.held_out, words), length, 64)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(unfinished),
            max_steps=steps,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            lr_scheduler_type="linear",
            warmup_steps=steps // 30,
            use_cpu=True,
            seed=seed,
            logging_steps=max(1, steps // 10),
            save_steps=max(1, steps // 20),
            save_total_limit=1,
            prediction_loss_only=True,
            report_to=[],
            train_sampling_strategy="sequential",
            dataloader_pin_memory=False,
        ),
        train_dataset=TrainingWindows(
            tokenized(corpus.training, words), length, 4 * steps, seed=seed, file_start_fraction=0.0
        ),
        optimizers=(build_optimizer(model, PRESETS["hybrid"]()), None),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(unfinished) if unfinished.exists() else None)
    nats = trainer.evaluate(Subset(held_out, evenly_spread(len(held_out), 2)) if given.tiny else held_out)["eval_loss"]
    model.save_pretrained(folder)
    record = {
        "steps": steps,
        "seed": seed,
        "parameters": model.num_parameters(),
        "tokens_per_step": 4 * length,
        "bits_per_token": nats / math.log(2),
    }
    write_json(said, record)
    return record


def extended(settings: ExtensionSettings, folder: Path) -> dict[str, Any]:
    """Record of an extension, which is started, or continued if unfinished.

    Raises:
        SystemExit: it was stopped.
    """
    outcome = extend(settings, folder, Console(), may_resume=True)
    if outcome.stopped_by is not None:
        raise SystemExit(128 + outcome.stopped_by)
    record = read_json(folder / "training.json", **_READ)
    for entry in record["measured"].values():
        entry["by_position"] = binned(torch.tensor(entry["by_position"], dtype=torch.float64))
    return record


def fixed_patterns(given: LongContext, length: int) -> dict[str, tuple[str, ...]]:
    """Patterns that are not among the candidates of ``extend``, by name; their positions are scaled."""
    return {
        "windows and first tokens, positions scaled": (window(given.short),),
        DENSE: (dense(length),),
        CONTENT: (content_stand_in(given.short),),
    }


def density(patterns: Sequence[str], length: int, num_heads: int) -> float:
    """Fraction of the pairs of dense attention, over the layers."""
    found = [pattern_from_expression(one) for one in patterns]
    return mean(one.density(length, num_kv_heads=num_heads, is_causal=True) for one in found)


def beyond_dense(records: dict[str, Any]) -> dict[str, tuple[list[float], list[float]]]:
    """Positions, and bits per byte after training less those of dense attention in all layers, by attention."""
    curves = {name: record["measured"]["trained"]["by_position"] for name, record in records.items()}
    _, dense_bits = curves.pop(DENSE)
    return {
        name: (positions, [one - other for one, other in zip(bits, dense_bits, strict=True)])
        for name, (positions, bits) in curves.items()
    }


def draw(records: dict[str, Any], file: Path) -> None:
    """Write the picture: :func:`beyond_dense` from position 16 on, before which a range has too few tokens."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with chart(file, (6.4, 5.4)) as figure:
        axes = figure.subplots()
        for name, (positions, bits) in beyond_dense(records).items():
            shown = [(at, value) for at, value in zip(positions, bits, strict=True) if at >= 16]
            axes.plot(*zip(*shown, strict=True), marker="o", markersize=3, label=name)
        axes.axhline(0, color="black", linewidth=1, label=DENSE)
        own_length = next(iter(records.values()))["own_length"]
        axes.axvline(own_length, color="black", linestyle="--", linewidth=1, label=f"own length, {own_length:,}")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("position in the text, tokens")
        axes.set_ylabel("bits per byte, less those of dense attention")
        axes.grid(alpha=0.3)
        figure.legend(loc="outside lower center", ncols=1)


def measure(given: LongContext) -> dict[str, Any]:
    """Train the short model, and extend it with every pattern to every length."""
    folder = given.folder / digest("training")
    texts, tokenizer = prepare(given.folder / "text", folder_texts(given.package), given.vocab_size)
    pretraining = pretrain(folder / "short", texts, tokenizer, given)
    longest = given.short * max(given.factors)
    records: dict[int, dict[str, Any]] = {}
    for length in sorted(given.short * factor for factor in given.factors):
        open_settings = ExtensionSettings(
            model=str(folder / "short"),
            data=(texts,),
            context_length=length,
            steps=given.steps,
            batch_tokens=longest,
            learning_rate=5e-4,
            seed=given.seed,
            precision="float32",
            eval_steps=given.steps,
            eval_windows=1,
            save_steps=max(1, given.steps // 4),
            final_eval_windows=given.windows * longest // length,
        )
        chosen = extended(open_settings, folder / f"{length}-chosen")
        found = records[length] = {chosen["candidates"][0]["name"]: chosen}
        todo = {one["name"]: (one["patterns"], one["rotary"]) for one in chosen["candidates"][1:]}
        fixed = {name: (patterns, "yarn") for name, patterns in fixed_patterns(given, length).items()}
        for name, (patterns, rotary) in {**todo, **fixed}.items():
            is_content = name == CONTENT
            with blocks_by_content(given.short) if is_content else contextlib.nullcontext():
                own = folder / f"{length}-{name.replace(', ', '-').replace(' ', '-')}"
                found[name] = extended(open_settings.with_patterns(patterns, rotary), own)
        for name, record in found.items():
            settings = ExtensionSettings.from_dict(record["settings"])
            record["settings"]["data"] = [str(texts)]  # as given; a run resolves it to a folder of its machine
            record["density"] = density(settings.patterns, length, given.width // 32)
            for state, measured in record["measured"].items():
                print(f"{length}, {name}, {state}: {measured['bits_per_byte']}", flush=True)
    draw(records[longest], given.picture)
    return {"pretraining": pretraining, "runs": records}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        tiny = {
            "folder": Path(scratch),
            "package": "torch.nn",
            "vocab_size": 512,
            "width": 64,
            "layers": 2,
            "pretraining_steps": 1,
            "steps": 2,
            "short": 128,
            "factors": (2,),
            "windows": 1,
            "picture": Path(scratch) / "context.png",
        }
        run(LongContext, measure, text=__doc__, name="long_context", group="training", tiny=tiny)
