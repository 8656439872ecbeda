"""One case: every contestant through the gate, then through the clock, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .clock import Clock
from .contestants import Attention, Contestant
from .exactness import draw_samples, judge, sampled_gradient
from .limits import Limits, Probe
from .results import Row
from .shapes import Case

Operands = tuple[Tensor, Tensor, Tensor]
Begin = Callable[[str], Callable[[], None]]
"""Told what begins; what it returns is called when that is over."""

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


@dataclass(slots=True)
class _Entry:
    """A contestant that passed the gate."""

    row: Row
    call: Callable[[], tuple[Tensor, ...]]
    repeats: int = 0


def measure_case(
    case: Case, contestants: Sequence[Contestant], clock: Clock, probe: Probe, budget: Budget, begin: Begin
) -> list[Row]:
    """A row for every contestant; a time only for those whose output, and gradients if timed, are right.

    Contestants and the probe of the machine's limits are called in turn, so that a machine that slows down slows all.
    """
    operands = case.operands(clock.device)
    rows, entries = [], []
    for contestant in contestants:
        over = begin(f"{case.shape} {case.mode} N={case.rows:,}: {contestant.name}")
        row, entry = _enter(case, contestant, operands, clock, probe.at_first, budget)
        rows.append(row)
        if entry is not None:
            entries.append(entry)
        over()
    for turn in range(max((entry.repeats for entry in entries), default=0)):
        if turn >= _FEWEST_CALLS and time.monotonic() > budget.ends_at:
            break
        if turn < _PROBES:
            probe.sample()
        for entry in entries:
            if turn < entry.repeats:
                entry.row.samples.append(clock.seconds(entry.call))
    if entries:
        limits = probe.take()
        for entry in entries:
            entry.row.limits, entry.row.limit_seconds = limits, limits.seconds(case, entry.row.computes)
    return rows


def _enter(
    case: Case, contestant: Contestant, operands: Operands, clock: Clock, limits: Limits, budget: Budget
) -> tuple[Row, _Entry | None]:
    row = Row(
        case=case, contestant=contestant.name, computes=contestant.computes, status="skipped",
        reason=_reason_to_skip(case, contestant, clock, limits, budget) or "",
    )  # fmt: skip
    if row.reason:
        return row, None
    row.flops = case.flops(contestant.computes)
    try:
        begun = time.perf_counter()
        attention = contestant.prepare(case, operands)
        row.preparation_seconds = time.perf_counter() - begun
        if not _passes_gate(row, attention, operands):
            return row, None
        entry = _Entry(row, _make_call(attention, operands, _dense_gradient(case, operands)))
        operand_bytes = sum(x.numel() * x.element_size() for x in operands)
        begun = time.perf_counter()
        memory = clock.memory(entry.call)
        entry.repeats = budget.repeats(time.perf_counter() - begun)
        if memory is not None:
            row.peak_bytes, row.transient_bytes = memory[0] + operand_bytes, memory[1]
    except _errors_of_contestants() as error:
        # Its failure is a result of its own, and no reason to lose everyone else's.
        row.status, row.reason = "failed", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if clock.device.type == "cuda":
            torch.cuda.empty_cache()
        return row, None
    row.status = "timed"
    return row, entry


def _reason_to_skip(case: Case, contestant: Contestant, clock: Clock, limits: Limits, budget: Budget) -> str | None:
    reason = contestant.refusal(case, clock.device)
    if reason is not None:
        return reason
    if budget.is_dry and clock.device.type == "cpu" and contestant.name == "FlexAttention":
        return "a dry run on the CPU does not wait for its compilation"
    least = limits.seconds(case, contestant.computes)
    if least > budget.call_limit and not budget.is_dry:
        return f"a call takes {least:.1f} s or more at this machine's rate; --call-limit is {budget.call_limit:g} s"
    if time.monotonic() > budget.ends_at:
        return "the --time-limit of the run was reached"
    return None


def _errors_of_contestants() -> tuple[type[Exception], ...]:
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


def _passes_gate(row: Row, attention: Attention, operands: Operands) -> bool:
    case, samples = row.case, draw_samples(row.case)
    grad = sampled_gradient(case, samples, operands[0].detach()) if case.mode == "forward_backward" else None
    out, *grads = _make_call(attention, operands, grad)()
    if out.shape != operands[0].shape:
        row.status, row.reason = "wrong", f"its output is {tuple(out.shape)}, not {tuple(operands[0].shape)}"
        return False
    verdict = judge(case, row.computes, samples, operands, out, grad, grads or None)
    row.errors = verdict.errors
    if not verdict.passes:
        row.status, row.reason = "wrong", verdict.in_words()
    return verdict.passes
