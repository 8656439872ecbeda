"""One case: every contestant through the gate, then through the clock, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention_pytorch.errors import RunError

from .clock import Clock, Timer
from .contestants import FLEX, Attention, Contestant
from .exactness import draw_samples, judge, sampled_gradient
from .limits import Limits, Probe
from .results import Row
from .shapes import Case

Operands = tuple[Tensor, Tensor, Tensor]
Begin = Callable[[str], Callable[[], None]]
"""Told what begins; what it returns is called when that is over."""

OUT_OF_TIME = "the --time-limit of the run was reached"
"""The reason of a row that a resumed run measures."""
_FEWEST_CALLS, _MOST_CALLS = 3, 40
_PROBES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How long timing may take."""

    seconds_each: float
    """Repeated calls of one contestant in one case."""
    call_limit: float
    """Longest call that is begun, by the limit of the machine."""
    ends_at: float
    """Of ``time.monotonic()``: nothing is begun after it."""
    is_dry: bool = False

    def repeats(self, seconds: float) -> int:
        """How often to call what takes so long: a spread needs five calls, or three long ones."""
        if self.is_dry:
            return _FEWEST_CALLS
        return max(_FEWEST_CALLS if seconds > 1.0 else 5, int(min(_MOST_CALLS, self.seconds_each / seconds)))


class DeviceLostError(RunError):
    """A contestant broke the device for this process: nothing after it can be computed."""

    def __init__(self, rows: Sequence[Row], row: Row) -> None:
        super().__init__(
            f"the device is lost to this process after {row.contestant} in {row.case.name} ({row.reason}); "
            "--resume goes on without it, in a new process"
        )
        self.rows = rows
        """What is final of the case: who failed, was wrong or takes no part."""


@dataclass(slots=True)
class _Entry:
    """A contestant that passed the gate."""

    row: Row
    timer: Timer
    repeats: int = 0

    def sample(self) -> None:
        """Time one call."""
        sample = self.timer.sample()
        self.row.samples.append(sample.seconds)
        if sample.host_seconds is not None:
            self.row.host_samples.append(sample.host_seconds)
        self.row.is_hidden &= sample.is_hidden


def measure_case(
    case: Case,
    contestants: Sequence[Contestant],
    clock: Clock,
    probe: Probe,
    budget: Budget,
    begin: Begin,
    without: Sequence[str] = (),
) -> list[Row]:
    """A row for every contestant; a time only for those whose output, and gradients if timed, are right.

    ``without`` names those that are left out of this case. Contestants and the probe of the machine's limits are called
    in turn, so that a machine that slows down slows all.
    """
    operands = case.operands(clock.device)
    rows, entries = [], []
    for contestant in contestants:
        over = begin(f"{case.shape} {case.mode} N={case.rows:,}: {contestant.name}")
        reason = _reason_to_skip(case, contestant, clock, probe.at_first, budget, without)
        row, entry = _enter(case, contestant, operands, clock, budget, reason)
        rows.append(row)
        if row.status == "failed" and not is_alive(clock.device):
            raise DeviceLostError([one for one in rows if one.status != "timed"], row)
        if entry is not None:
            entries.append(entry)
        over()
    for turn in range(max((entry.repeats for entry in entries), default=0)):
        if turn >= _FEWEST_CALLS and time.monotonic() > budget.ends_at:
            break
        if turn < _PROBES:
            probe.sample()
        for entry in entries:
            if turn < entry.repeats and entry.row.status == "timed":
                _sample(entry, rows, clock.device)
    if entries:
        limits = probe.take()
        for entry in entries:
            entry.row.limits, entry.row.limit_seconds = limits, limits.seconds(case, entry.row.computes)
    return rows


def _sample(entry: _Entry, rows: Sequence[Row], device: torch.device) -> None:
    try:
        entry.sample()
    except errors_of_contestants() as error:
        row = entry.row
        row.status, row.reason, row.samples, row.host_samples = "failed", in_a_line(error), [], []
        if not is_alive(device):
            raise DeviceLostError([one for one in rows if one.status != "timed"], row) from error


def is_alive(device: torch.device) -> bool:
    """Whether the device still computes for this process: after an illegal access it never does again."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
    return True


def in_a_line(error: Exception) -> str:
    """The kind of an error and its first line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _enter(
    case: Case, contestant: Contestant, operands: Operands, clock: Clock, budget: Budget, reason: str | None
) -> tuple[Row, _Entry | None]:
    row = Row(
        case=case, contestant=contestant.name, computes=contestant.computes, status="skipped", reason=reason or ""
    )
    if row.reason:
        return row, None
    row.flops = case.flops(contestant.computes)
    try:
        begun = time.perf_counter()
        attention = contestant.prepare(case, operands)
        row.preparation_seconds = time.perf_counter() - begun
        if not _passes_gate(row, contestant, attention, operands):
            return row, None
        call = _make_call(attention, operands, _dense_gradient(case, operands))
        entry = _Entry(row, clock.timer(call))
        operand_bytes = sum(x.numel() * x.element_size() for x in operands)
        begun = time.perf_counter()
        memory = clock.memory(call)
        entry.repeats = budget.repeats(time.perf_counter() - begun)
        if memory is not None:
            row.peak_bytes, row.transient_bytes = memory[0] + operand_bytes, memory[1]
    except errors_of_contestants() as error:
        # Its failure is a result of its own, and no reason to lose everyone else's.
        row.status, row.reason = "failed", in_a_line(error)
        return row, None
    row.status = "timed"
    return row, entry


def _reason_to_skip(
    case: Case, contestant: Contestant, clock: Clock, limits: Limits, budget: Budget, without: Sequence[str]
) -> str | None:
    reason = contestant.refusal(case, clock.device)
    if reason is not None:
        return reason
    if contestant.name in without:
        return f"the preset leaves it out here; --contestants {contestant.name} times it in every case"
    if budget.is_dry and clock.device.type == "cpu" and contestant.name == FLEX:
        return "a dry run on the CPU does not wait for its compilation"
    least = limits.seconds(case, contestant.computes)
    if least > budget.call_limit and not budget.is_dry:
        return f"a call takes {least:.1f} s or more at this machine's rate; --call-limit is {budget.call_limit:g} s"
    if time.monotonic() > budget.ends_at:
        return OUT_OF_TIME
    return None


def errors_of_contestants() -> tuple[type[Exception], ...]:
    """What a contestant that cannot do a shape raises: out of memory, a compiler that gives up, a refused size."""
    if not torch.cuda.is_available():
        return (RuntimeError, ValueError)
    from triton.errors import TritonError  # CUDA builds of PyTorch bring it

    return (RuntimeError, ValueError, TritonError)


def _dense_gradient(case: Case, operands: Operands) -> Tensor | None:
    return torch.randn_like(operands[0].detach()) if case.mode == "forward_backward" else None


def _make_call(attention: Attention, operands: Operands, grad: Tensor | None) -> Callable[[], tuple[Tensor, ...]]:
    """Forward without a graph, or with a gradient of the output: forward and backward."""

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (attention(*operands),)

    def both() -> tuple[Tensor, ...]:
        out = attention(*operands)
        return (out.detach(), *torch.autograd.grad(out, operands, grad))

    return forward if grad is None else both


def _passes_gate(row: Row, contestant: Contestant, attention: Attention, operands: Operands) -> bool:
    case, samples = row.case, draw_samples(row.case)
    grad = sampled_gradient(case, samples, operands[0].detach()) if case.mode == "forward_backward" else None
    out, *grads = _make_call(attention, operands, grad)()
    if out.shape != operands[0].shape:
        row.status, row.reason = "wrong", f"its output is {tuple(out.shape)}, not {tuple(operands[0].shape)}"
        return False
    verdict = judge(case, row.computes, samples, operands, out, grad, grads or None, contestant.rounding)
    row.errors = verdict.errors
    if not verdict.passes:
        row.status, row.reason = "wrong", verdict.in_words()
    return verdict.passes
