"""Measurement of one case: every contestant passes the correctness gate, then all are timed in turn."""

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
from .results import Row
from .shapes import Case

Operands = tuple[Tensor, Tensor, Tensor]
Begin = Callable[[str], Callable[[], None]]
"""Called with the name of a starting activity; the returned function is called at its end."""

OUT_OF_TIME = "the --time-limit of the run was reached"
"""Reason of rows that a resumed run will measure."""
_FEWEST_CALLS, _MOST_CALLS = 3, 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Time limits."""

    seconds_each: float
    """Seconds of repeated calls per contestant and case."""
    call_limit: float
    """Longest call to attempt, by the machine's lower bound."""
    ends_at: float
    """Deadline in ``time.monotonic()``: nothing starts after it."""
    is_dry: bool = False

    def repeats(self, seconds: float) -> int:
        """Number of calls for a given duration: five for a spread, or three long ones."""
        if self.is_dry:
            return _FEWEST_CALLS
        return max(_FEWEST_CALLS if seconds > 1.0 else 5, int(min(_MOST_CALLS, self.seconds_each / seconds)))


class DeviceLostError(RunError):
    """A contestant broke the device for this process: no further computation is possible."""

    def __init__(self, rows: Sequence[Row], row: Row) -> None:
        super().__init__(
            f"the device is lost to this process after {row.contestant} in {row.case.name} ({row.reason}); "
            "--resume goes on without it, in a new process"
        )
        self.rows = rows
        """Final rows of the case: contestants that failed, were wrong or do not take part."""


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
    rate: float,
    budget: Budget,
    begin: Begin,
    without: Sequence[str] = (),
) -> list[Row]:
    """One row per contestant; times only for those with correct outputs and, if timed, gradients.

    Contestants are timed in turn, so that a slowdown of the machine affects all of them.

    Args:
        case: the call.
        contestants: implementations to check and time.
        clock: clock of the device.
        rate: operations per second of a large matrix product, for the limit on calls.
        budget: time limits.
        begin: reports progress.
        without: names of contestants to leave out of this case.
    """
    operands = case.operands(clock.device)
    rows, entries = [], []
    for contestant in contestants:
        over = begin(f"{case.shape} {case.mode} N={case.rows:,}: {contestant.name}")
        reason = _reason_to_skip(case, contestant, clock, rate, budget, without)
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
        for entry in entries:
            if turn < entry.repeats and entry.row.status == "timed":
                _sample(entry, rows, clock.device)
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
    """Whether the device still works for this process; after an illegal access it does not."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
    return True


def in_a_line(error: Exception) -> str:
    """The type of an error and the first line of its message."""
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
        # A failure is this contestant's result, and does not affect the others.
        row.status, row.reason = "failed", in_a_line(error)
        return row, None
    row.status = "timed"
    return row, entry


def _reason_to_skip(
    case: Case, contestant: Contestant, clock: Clock, rate: float, budget: Budget, without: Sequence[str]
) -> str | None:
    reason = contestant.refusal(case, clock.device)
    if reason is not None:
        return reason
    if contestant.name in without:
        return f"the preset leaves it out here; --implementations {contestant.name} times it in every case"
    if budget.is_dry and clock.device.type == "cpu" and contestant.name == FLEX:
        return "a dry run on the CPU does not wait for its compilation"
    least = case.flops(contestant.computes) / rate
    if least > budget.call_limit and not budget.is_dry:
        return f"a call takes {least:.1f} s or more at this machine's rate; --call-limit is {budget.call_limit:g} s"
    if time.monotonic() > budget.ends_at:
        return OUT_OF_TIME
    return None


def errors_of_contestants() -> tuple[type[Exception], ...]:
    """Exceptions of contestants that do not support a shape: out of memory, compiler errors, rejected sizes."""
    if not torch.cuda.is_available():
        return (RuntimeError, ValueError)
    from triton.errors import TritonError  # included in CUDA builds of PyTorch

    return (RuntimeError, ValueError, TritonError)


def _dense_gradient(case: Case, operands: Operands) -> Tensor | None:
    return torch.randn_like(operands[0].detach()) if case.mode == "forward_backward" else None


def _make_call(attention: Attention, operands: Operands, grad: Tensor | None) -> Callable[[], tuple[Tensor, ...]]:
    """A forward call without a graph, or, given an output gradient, forward and backward."""

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
    verdict = judge(case, row.computes, samples, operands, out, grad, grads or None)
    row.errors = verdict.errors
    if not verdict.passes:
        row.status, row.reason = "wrong", verdict.describe()
    return verdict.passes
