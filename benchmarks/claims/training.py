"""Claims about training steps, decided by the planner: what a step has alive and computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.capacity import longest_context
from dilated_attention_pytorch.capacity.run import computed_flops
from dilated_attention_pytorch.data_sheets import sheet_of
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.patterns.pattern import MOST_POSITIONS
from dilated_attention_pytorch.training import PRESETS, TrainSettings
from dilated_attention_pytorch.training.footprint import Footprint, footprint
from dilated_attention_pytorch.training.preflight import check_processes

from .claim import CONFIRMED, NEAR, NOT_TESTABLE, REFUTED, Finding, decided, is_near, model_sizes, size

VOCABULARY = 50_304
"""GPT-2's 50,257 tokens, rounded up to a multiple of 64."""
DEVICE_BYTES = int(80e9)
MONTH = 365.25 * 24 * 3600 / 12
_MOST_DOUBLINGS = 12

_RUNS: dict[str, tuple[bool, dict[str, Any]]] = {
    "float32": (False, {"precision": "float32", "optimizer": "adamw"}),
    "mixed precision": (False, {"precision": "bfloat16", "optimizer": "adamw"}),
    "recomputed": (True, {"precision": "bfloat16", "optimizer": "adamw"}),
    "all optimizations": (True, {"precision": "bfloat16", "optimizer": "adamw-8bit"}),
    "split": (True, {"precision": "bfloat16", "optimizer": "adamw-bf16", "data_parallel": "fsdp"}),
    "offloaded": (
        True,
        {"precision": "bfloat16", "optimizer": "adamw", "data_parallel": "zero3", "offload": "parameters"},
    ),
}
"""Runs by the words of the documents: whether blocks are computed again, and the settings."""


def settings_of(model: str, run: str, tokens: int, context_parallel: int = 1) -> TrainSettings:
    """A run on one text of so many tokens, with the segments of the documents' examples."""
    (is_recomputed, told), sizes = _RUNS[run], model_sizes(model)
    config = LongNetConfig(
        vocab_size=VOCABULARY,
        embed_dim=sizes["embed_dim"],
        num_layers=sizes["num_layers"],
        num_heads=sizes["num_heads"],
        activation="gelu",
        segment_lengths=(2048, 4096, 8192),
        dilation_rates=(1, 2, 4),
        gradient_checkpointing=is_recomputed,
    )
    shared: dict[str, Any] = {"context_parallel": context_parallel, "strategy": "ring"} if context_parallel > 1 else {}
    return dataclasses.replace(
        PRESETS["tiny"](), model=config, tokenizer=Path("tokens"), context_length=tokens, batch_size=1, **told, **shared
    )


def parameters(given: Mapping[str, Any]) -> Finding:
    """Whether a model of the documents' sizes has the weights that it is named by."""
    found = settings_of(given["model"], "float32", 2048).model.num_parameters
    return Finding(
        decided(is_near(found, given["parameters"])), f"{found:,} weights", "counted; sizes as in the data of this page"
    )


def longest(given: Mapping[str, Any]) -> Finding:
    """Whether a text of so many tokens fits on one device with 80 GB."""
    found = longest_context(settings_of(given["model"], given["run"], 8192), 1, DEVICE_BYTES)
    at = footprint(settings_of(given["model"], given["run"], given["tokens"]), 1)
    return Finding(
        decided(found >= given["tokens"]),
        f"{found:,} tokens",
        f"planned: a step of {given['tokens']:,} tokens has {_in_words(at)} alive",
    )


def fits(given: Mapping[str, Any]) -> Finding:
    """Whether a step fits on so many devices, and on how many it would: of the claimed number, doubled."""
    processes, memory = given["processes"], sheet_of(given["device"]).memory_bytes
    if given["tokens"] > MOST_POSITIONS:
        tokens = given["tokens"] // processes
        alone = footprint(settings_of(given["model"], given["run"], tokens), 1)
        return Finding(
            decided(False),
            f"{size(alone.total)} a device",
            f"planned for the {tokens:,} rows of a device alone: {_in_words(alone)}; this library's positions end at "
            f"{MOST_POSITIONS:,}",
        )

    def settings(number: int) -> TrainSettings:
        context = given.get("context_parallel", number)
        return settings_of(given["model"], given["run"], given["tokens"], context)

    check_processes(settings(processes), processes)
    found = footprint(settings(processes), processes)
    if found.total < memory:
        return Finding(CONFIRMED, f"{size(found.total)} a device", f"planned: {_in_words(found)} of {size(memory)}")
    reason = f"planned: {_in_words(found)}, at least, and a device has {size(memory)}"
    for doublings in range(1, _MOST_DOUBLINGS):
        number = processes << doublings
        if footprint(settings(number), number).total < memory:
            reason += f"; of {processes}, {2 * processes}, {4 * processes}, ... devices {number:,} are the first enough"
            break
    return Finding(REFUTED, f"{size(found.total)} a device", reason)


def kept(given: Mapping[str, Any]) -> Finding:
    """What a device keeps at least of a step whose states all devices split: for models that no device traces quickly.

    Weights and gradients in float32 and two moments in bfloat16, over all devices, and of its rows the input of every
    block that is computed again, in float32.
    """
    model = settings_of(given["model"], "split", given["tokens"]).model
    rows = -(-given["tokens"] // given["context_parallel"])
    states = 12 * model.num_parameters // given["processes"]
    inputs = 4 * model.embed_dim * model.num_layers * rows
    memory = sheet_of(given["device"]).memory_bytes
    if states + inputs < memory:
        return Finding(NOT_TESTABLE, f"{size(states + inputs)} a device at least", "a bound from below does not decide")
    return Finding(
        REFUTED,
        f"{size(states + inputs)} a device at least",
        f"counted: {size(states)} of weights, gradients and moments, split over all, and {size(inputs)} of inputs of "
        f"blocks for {rows:,} rows, without anything else; a device has {size(memory)}",
    )


def unlimited(given: Mapping[str, Any]) -> Finding:
    """How the memory of a rank grows with the text, and where it ends."""
    processes = given["processes"]
    short, long = given["lengths"]
    totals = [
        footprint(settings_of(given["model"], given["run"], tokens * processes, processes), processes).total
        for tokens in (short, long)
    ]
    a_token = (totals[1] - totals[0]) / (long - short)
    states = totals[0] - a_token * short
    most = (DEVICE_BYTES - states) / a_token * processes
    return Finding(
        decided(a_token <= 0),
        f"{most / 1e6:,.0f} M tokens on {processes} devices",
        f"planned: a rank has {a_token / 1e3:,.1f} KB alive for each token of its rows, so {processes} devices with 80 "
        f"GB end there, and more tokens take more devices; positions end at {MOST_POSITIONS:,}",
    )


def part(given: Mapping[str, Any]) -> Finding:
    """Whether one part of a step's memory has so many bytes."""
    found = _part(given, given["run"])
    words = "more" if found > given["bytes"] else "less"
    difference = f"{max(found, given['bytes']) / min(found, given['bytes']):.1f} times {words} than claimed"
    return Finding(decided(is_near(found, given["bytes"])), size(found), f"planned: {given['part']}, {difference}")


def part_ratio(given: Mapping[str, Any]) -> Finding:
    """Whether one run takes so many times less than another."""
    before, after = (_part(given, run) for run in (given["over"], given["run"]))
    ratio = before / after
    return Finding(
        decided(ratio >= (1 - NEAR) * given["least"]),
        f"{ratio:.1f}x less",
        f"planned: {given['part']} {size(before)} ({given['over']}) and {size(after)} ({given['run']}) at "
        f"{given['tokens']:,} tokens of the {given['model']} model",
    )


def recomputed_operations(given: Mapping[str, Any]) -> Finding:
    """Operations that blocks that are computed again add to a step."""
    before, after = (
        computed_flops(settings_of(given["model"], run, given["tokens"])) for run in ("mixed precision", "recomputed")
    )
    found = after / before - 1
    return Finding(
        decided(abs(found - given["share"]) <= 0.05),
        f"{found:.0%} more operations",
        f"planned: {before:.3g} operations of matrix products become {after:.3g}; time as well, where they bound it",
    )


def training_time(given: Mapping[str, Any]) -> Finding:
    """Whether so many devices at their peak compute so many tokens a parameter in so many months."""
    settings = settings_of(given["model"], "mixed precision", given["context"])  # nothing is recomputed
    tokens = given["tokens_per_parameter"] * settings.model.num_parameters
    flops = computed_flops(settings) * tokens / given["context"]
    rate = sheet_of(given["device"]).flops["bfloat16"]
    months = flops / (given["processes"] * rate) / MONTH
    most = given["months"] / months * tokens
    return Finding(
        decided(months <= given["months"]),
        f"{months:,.0f} months at least",
        f"planned: {flops:.2g} operations for {tokens:.2g} tokens, at {rate:.4g} a second and device without a pause; "
        f"{given['months']} months are enough for at most {most:.2g} tokens",
    )


def _part(given: Mapping[str, Any], run: str) -> int:
    found = footprint(settings_of(given["model"], run, given["tokens"]), 1)
    return int(getattr(found, given["part"]))


def _in_words(found: Footprint) -> str:
    """The total and the two largest parts."""
    parts = {name: value for name, value in dataclasses.asdict(found).items() if name != "checkpoint"}
    first, second = sorted(parts, key=lambda name: -parts[name])[:2]
    return f"{size(found.total)} ({first} {size(parts[first])}, {second} {size(parts[second])})"
