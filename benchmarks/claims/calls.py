"""Claims about calls of attention: arithmetic, what was measured here, and data sheets as bounds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from typing import Any

import torch

from dilated_attention_pytorch import parallel
from dilated_attention_pytorch.benchmarks.claims import CLAIMS
from dilated_attention_pytorch.benchmarks.results import Row
from dilated_attention_pytorch.benchmarks.shapes import SHAPES
from dilated_attention_pytorch.data_sheets import sheet_of

from ..parallel import HEAD_DIM, HEADS, paper_up_to
from .claim import NEAR, NOT_TESTABLE, REFUTED, RESULTS, Finding, decided, is_near, size


def scores(given: Mapping[str, Any]) -> Finding:
    """Bytes of all scores of a dense call."""
    found = given["heads"] * given["tokens"] ** 2 * given["element_bytes"]
    heads = "one head" if given["heads"] == 1 else f"{given['heads']} heads"
    return Finding(
        decided(is_near(found, given["bytes"])),
        size(found),
        f"{given['tokens']:,}² scores of {heads} with {given['element_bytes']} bytes each; fused attention, dense too, "
        "keeps none of them",
    )


def operands(given: Mapping[str, Any]) -> Finding:
    """Whether a rank's rows of query, key, value and output of one layer are within so many bytes."""
    itemsize = getattr(torch, given["dtype"]).itemsize
    rows = -(-given["tokens"] // given["processes"])
    found = 4 * rows * given["heads"] * given["head_dim"] * itemsize
    return Finding(
        decided(found <= given["memory_bytes"]),
        f"{size(found)} a device",
        f"query, key, value and output of {rows:,} rows, {given['heads']} heads of {given['head_dim']}, "
        f"{given['dtype']}: one layer, forward, without weights and buffers",
    )


def throughput(given: Mapping[str, Any]) -> Finding:
    """Whether the claimed seconds are possible on the device that is named, and what this machine takes."""
    claimed = [claim for claim in CLAIMS if claim.shape == given["shape"]]
    rate = given["processes"] * sheet_of(given["device"]).flops["float32"]
    shares = []
    for claim in claimed:
        case = SHAPES[claim.shape].case(rows=claim.rows)
        seconds = (
            claim.milliseconds / 1e3 if claim.milliseconds is not None else claim.rows / (claim.tokens_per_second or 1)
        )
        shares.append(case.flops("pattern") / rate / seconds)
    here = [row.case.rows / row.seconds for row in _rows(given["shape"])]
    bound = f"{100 * max(shares):.3g} % of the peak of {given['processes']} x {given['device']}"
    return Finding(
        REFUTED if max(shares) > 1 else NOT_TESTABLE,
        f"{min(here):,.0f} to {max(here):,.0f} tokens/s here" if len(here) > 1 else f"{here[0]:,.0f} tokens/s here",
        f"it takes {bound}, so it is {'not ' if max(shares) > 1 else ''}possible there, and no such GPU was at hand; "
        f"ours was measured on {_processor()}, whose times say nothing of a GPU's",
    )


def call_memory(given: Mapping[str, Any]) -> Finding:
    """Whether a call is done in so many bytes."""
    (row,) = (row for row in _rows(given["shape"]) if row.case.rows == given["rows"])
    assert row.peak_bytes is not None
    return Finding(
        decided(row.peak_bytes <= given["bytes"]),
        size(row.peak_bytes),
        f"measured: all of a forward call on one device, operands and results ({size(row.case.held_bytes)}) included",
    )


def call_capacity(given: Mapping[str, Any]) -> Finding:
    """Whether so many tokens of one forward call fit, by the measured call and what exchanging heads copies."""
    row = _rows(given["shape"])[-1]
    assert row.peak_bytes is not None
    a_token = (row.peak_bytes + row.case.held_bytes) / row.case.rows * given["element_bytes"] / 4
    found = a_token * given["tokens"] / given["processes"]
    memory = sheet_of(given["device"]).memory_bytes
    return Finding(
        decided(found < memory),
        f"{size(found)} a device",
        f"planned from the measured call, {a_token / 1e3:.1f} KB a token with the copy that exchanging rows for heads "
        f"takes, for one layer and forward alone; a device has {size(memory)}",
    )


def memory_table(given: Mapping[str, Any]) -> Finding:
    """Whether the ratio of the document's table follows from its own column of bytes, by one rule for every row."""
    rows = [claim for claim in CLAIMS if claim.shape == given["shape"]]
    a_token = [claim.peak_megabytes * 1024 / claim.rows for claim in rows]
    factors = [round(claimed.kilobytes_per_token / found, 2) for claimed, found in zip(rows, a_token, strict=True)]
    found = a_token[-1] / a_token[0]
    halved = [f"{claim.rows:,}" for claim, factor in zip(rows, factors, strict=True) if is_near(factor, 0.5)]
    return Finding(
        decided(is_near(found, given["ratio"])),
        f"{found:.2f}",
        f"bytes of a GPU over tokens, from the table itself: {', '.join(f'{x:.1f}' for x in a_token)} KB; the column "
        f"of the table halves them at {' and '.join(halved)} tokens alone, which makes the claimed ratio",
    )


def memory_of_ranks(given: Mapping[str, Any]) -> Finding:
    """Whether the peak of a rank falls as the number of ranks grows, measured."""
    lines = [
        line
        for line in _results("parallel.json")["memory"]["points"]
        if line["way"] == "ring" and line["series"] == "65536 rows, not causal, contiguous"
    ]
    peaks = {line["ranks"]: line["peak_bytes"] for line in lines}
    falls = {ranks: peaks[1] / peak / ranks for ranks, peak in peaks.items()}
    return Finding(
        decided(all(abs(fall - 1) <= NEAR for fall in falls.values())),
        ", ".join(f"{size(peak)} ({ranks})" for ranks, peak in peaks.items()),
        "measured: peak of a rank of this library's ring at that many ranks, 65,536 rows; the document's table has one "
        "number of GPUs, which cannot show it",
    )


def block_speed(given: Mapping[str, Any]) -> Finding:
    """How many times faster block-sparse patterns are than dense attention, measured."""
    lines = _results("blocks.json")["speed"]
    ratios = [line["forward"]["dense_median"] / line["forward"]["median"] for line in lines]
    densities = [line["density"] for line in lines]
    of_dtype = [
        f"{dtype} {min(found):.1f}x to {max(found):.1f}x"
        for dtype in dict.fromkeys(line["dtype"] for line in lines)
        for found in [[ratio for ratio, line in zip(ratios, lines, strict=True) if line["dtype"] == dtype]]
    ]
    return Finding(
        decided(min(ratios) >= given["least"] * (1 - NEAR) and max(ratios) >= given["most"] * (1 - NEAR)),
        f"{min(ratios):.1f}x to {max(ratios):.1f}x",
        f"measured: {len(lines)} forward calls of {lines[0]['rows']:,} rows that see {max(densities):.0%} to "
        f"{min(densities):.0%} of the pairs: {' and '.join(of_dtype)}, each over dense attention in the same dtype",
    )


def overlap(given: Mapping[str, Any]) -> Finding:
    """How much less a ring takes that computes while messages are under way, measured with delayed messages."""
    lines = _results("parallel.json")["overlap"]["lines"]
    saved = [1 - 1 / line["awaited_ratio"] for line in lines]
    found = statistics.median(saved)
    return Finding(
        decided(found >= given["least"] * (1 - NEAR)),
        f"{found:.0%} less (median of {len(saved)})",
        f"measured: {min(saved):.0%} to {max(saved):.0%}, by how long messages take beside the computation",
    )


def packing(given: Mapping[str, Any]) -> Finding:
    """What one message of keys and values takes less than two, on the machine that plans assume."""
    plan = parallel.plan_parallel(
        paper_up_to(given["tokens"]), (1, given["tokens"], HEADS, HEAD_DIM), given["processes"], is_causal=True
    )
    ring = next(one for one in plan.estimates if (one.strategy, one.layout) == ("ring", "contiguous"))
    machine = parallel.Machine()
    waits = ring.messages * machine.message_seconds
    sends = max(ring.forward_bytes) / machine.bytes_per_second
    found = waits / (2 * waits + sends)
    return Finding(
        decided(is_near(found, given["share"])),
        f"{found:.0%} less",
        f"planned: {ring.messages} messages with {size(max(ring.forward_bytes))} in all, "
        f"{1e6 * machine.message_seconds:.0f} µs a message, 50 GB/s; where bytes weigh nothing it tends to half",
    )


def _results(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def _rows(shape: str) -> list[Row]:
    rows = [Row.from_dict(row) for row in _results("claims_calls.json")["rows"]]
    found = [row for row in rows if row.case.shape == shape and row.case.mode == "forward" and row.status == "timed"]
    return sorted(found, key=lambda row: row.case.rows)


def _processor() -> str:
    machine = _results("claims_calls.json")["machine"]
    return f"{machine['threads']} threads of {machine['processor']}"
