"""Profile of one call: time by kernel, launches, memory, a trace, and a plot of memory over time."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.kernels.select import select
from dilated_attention_pytorch.machine import machine, require, set_threads
from dilated_attention_pytorch.output import check_free_folder, make_output

from .clock import Clock
from .contestants import CONTESTANTS, Attention, Contestant
from .report import in_words
from .results import write_json
from .run import check_case_memory, choose_device
from .settings import ProfileSettings
from .shapes import SHAPES, Case

TRACE_NAME, MEMORY_NAME, PROFILE_NAME = "trace.json", "memory.png", "profile.json"

_MOST_ROWS = 20


@dataclass(frozen=True, slots=True)
class Spent:
    """Time of one kernel (on a GPU) or operator (on the CPU, self time)."""

    name: str
    calls: int
    seconds: float


def profile_call(settings: ProfileSettings, console: Console) -> list[Spent]:
    """Profile the call of the settings, print the tables, write the folder.

    Raises:
        RunError: the output is not free, or the contestant does not support the call. Nothing was run or written.
    """
    require("profiling", ("matplotlib",), "bench")
    device = choose_device(settings.device)
    check_free_folder(settings.output)
    case = case_of(settings)
    contestant = _choose(settings, case, device)
    check_case_memory([case], device)
    set_threads(settings.threads)
    make_output(settings.output)
    operands = case.operands(device)
    attention = contestant.prepare(case, operands)
    grad = torch.randn_like(operands[0].detach()) if settings.backward else None
    clock = Clock(device)
    for _ in range(2):  # compilation, planning, first use of memory
        seconds = clock.seconds(lambda: _call(attention, operands, grad))
    memory = clock.memory(lambda: _call(attention, operands, grad))
    is_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        _call(attention, operands, grad)
        if is_cuda:
            torch.cuda.synchronize(device)
    spent, launches = _time_by_kernel(profiler, is_cuda=is_cuda)
    trace = settings.output / TRACE_NAME
    profiler.export_chrome_trace(str(trace))
    timeline = read_timeline(trace, is_cuda=is_cuda)
    written = [trace, settings.output / PROFILE_NAME]
    if timeline.bytes:
        draw_timeline(timeline, case, contestant.name, settings.output / MEMORY_NAME)
        written.append(settings.output / MEMORY_NAME)
    write_json(
        settings.output / PROFILE_NAME,
        {
            "case": asdict(case),
            "contestant": contestant.name,
            "machine": machine(),
            "seconds": seconds,
            "kernel_launches": launches,
            "peak_bytes": memory and memory[0],
            "transient_bytes": memory and memory[1],
            "spent": [asdict(entry) for entry in spent],
        },
    )
    _print(case, contestant, seconds, spent, launches, memory, console)
    console.print(f"written: {', '.join(map(str, written))}", highlight=False, soft_wrap=True)
    return spent


def case_of(settings: ProfileSettings) -> Case:
    """The case that the settings describe.

    Raises:
        RunError: more groups than the shape has.
    """
    shape = SHAPES[settings.shape]
    if settings.num_groups is not None and settings.num_groups > len(shape.segment_lengths):
        raise RunError(
            f"--num-groups {settings.num_groups}: the shape {shape.name} has {len(shape.segment_lengths)} dilation "
            "groups; name at most so many"
        )
    return shape.case(
        rows=settings.rows or max(shape.rows),
        mode="forward_backward" if settings.backward else None,
        dtype=settings.dtype,
        causal=settings.causal or shape.causal,
        head_dim=settings.head_dim,
        num_groups=settings.num_groups,
        batch=settings.batch,
    )


def _choose(settings: ProfileSettings, case: Case, device: torch.device) -> Contestant:
    part = settings.contestant
    if part is None:
        part = f"ours, {select('auto', device, case.torch_dtype, case.head_dim)}"
    whole = [entry for entry in CONTESTANTS if part == entry.name]
    found = whole or [entry for entry in CONTESTANTS if part in entry.name]
    if len(found) != 1:
        names = ", ".join(repr(entry.name) for entry in found or CONTESTANTS)
        raise RunError(f"--contestant {part}: it must be part of one name, got {len(found)}; choose one of {names}")
    reason = found[0].refusal(case, device)
    if reason is not None:
        raise RunError(f"--contestant {part} cannot compute this call: {reason}")
    return found[0]


def _call(attention: Attention, operands: tuple[Tensor, Tensor, Tensor], grad: Tensor | None) -> tuple[Tensor, ...]:
    with contextlib.nullcontext() if grad is not None else torch.no_grad():
        with record_function("forward"):
            out = attention(*operands)
        if grad is None:
            return (out,)
        with record_function("backward"):
            return (out.detach(), *torch.autograd.grad(out, operands, grad))


def _time_by_kernel(profiler: profile, *, is_cuda: bool) -> tuple[list[Spent], int | None]:
    """Time by name, longest first; and the number of kernels run on the GPU."""
    calls: dict[str, int] = defaultdict(int)
    microseconds: dict[str, float] = defaultdict(float)
    launches = 0
    for event in profiler.events() or ():
        if event.name in ("forward", "backward"):
            continue
        if not is_cuda:
            calls[event.name] += 1
            microseconds[event.name] += event.self_cpu_time_total
        elif event.device_type == DeviceType.CUDA:
            calls[event.name] += 1
            microseconds[event.name] += event.time_range.elapsed_us()
            launches += not event.name.startswith(("Memcpy", "Memset"))
    spent = [Spent(name, calls[name], microseconds[name] / 1e6) for name in calls]
    spent.sort(key=lambda entry: -entry.seconds)
    return spent, launches if is_cuda else None


def _print(
    case: Case,
    contestant: Contestant,
    seconds: float,
    spent: Sequence[Spent],
    launches: int | None,
    memory: tuple[int, int] | None,
    console: Console,
) -> None:
    total = sum(entry.seconds for entry in spent)
    table = Table(title=f"{contestant.name}: {case.name}", title_justify="left")
    for name in ("time", "share", "calls"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("kernel" if launches is not None else "operator, without what it calls", overflow="fold")
    for entry in spent[:_MOST_ROWS]:
        share = entry.seconds / total if total else 0.0
        table.add_row(in_words(entry.seconds), f"{share:.1%}", str(entry.calls), entry.name)
    if len(spent) > _MOST_ROWS:
        rest = spent[_MOST_ROWS:]
        left = sum(entry.seconds for entry in rest)
        table.add_row(in_words(left), f"{left / total:.1%}", str(sum(entry.calls for entry in rest)), "everything else")
    console.print(table)
    launched = "" if launches is None else f"; {launches} kernels launched"
    console.print(f"one call without the profiler: {in_words(seconds)}{launched}", highlight=False)
    if memory is not None:
        console.print(
            f"memory beyond the operands: {memory[0] / 1e6:,.1f} MB at the peak, {memory[1] / 1e6:,.1f} MB of it "
            "neither output nor gradient",
            highlight=False,
        )


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bytes above the level before the call, over the microseconds of a call."""

    microseconds: list[float]
    bytes: list[int]
    spans: dict[str, tuple[float, float]]
    """Start and end of forward and backward."""


def read_timeline(trace: Path, *, is_cuda: bool) -> Timeline:
    """The memory events of the profiler's Chrome trace."""
    events: list[dict[str, Any]] = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    device_type = DeviceType.CUDA.value if is_cuda else DeviceType.CPU.value
    changes = sorted(
        (event["ts"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == device_type
    )
    spans = {
        event["name"]: (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("name") in ("forward", "backward") and event.get("cat") == "user_annotation"
    }
    start = min([begin for begin, _ in spans.values()] + [ts for ts, _ in changes], default=0.0)
    return Timeline(
        [ts - start for ts, _ in changes],
        list(itertools.accumulate(size for _, size in changes)),
        {name: (begin - start, end - start) for name, (begin, end) in spans.items()},
    )


def draw_timeline(timeline: Timeline, case: Case, contestant: str, file: Path) -> None:
    """Plot memory over the call, with forward and backward marked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.2), layout="constrained")
    axes = figure.subplots()
    milliseconds = [1e-3 * ts for ts in timeline.microseconds]
    megabytes = [size / 1e6 for size in timeline.bytes]
    for (name, (begin, end)), color in zip(timeline.spans.items(), ("#1f77b4", "#ff7f0e"), strict=False):
        axes.axvspan(1e-3 * begin, 1e-3 * end, color=color, alpha=0.12, label=name)
    # A step function from just before the first event to the end of the call.
    stop = max([milliseconds[-1], *(1e-3 * end for _, end in timeline.spans.values())])
    axes.fill_between(
        [0.0, *milliseconds, stop], [0.0, *megabytes, megabytes[-1]], step="post", color="#333333", alpha=0.35
    )
    axes.step([0.0, *milliseconds, stop], [0.0, *megabytes, megabytes[-1]], where="post", color="#333333", linewidth=1)
    query = case.batch * case.num_queries * case.heads * case.head_dim * case.torch_dtype.itemsize / 1e6
    axes.axhline(query, color="black", linestyle=":", linewidth=1, label=f"size of q: {query:,.1f} MB")
    axes.set_xlabel("ms (under the profiler)")
    axes.set_ylabel("MB beyond what was there before")
    axes.set_title(f"{contestant}: {case.name}", fontsize=9)
    axes.set_xlim(0, stop)
    axes.set_ylim(bottom=min(0.0, *megabytes))
    axes.legend(loc="upper left", fontsize=8)
    figure.savefig(file, dpi=110)
