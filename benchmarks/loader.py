"""The loader: tokens per second compared with the model's consumption, and memory while a token cache is built.

    python -m benchmarks.loader [--tiny] [--stream GB] [--output FILE]

Synthetic text, documents of 200 bytes to 50 kB, is stored in JSONL files in a temporary folder. A cache of all of it as
bytes is built, and one of a twentieth as tokens, each in a separate process, whose peak memory is compared with the
memory after a cache of a hundredth. Batches are then drawn from the caches, with each kind of packing in turn, and a
training step of the preset "cpu" is timed as well. Before anything is timed, the tokens of a cache must decode to the
text.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.training_step import Run
from dilated_attention_pytorch.benchmarks.results import module_command, origin
from dilated_attention_pytorch.models import LongNetForCausalLM
from dilated_attention_pytorch.training import PRESETS, TrainSettings
from dilated_attention_pytorch.training.corpus import Corpus
from dilated_attention_pytorch.training.data.run_data import RunData
from dilated_attention_pytorch.training.data.sources import Sources
from dilated_attention_pytorch.training.data.token_cache import cached_corpus, open_corpus
from dilated_attention_pytorch.training.data.tokenizer import (
    BYTES,
    Tokenizer,
    bytes_of,
    load_tokenizer,
    train_tokenizer,
)
from dilated_attention_pytorch.training.stages import Stages

from .options import parse, parser_of, write_results

VOCAB_SIZE = 4096
PACKINGS: dict[str, dict[str, Any]] = {
    "windows": {},
    "documents": {"packing": "documents"},
    "max_tokens": {"packing": "documents", "max_tokens": 8192},
}


def documents(num_bytes: int, seed: int) -> Iterator[str]:
    """Synthetic texts of about ``num_bytes`` in total."""
    draw = random.Random(seed)
    letters = "etaoinshrdlu"
    words = ["".join(draw.choices(letters, k=draw.randrange(1, 10))) for _ in range(20_000)]
    text = " ".join(draw.choices(words, k=1_000_000)).replace(" e ", ".\n")
    left = num_bytes
    while left > 0:
        length = min(50_000, max(200, int(draw.lognormvariate(7.5, 1.2))))
        start = draw.randrange(len(text) - length)
        yield text[start : start + length]
        left -= length


def write(path: Path, num_bytes: int, seed: int) -> Path:
    """Write a JSONL file of synthetic texts."""
    with path.open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in documents(num_bytes, seed))
    return path


def make_caches(small: Path, large: Path, tokenizer: Path | None, folder: Path) -> dict[str, Any]:
    """Build both caches in a separate process; returns time and memory of the large one."""
    loaded: Tokenizer = BYTES if tokenizer is None else load_tokenizer(tokenizer)
    cached_corpus(Sources([small], "text", None), loaded, folder, None)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _memory("VmHWM")
    start = time.perf_counter()
    cache = cached_corpus(Sources([large], "text", None), loaded, folder, None)
    seconds = time.perf_counter() - start
    after = _memory("VmHWM")
    figures = open_corpus(cache).figures
    assert figures is not None
    num_bytes = figures["training_bytes"] + figures["held_out_bytes"]
    return {
        "tokenizer": "bytes" if tokenizer is None else f"{VOCAB_SIZE} tokens",
        "bytes": num_bytes,
        "seconds": seconds,
        "bytes_per_second": num_bytes / seconds,
        "before_kb": before,
        "peak_kb": after,
        "growth_mb": (after - before) / 1024,
        "cache": str(cache),
    }


def _memory(name: str) -> int:
    """A value of /proc/self/status in kB."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def check(corpus: Corpus, tokenizer: Tokenizer, source: Path) -> None:
    """Raise SystemExit unless the first held-out documents of the cache are texts of the file."""
    starts = corpus.held_out.file_starts.tolist()
    first = corpus.held_out.tokens(0, [*starts[3:4], len(corpus.held_out)][0]).to(torch.int64)
    found = bytes_of(tokenizer, first).decode().split("\0")[1:]
    with source.open() as file:
        texts = {json.loads(line)["text"] for line in itertools.islice(file, 2000)}
    if not set(found) <= texts:
        raise SystemExit("not timed, because the tokens of the cache do not stand for the text")


def tokens_per_second(settings: TrainSettings, corpus: Corpus, tokenizer: Tokenizer, batches: int) -> float:
    """Rate of a loader in the training process, with batches of one sample: median of three parts after a warm-up."""
    settings = replace(settings, steps=4 * batches)
    data = RunData((corpus,), settings, tokenizer)
    stages = Stages.of(settings.stages, settings.model, context_length=settings.context_length, steps=settings.steps)
    loader = iter(DataLoader(data.training(stages, 1), 1, collate_fn=data.collate))
    paces = []
    for part in range(4):
        start = time.perf_counter()
        tokens = sum(batch["input_ids"].numel() for batch in itertools.islice(loader, batches))
        if part:
            paces.append(tokens / (time.perf_counter() - start))
    return statistics.median(paces)


def model_tokens_per_second(settings: TrainSettings, repeats: int) -> float:
    """Rate of optimizer steps with one window in float32, with this machine's default kernels, after a warm-up step."""
    torch.manual_seed(0)
    run = Run(LongNetForCausalLM.from_longnet_config(settings.model), settings, "auto", torch.float32)
    for _ in range(1 + repeats):
        run.step(torch.randint(settings.model.vocab_size, (1, settings.context_length)))
    return settings.context_length / statistics.median(run.seconds[1:])


def main() -> None:
    """Print one line per result; write all results with the machine and the command."""
    parser = parser_of(__doc__)
    parser.add_argument("--stream", type=float, default=1.0, help="gigabytes of made text; a folder for twice as much")
    arguments = parse(parser, "loader.json")
    size = 200_000 if arguments.tiny else int(arguments.stream * 1e9)
    batches, repeats = (2, 1) if arguments.tiny else (300, 5)
    here = origin(module_command())
    settings = replace(PRESETS["tiny" if arguments.tiny else "cpu"](), batch_size=1)
    with (
        tempfile.TemporaryDirectory() as name,
        ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool,
    ):
        folder = Path(name)
        small, large = write(folder / "small.jsonl", size // 100, 1), write(folder / "large.jsonl", size, 2)
        part = write(folder / "part.jsonl", size // 20, 3)
        vocab_size = 300 if arguments.tiny else VOCAB_SIZE
        train_tokenizer((text.encode() for text in documents(min(size, 2_000_000), 4)), vocab_size).save(folder)
        made, drawn = [], []
        for path, tokenizer in ((large, None), (part, folder)):
            process = functools.partial(make_caches, small, path, tokenizer, folder / "cache")
            made.append(pool.submit(process).result())
            now = made[-1]
            kind, pace = now["tokenizer"], f"{now['bytes_per_second'] / 1e6:.1f} MB/s"
            print(f"{kind:>12}: {now['bytes'] / 1e6:9,.0f} MB made in {now['seconds']:.1f} s, {pace}", flush=True)
            print(f"{kind:>12}: {now['growth_mb']:9.1f} MB of memory more than before", flush=True)
            loaded: Tokenizer = BYTES if tokenizer is None else load_tokenizer(tokenizer)
            corpus = open_corpus(Path(now.pop("cache")))
            check(corpus, loaded, path)
            for packing, changes in PACKINGS.items():
                told = replace(settings, **changes)
                rate = tokens_per_second(told, corpus, loaded, batches)
                drawn.append({"tokenizer": kind, "packing": packing, "tokens_per_second": rate})
                print(f"{kind:>12} {packing:>10}: {rate:12,.0f} tokens/s loaded", flush=True)
    model = model_tokens_per_second(settings, repeats)
    least = min(row["tokens_per_second"] for row in drawn)
    print(
        f"the model of the preset takes {model:,.0f} tokens/s; the slowest loader gives {least / model:,.0f} times that"
    )
    result = {
        "machine": here,
        "made": made,
        "loaded": drawn,
        "model_tokens_per_second": model,
        "least_over_model": least / model,
    }
    write_results(arguments.output, "training", result)
    print(f"written: {arguments.output}")


if __name__ == "__main__":
    main()
