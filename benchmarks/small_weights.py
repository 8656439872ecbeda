"""A trained run with weights stored in 8 bits: bits per byte, bytes of weights, tokens per second.

    python -m benchmarks.small_weights RUN [--windows 16] [--tokens 300] [--output FILE]

RUN is a run folder of `dilated-attention train`. Every kind of weights is evaluated on the same held-out windows and
generates from the same prompt, with its cache, in float32 and in a single process.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console

from dilated_attention_pytorch.benchmarks.results import module_command, origin
from dilated_attention_pytorch.machine import set_threads
from dilated_attention_pytorch.training.model_evaluation import EvalSettings, evaluate_model
from dilated_attention_pytorch.training.small_weights import Weights, make_small
from dilated_attention_pytorch.training.trained_model import load_model, model_folder

from .options import parse, parser_of, write_results

KINDS: tuple[Weights, ...] = get_args(Weights)
_PROMPT = 256
_REPEATS = 3


@torch.inference_mode()
def tokens_per_second(run: Path, kind: Weights, tokens: int) -> float:
    """Median rate of a few greedy generations, after a warm-up."""
    model = load_model(model_folder(run)[0]).eval()
    make_small(model, kind)
    torch.manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (1, _PROMPT))
    seconds = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        seconds.append(time.perf_counter() - start)
    return tokens / statistics.median(seconds[1:])


def measure(run: Path, kind: Weights, settings: EvalSettings, tokens: int) -> dict[str, Any]:
    """Evaluate one kind of weights."""
    with tempfile.TemporaryDirectory() as folder:
        told = dataclasses.replace(settings, weights=kind)
        file = evaluate_model(str(run), told, Path(folder) / "eval.json", Console(quiet=True))
        found = json.loads(file.read_text())
    return {
        "weights": kind,
        "bits_per_byte": found["bits_per_byte"],
        "weight_bytes": found["weight_bytes"],
        "tokens_per_second": round(tokens_per_second(run, kind, tokens), 1),
    }


def main() -> None:
    """Measure and write."""
    parser = parser_of(__doc__)
    parser.add_argument("run", type=Path, help="run folder of `dilated-attention train`")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=1)
    given = parse(parser, "small_weights.json")
    if given.tiny:
        given.windows, given.tokens, given.length = 1, 4, 64
    set_threads(given.threads)
    settings = EvalSettings(
        lengths=(given.length,),
        windows=given.windows,
        recall_texts=0,
        precision="float32",
        device="cpu",
        threads=given.threads,
    )
    here = origin(module_command().replace(str(given.run), "RUN"))
    results = [measure(given.run, kind, settings, given.tokens) for kind in (KINDS[:1] if given.tiny else KINDS)]
    for result in results:
        print(result)
    record = json.loads((given.run / "training.json").read_text())["settings"]
    write_results(given.output, "models", {"machine": here, "run": record, "results": results})
    print(f"written: {given.output}")


if __name__ == "__main__":
    main()
