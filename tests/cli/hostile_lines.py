"""Draws hostile command lines and runs them: each must end in a sentence, within its time, and without a signal.

A line is a command that would work, with one to three flags of it set to a hostile value: huge, negative, not finite,
empty, of another type, a path that is no file, a pattern of thousands of terms.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.cli.help_page import descriptions
from support.processes import TESTS, environment

BASES = {
    "train": "train --preset tiny --device cpu --data texts --output new --steps 1 --sample-length 2",
    "extend": "extend --model llama --data texts --output new --context-length 64 --steps 1 --eval-windows 1",
    "generate": "generate run --device cpu --prompt x --max-new-tokens 3",
    "embed": "embed slides --checkpoint slide_encoder.pth --output new",
    "finetune": "finetune slides labels.csv --checkpoint slide_encoder.pth --output new --layers 1 --epochs 1",
    "eval": "eval run --device cpu --context-lengths 16 --windows 1 --recall-texts 0 --output-file new.json",
    "report": "report run --output-file new.html",
    "diagnose": "diagnose run",
    "tokenizer": "tokenizer texts --vocab-size 300 --output-file new.json",
    "bench": "bench --dry-run --shapes blocks --sequence-lengths 64 --dtypes float32 --output new",
    "profile": "profile run --steps 1 --output new",
    "tune": "tune --dry-run --device cpu --output new",
    "plan": "plan --preset tiny --hardware H200",
    "show": "show local_window(3) --sequence-length 64",
    "build": "build",
    "info": "info",
}
NUMBERS = (
    *(
        "0",
        "-1",
        "-0",
        "1",
        "3",
        "7",
        "2147483648",
        "4294967296",
        "1000000000",
        "1000000000000000",
        str(2**63),
        str(10**30),
    ),
    *("nan", "inf", "-inf", "1e300", "-1e308", "1e-320", "1e18", "0.5", "1" * 5000, "0x10", "1_0", " 5", "five", ""),
)
TEXTS = (
    *(
        "",
        " ",
        "auto",
        "[red]x[/red]",
        "[/]",
        "\udcff",
        "é" * 300,
        "x" * 100_000,
        "a\nb",
        "--",
        "-x",
        "%s%n",
        "{}",
        "$(id)",
    ),
    *(
        "../../x",
        "/",
        ".",
        "..",
        "/dev/null",
        "/dev/zero",
        "/dev/full",
        "/proc/self/mem",
        "/proc/self/fd/0",
        "nothing/x",
    ),
    *("texts", "notes.txt", "run", "llama", "slides", "slide_encoder.pth", "y" * 300, "~", "http://x", "hf://x", "a:b"),
)
PATTERNS = (
    " + ".join(["local_window(1)"] * 2000),
    "(" * 300 + "local_window(1)" + ")" * 300,
    "per_head([" + ", ".join(["local_window(1)"] * 3000) + "])",
    f"DilatedPattern({list(range(1, 2001))}, {[1] * 2000})",
    "local_window(2147483647)",
    "local_window(2147483648)",
    "hierarchical(2, levels=30)",
    "hierarchical(1, levels=1000000000000)",
    "random_blocks(0.5, block_size=1)",
    "random_blocks(0.01, seed=-1)",
    "strided_blocks(1000000000, block_size=1)",
    "global_tokens(1000000000)",
    "DilatedPattern([4294967296], [1], segment_shift=3)",
    "DilatedPattern([8], [0])",
    "SegmentedPattern([[0, 1, 2, 3]], [1])",
    "__import__('os')",
    "local_window(True)",
    "local_window(1e300)",
    "local_window(" + "9" * 5000 + ")",
)


def drawn_line(draw: random.Random) -> list[str]:
    """A hostile command line."""
    name = draw.choice(list(BASES))
    words = BASES[name].split()
    for _ in range(draw.randint(1, 3)):
        fields = [flag["name"] for flag in descriptions()[name]["flags"]]
        if not fields or draw.random() < 0.1:
            place = draw.randrange(1, len(words) + 1)
            words[place:place] = [draw.choice((*NUMBERS, *TEXTS, *PATTERNS, "--nothing", "--help"))]
            continue
        flag = draw.choice(fields)
        if draw.random() < 0.25 and len(words) > 1:  # a flag or word of the line itself
            flag = draw.choice(words[1:])
        values = draw.choice((NUMBERS, NUMBERS, TEXTS, PATTERNS if "pattern" in flag or name == "show" else TEXTS))
        value = [draw.choice(values) for _ in range(draw.choice((1, 1, 1, 1, 2, 400)))]
        if flag in words and flag.startswith("--"):
            place = words.index(flag)
            words[place : place + 2] = [flag, *value]
        elif flag.startswith("--"):
            words += [flag, *value]
        else:
            words[words.index(flag)] = value[0]
    return words


def make_world(world: Path) -> None:
    """A run, texts, a model and slides that the lines name."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from dilated_attention_pytorch.training import train
    from slides import made_slides
    from training.runs import quiet, tiny_settings, write_texts

    write_texts(world / "texts")
    (world / "notes.txt").write_text("a text\n" * 99)
    train(tiny_settings(world / "texts", steps=2), world / "run", quiet())
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=32, **sizes)).save_pretrained(world / "llama")
    made_slides.write_slides(world / "slides", [5, 3, 4, 6, 5, 4])
    lines = [f"slide{number},{number % 2}" for number in range(6)]
    (world / "labels.csv").write_text("\n".join(["slide,label", *lines]))
    made_slides.checkpoint(world)


def outcome(result: dict[str, Any]) -> str:
    """``ok``, or what is wrong with the end of a command."""
    if result["seconds"] > result["limit"]:
        return "no end"
    if result["code"] < 0:
        return f"signal {-result['code']}"
    if "Traceback (most recent call last)" in result["output"]:
        return "traceback"
    if result["code"] == 2 and not result["output"].strip():
        return "no sentence"
    return "ok" if result["code"] in (0, 1, 2, 130) else f"exit code {result['code']}"


def run_lines(lines: list[list[str]], world: Path, folder: Path, *, seconds: float) -> list[dict[str, Any]]:
    """Run command lines, each in a folder with links to the world; results as of run_commands.py."""
    jobs = []
    for number, words in enumerate(lines):
        own = folder / str(number)
        shutil.copytree(world, own)
        cache = {"XDG_CACHE_HOME": str(own / "cache"), "HF_HUB_OFFLINE": "1", "DILATED_ATTENTION_NO_BUILD": "1"}
        words = ["-m", "dilated_attention_pytorch", *words]
        jobs.append({"words": words, "environment": cache, "folder": str(own), "seconds": seconds})
    script = str(TESTS / "support" / "run_commands.py")
    done = subprocess.run(
        [sys.executable, script], input=json.dumps(jobs), capture_output=True, text=True, env=environment(), check=True
    )
    shutil.rmtree(folder)
    return [{**result, "limit": seconds} for result in json.loads(done.stdout)]
