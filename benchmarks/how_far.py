"""How far does it go: models and lengths planned on devices, and LongNet's own figures next to ours.

    python -m benchmarks.how_far          # plan, then write the file of results, the page of the docs and its picture
    python -m benchmarks.how_far --page   # the page and the picture from the file of results

Runs only the planner: memory from steps on fake tensors, operations from exact counts of the patterns, rates from data
sheets.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dilated_attention_pytorch import DilatedPattern
from dilated_attention_pytorch.benchmarks.results import module_command, origin
from dilated_attention_pytorch.capacity.run import computed_flops
from dilated_attention_pytorch.data_sheets import link_of, sheet_of
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.output import write_text
from dilated_attention_pytorch.planning.layout import Shards
from dilated_attention_pytorch.planning.shards import ShardedCall
from dilated_attention_pytorch.planning.traffic import gathered_rows, sent_rows
from dilated_attention_pytorch.training import PRESETS, TrainSettings
from dilated_attention_pytorch.training.footprint import Footprint, least_footprint

from .how_far_page import PAGE, PICTURE, draw, page
from .options import parse, parser_of, write_results
from .parallel import paper_up_to

FILE = Path(__file__).parent / "results" / "how_far.json"
MODELS = {"1B": (2048, 18, 32), "70B": (8192, 86, 64), "1T": (25600, 128, 200)}
"""Width, layers and heads; the vocabulary has 50,304 tokens, the feed-forward four times the width."""
TOKENS = (1 << 20, 1 << 24, 100_000_000, 1 << 30)
DEVICE, NODE, NODE_LINK, CLUSTER_LINK = "H200", 8, "NVLink 4", "InfiniBand NDR"
_RANKS = (1, 2, 8, 64, 1024, 8192)
_ROW_BYTES = 2 * 768 * 2
"""Bytes of key and value of a row, 12 heads of 64 in bfloat16: they decide whether messages are passed on."""
_ROWS_OF_FIGURE_5 = 1 << 17


def settings_of(model: str, tokens: int) -> TrainSettings:
    """A run with one text over all devices: sharded weights, recomputed blocks, moments and products in bfloat16."""
    width, layers, heads = MODELS[model]
    groups = paper_up_to(max(tokens, 32768)).groups
    config = LongNetConfig(
        vocab_size=50_304,
        embed_dim=width,
        num_layers=layers,
        num_heads=heads,
        activation="gelu",
        segment_lengths=tuple(group.segment_length for group in groups),
        dilation_rates=tuple(group.dilation_rate for group in groups),
        gradient_checkpointing=True,
    )
    return dataclasses.replace(
        PRESETS["tiny"](),
        model=config,
        tokenizer=Path("tokens"),
        context_length=tokens,
        batch_size=1,
        precision="bfloat16",
        optimizer="adamw-bf16",
    )


def line_of(model: str, tokens: int) -> dict[str, Any]:
    """The fewest devices (a node times a power of two), and the lower bounds of a step on them."""
    sheet, settings = sheet_of(DEVICE), settings_of(model, tokens)
    devices = NODE
    while (memory := memory_of(settings, devices)).total >= sheet.memory_bytes:
        devices *= 2
    link = link_of(NODE_LINK if devices == NODE else CLUSTER_LINK).bytes_per_second
    seconds = {
        "computation": computed_flops(settings) / devices / sheet.flops["bfloat16"],
        "weights": weight_bytes(settings, devices) / link,
        "keys and values": key_bytes(settings, devices) / link,
    }
    bound = max(seconds, key=lambda name: seconds[name])
    return {
        "model": model,
        "weights": settings.model.num_parameters,
        "tokens": tokens,
        "devices": devices,
        "memory": dataclasses.asdict(memory),
        "total": memory.total,
        "seconds": seconds,
        "least_seconds": seconds[bound],
        "bound": bound,
    }


def memory_of(settings: TrainSettings, devices: int) -> Footprint:
    """Memory of each of ``devices`` that share one text and split the weights, without the gathered block."""
    spread = dataclasses.replace(settings, data_parallel="fsdp", context_parallel=devices, strategy="ring")
    return least_footprint(spread, devices)


def weight_bytes(settings: TrainSettings, devices: int) -> float:
    """Bytes of sharded float32 weights that a device receives in a step: two gathers, one reduction of gradients."""
    return 3 * 4 * settings.model.num_parameters * (devices - 1) / devices


def key_bytes(settings: TrainSettings, devices: int) -> float:
    """Bytes of keys and values that the device with the last rows receives in a step: ``(w - l) / r`` rows per group.

    They are received in the forward pass and again in recomputation, and as many bytes of gradients are sent.
    """
    model, rows = settings.model, settings.context_length / devices
    others = sum(
        max(0.0, min(w, settings.context_length) - rows) / r
        for w, r in zip(model.segment_lengths, model.dilation_rates, strict=True)
    )
    return 3 * model.num_layers * others * 2 * model.embed_dim * 2


def longnet() -> dict[str, Any]:
    """LongNet's own figures: operations (equations 16 to 18), communication and latency (section 3), training."""
    width, alpha = 2048, 2
    operations = []
    for tokens in (8192, 32768, *TOKENS):
        count = 1 + int(math.log2(max(1, tokens // width)))
        pattern = DilatedPattern([width * alpha**i for i in range(count)], [alpha**i for i in range(count)])
        pairs = pattern.num_pairs(tokens)
        paper = 2 * tokens * sum(width * alpha**i / alpha ** (2 * i) for i in range(count))
        bound = 2 * alpha / (alpha - 1) * width * tokens
        causal = pattern.num_pairs(tokens, is_causal=True)
        operations.append({"tokens": tokens, "pairs": pairs, "causal": causal, "paper": paper, "bound": bound})
    traffic = []
    for ranks in _RANKS:
        rows = _ROWS_OF_FIGURE_5
        tokens = rows * ranks
        of_three = DilatedPattern(
            list(dict.fromkeys([width, rows, tokens])),
            list(dict.fromkeys([1, rows // width, tokens // width])),
        )
        line: dict[str, Any] = {"ranks": ranks, "tokens": tokens}
        for name, pattern in (("three groups", of_three), ("all groups", paper_up_to(tokens))):
            call, shards = ShardedCall(pattern, 1, False, 0, None), Shards(tokens, ranks, "contiguous")
            gathered = gathered_rows(call, shards, _ROW_BYTES)
            line[name] = {
                "pairs": pattern.num_pairs(tokens) / tokens,
                "sent": int(gathered.given.max()),
                "sent_by_ring": int(sent_rows(call, shards).given.max()),
                "messages": int(gathered.messages.max()),
            }
        traffic.append(line)
    config = LongNetConfig(
        vocab_size=100_288,
        embed_dim=768,
        num_layers=12,
        num_heads=12,
        activation="gelu",
        segment_lengths=(2048, 4096, 8192, 16384, 32768),
        dilation_rates=(1, 2, 4, 6, 12),
    )
    settings = dataclasses.replace(
        PRESETS["tiny"](), model=config, tokenizer=Path("tokens"), context_length=32768, batch_size=16
    )
    flops, steps = computed_flops(settings), 300_000
    rate = sheet_of(DEVICE).flops["bfloat16"]
    return {
        "operations": operations,
        "traffic": traffic,
        "rows_of_a_rank": _ROWS_OF_FIGURE_5,
        "training": {
            "weights": config.num_parameters,
            "tokens": 16 * 32768,
            "steps": steps,
            "flops": flops * steps,
            "device_days": flops * steps / rate / 86400,
        },
    }


def plan(models: Sequence[str], lengths: Sequence[int]) -> dict[str, Any]:
    """Plans for all models and lengths."""
    lines = []
    for model in models:
        for tokens in lengths:
            line = line_of(model, tokens)
            lines.append(line)
            print(
                f"{model}, {tokens:,} tokens: {line['devices']:,} x {DEVICE}, {line['total'] / 1e9:.1f} GB each, a "
                f"step at least {line['least_seconds']:.3g} s, bounded by {line['bound']}",
                flush=True,
            )
    return {
        "device": DEVICE,
        "node": NODE,
        "node_link": NODE_LINK,
        "cluster_link": CLUSTER_LINK,
        "lines": lines,
        "memory_bytes": sheet_of(DEVICE).memory_bytes,
    }


def main() -> None:
    """The command."""
    parser = parser_of(__doc__)
    parser.add_argument("--page", action="store_true", help="plan nothing, write the page and the picture")
    arguments = parse(parser, FILE.name)
    if not arguments.page:
        planned = plan(list(MODELS)[:1], TOKENS[:1]) if arguments.tiny else plan(list(MODELS), TOKENS)
        write_results(
            arguments.output,
            "planner",
            {"machine": origin(module_command()), "longnet": None if arguments.tiny else longnet(), "planned": planned},
        )
        print(f"written: {arguments.output}")
    if arguments.tiny:
        return
    results = json.loads(arguments.output.read_text(encoding="utf-8"))
    write_text(PAGE, page(results))
    draw(results, PICTURE)
    print(f"written: {PAGE}, {PICTURE}")


if __name__ == "__main__":
    main()
