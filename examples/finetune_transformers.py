"""Train a Llama of transformers under a pattern, by transformers' Trainer, on packed documents.

python examples/finetune_transformers.py                       # a tiny Llama, random weights, bytes as tokens
python examples/finetune_transformers.py --model FOLDER --length 8192 --learning-rate 1e-5 --output tuned

The data are the top-level blocks of Python's standard library. Each is a document: `DataCollatorWithFlattening` packs a
batch of them into one row, and no token sees another document. Needs the extra `train`.
"""

from __future__ import annotations

import argparse
import random
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from dilated_attention_pytorch import DilatedPattern, local_window, set_pattern


def model_and_documents(
    folder: str | None, length: int, number: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None, list[list[int]]]:
    """The model, its tokenizer, and the tokens of so many documents, `length` at most of each."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [text for file in files for text in file.read_text("utf-8").split("\n\n\n") if len(text) > 100]
    texts = random.Random(0).sample(texts, min(number, len(texts)))
    if folder is None:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "initializer_range": 0.1}
        config = LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, use_cache=False, **sizes)
        return LlamaForCausalLM(config), None, [list(text.encode()[:length]) for text in texts]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    documents = tokenizer(texts, truncation=True, max_length=length)["input_ids"]
    return AutoModelForCausalLM.from_pretrained(folder, use_cache=False), tokenizer, documents


def main(arguments: Sequence[str] | None = None) -> float:
    """Train; returns the loss on documents that were held out, in nats a token."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help="folder of a checkpoint with its tokenizer; default: a tiny Llama with random weights"
    )
    parser.add_argument("--length", type=int, default=128, help="most tokens of a document")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps, of 16 documents each")
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="use 1e-5 for a checkpoint")
    parser.add_argument("--output", help="folder that the trained model is saved to")
    chosen = parser.parse_args(arguments)
    for name in ("length", "steps"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(chosen, name)}")
    if chosen.output and Path(chosen.output).is_dir() and any(Path(chosen.output).iterdir()):
        parser.error(f"--output {chosen.output} has files already: name a new folder")

    torch.manual_seed(0)
    model, tokenizer, documents = model_and_documents(chosen.model, chosen.length, 64 + 16 * chosen.steps)
    # Near tokens all, those of the whole document at every 8th position; a pattern of one group, ([length], [1]),
    # would give what the model gave before.
    set_pattern(model, local_window(63) + DilatedPattern([chosen.length], [8]))

    examples = [{"input_ids": document} for document in documents]
    with tempfile.TemporaryDirectory() as scratch:
        settings = TrainingArguments(
            output_dir=chosen.output or scratch,
            max_steps=chosen.steps,
            per_device_train_batch_size=16,
            per_device_eval_batch_size=64,
            learning_rate=chosen.learning_rate,
            logging_steps=20,
            disable_tqdm=True,
            save_strategy="no",
            report_to="none",
            prediction_loss_only=True,
            dataloader_pin_memory=torch.accelerator.is_available(),
        )
        trainer = Trainer(
            model,
            settings,
            data_collator=DataCollatorWithFlattening(return_flash_attn_kwargs=True),
            train_dataset=examples[64:],
            eval_dataset=examples[:64],
            processing_class=tokenizer,  # saved with the model
        )
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        if chosen.output:
            trainer.save_model()
    print(f"documents that were held out: {loss:.3f} nats a token")
    return loss


if __name__ == "__main__":
    main()
