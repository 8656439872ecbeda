"""Claims that a few lines count: bytes of tensors, quotients of a document's own figures, and data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

from dilated_attention_pytorch.data_sheets import sheet_of

from .claim import NOT_TESTABLE, Finding, decided, is_near, size

_HOURS_OF_A_MONTH = 730.5


def undefined(given: Mapping[str, Any]) -> Finding:
    """A figure of which no computation decides; the data says why."""
    return Finding(NOT_TESTABLE, "", given["reason"])


def reduction(given: Mapping[str, Any]) -> Finding:
    """Whether a share follows from two figures."""
    found = 1 - given["after"] / given["before"]
    return Finding(
        decided(abs(found - given["share"]) < 0.001),
        f"{found:.1%}",
        "the quotient is right; attention that keeps no scores takes that much less for the same reason, dense too",
    )


def price(given: Mapping[str, Any]) -> Finding:
    """What the sums come to for a device and for an hour of one."""
    hours = given["processes"] * given["months"] * _HOURS_OF_A_MONTH
    return Finding(
        NOT_TESTABLE,
        f"${given['training'] / hours:.2f} a GPU-hour",
        f"prices are no property of code; the sums are ${given['infrastructure'] / given['processes']:,.0f} a GPU of "
        f"{given['processes']}, and ${given['training'] / hours:.2f} for each of their hours in {given['months']} "
        "months",
    )


def projections(given: Mapping[str, Any]) -> Finding:
    """Bytes of the results of one projection to 3 E, and of three to E."""
    width = given["embed_dim"]
    x = torch.empty(1, given["tokens"], width, device="meta")
    fused = nn.Linear(width, 3 * width, device="meta")(x).nbytes
    single = sum(nn.Linear(width, width, device="meta")(x).nbytes for _ in range(3))
    return Finding(
        decided(is_near(single / fused, given["ratio"])),
        f"{single / fused:.0f}x",
        f"one tensor of {size(fused)} in the place of three with {size(single)} together: fewer allocations, as many "
        "bytes",
    )


def zeroed(given: Mapping[str, Any]) -> Finding:
    """Bytes of a tensor of zeros, made in one way or in the other."""
    x = torch.empty(1, 64, 8, 64)
    ratio = torch.zeros_like(x).nbytes / torch.empty_like(x).zero_().nbytes
    return Finding(decided(is_near(ratio, given["ratio"])), f"{ratio:.0f}x", "both allocate one tensor of that shape")


def pruned(given: Mapping[str, Any]) -> Finding:
    """Bytes of a layer whose rows are pruned."""
    layer = nn.Linear(given["embed_dim"], given["embed_dim"])
    before = _held(layer)
    prune.ln_structured(layer, name="weight", amount=given["amount"], n=2, dim=0)
    during = _held(layer)
    prune.remove(layer, "weight")
    after = _held(layer)
    return Finding(
        decided(min(during, after) < before),
        f"{during / before:.1f}x, then {after / before:.1f}x",
        f"rows become zeros, which are kept: {size(before)} before, {size(during)} with the mask, {size(after)} after "
        "it is removed",
    )


def distinct(given: Mapping[str, Any]) -> Finding:
    """Whether the segments of examples of several lengths differ."""
    kinds = {tuple(segments) for segments in given["segments"]}
    lengths = ", ".join(f"{length:,}" for length in given["lengths"])
    return Finding(
        decided(len(kinds) > 1),
        f"{len(kinds)} for {len(given['lengths'])} lengths",
        f"the document's own examples, for {lengths} tokens, are the same segments",
    )


def sheet_memory(given: Mapping[str, Any]) -> Finding:
    """Memory of a device."""
    sheet = sheet_of(given["device"])
    return Finding(
        decided(sheet.memory_bytes == given["bytes"]), size(sheet.memory_bytes), _from(sheet, "memory_bytes")
    )


def sheet_slower(given: Mapping[str, Any]) -> Finding:
    """Whether products of one dtype are slower than those of another."""
    sheet = sheet_of(given["device"])
    ratio = sheet.flops[given["than"]] / sheet.flops[given["slower"]]
    return Finding(
        decided(ratio > 1), f"{given['slower']} {ratio:.0f}x slower than {given['than']}", _from(sheet, "flops")
    )


def sheet_has(given: Mapping[str, Any]) -> Finding:
    """Whether devices multiply in some dtypes."""
    sheets = [sheet_of(name) for name in given["devices"]]
    has = [dtype in sheet.flops for sheet in sheets for dtype in given["dtypes"]]
    is_met = all(has) if given["is_there"] else not any(has)
    rates = [
        f"{sheet.name}: " + ", ".join(f"{dtype} {rate:.4g}" for dtype, rate in sheet.flops.items()) for sheet in sheets
    ]
    return Finding(decided(is_met), "as claimed" if is_met else "not so", f"operations a second of {'; '.join(rates)}")


def sheet_ratio(given: Mapping[str, Any]) -> Finding:
    """How much more memory one device has than another."""
    ratio = sheet_of(given["device"]).memory_bytes / sheet_of(given["than"]).memory_bytes
    return Finding(
        decided(ratio >= given["ratio"]),
        f"{ratio:.0f}x the memory",
        f"{given['device']} over {given['than']}; what a token takes is the same on both",
    )


def _held(layer: nn.Module) -> int:
    tensors = [*layer.parameters(), *layer.buffers()]
    return sum(tensor.nbytes for tensor in tensors)


def _from(sheet: Any, figure: str) -> str:
    return f"data sheet: {sheet.sources[figure]}"
