"""Schedule of a run: its cases in order, their expected durations, and where the time limit falls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from .contestants import FLEX, Contestant
from .limits import Limits
from .measure import Budget
from .shapes import Case

_SHARE_OF_LIMIT = 0.25
"""Assumed fraction of the machine's rates that a contestant reaches."""
_FIXED_SECONDS = 0.3
"""Assumed time of the gate, the operands and Python, for one contestant in one case."""
_COMPILE_SECONDS = {
    "ours, triton": 15.0,
    FLEX: 30.0,
}
"""Assumed (not measured) compilation or planning time of a case on a GPU."""


@dataclass(frozen=True, slots=True)
class Step:
    """A case and the contestants that take part in it."""

    case: Case
    contestants: tuple[Contestant, ...]
    seconds: float
    """Expected duration for all of them."""


def schedule(
    cases: Mapping[Case, tuple[str, ...]],
    contestants: Sequence[Contestant],
    limits: Mapping[str, Limits],
    budget: Budget,
    device: torch.device,
) -> list[Step]:
    """The steps of a run, in the order of the cases.

    Args:
        cases: cases with the names of contestants that are left out.
        contestants: contestants of the run.
        limits: rates of the machine by dtype.
        budget: time limits of the run.
        device: device to compute on.
    """
    steps = []
    for case, without in cases.items():
        rates = limits[case.dtype]
        taking_part = tuple(
            entry
            for entry in contestants
            if entry.name not in without
            and entry.refusal(case, device) is None
            and (budget.is_dry or rates.seconds(case, entry.computes) <= budget.call_limit)
        )
        steps.append(Step(case, taking_part, sum(_seconds(case, one, rates, budget, device) for one in taking_part)))
    return steps


def _seconds(case: Case, contestant: Contestant, limits: Limits, budget: Budget, device: torch.device) -> float:
    call = limits.seconds(case, contestant.computes) / _SHARE_OF_LIMIT
    compilation = _COMPILE_SECONDS.get(contestant.name, 0.0) if device.type == "cuda" else 0.0
    return _FIXED_SECONDS + compilation + call * (2 + budget.repeats(call))


def print_schedule(steps: Sequence[Step], time_limit: float, console: Console) -> None:
    """Print the schedule of a run before it starts."""
    table = Table(title="plan", title_justify="left")
    for name in ("", "case", "who", "about", "until"):
        table.add_column(
            name, justify="left" if name == "case" else "right", overflow="fold" if name == "case" else "ellipsis"
        )
    until = 0.0
    for number, step in enumerate(steps, 1):
        until += step.seconds
        late = " (after the limit)" if until > time_limit else ""
        table.add_row(
            str(number),
            step.case.name,
            str(len(step.contestants)),
            f"{step.seconds:.0f} s",
            f"{until:.0f} s{late}",
        )
    console.print(table)
    console.print(
        f"about {until:.0f} s, estimated from the rates of this machine; nothing is begun after {time_limit:.0f} s, "
        "and --resume goes on with what is left",
        highlight=False,
        soft_wrap=True,
    )
