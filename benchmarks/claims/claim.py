"""A claim of those documents, and what is found of it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["confirmed", "refuted", "not testable here"]
CONFIRMED: Verdict = "confirmed"
REFUTED: Verdict = "refuted"
NOT_TESTABLE: Verdict = "not testable here"

NEAR = 0.1
"""A figure that a document gives with "~" or rounded is met by one that differs by at most so much of it."""
FILE = Path(__file__).with_name("claims.toml")
RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One figure, in the document's words."""

    name: str
    document: str
    where: str
    """Heading or table of the document."""
    text: str
    needs: str
    """What it would take to find out."""
    judge: str
    """The function that decides."""
    given: Mapping[str, Any]
    """What it reads."""
    measured: tuple[str, ...] = ()
    """Result files that measure the same quantity."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is found of a claim."""

    verdict: Verdict
    ours: str
    """The figure that stands against the claimed one."""
    reason: str


def claims() -> tuple[Claim, ...]:
    """All of them, in the order of the file."""
    tables = tomllib.loads(FILE.read_text(encoding="utf-8"))["claim"]
    return tuple(Claim(**{**table, "measured": tuple(table.get("measured", ()))}) for table in tables)


def model_sizes(name: str) -> dict[str, int]:
    """Width, layers and heads of a model that the documents name by its weights.

    Raises:
        KeyError: no such model.
    """
    sizes: dict[str, int] = tomllib.loads(FILE.read_text(encoding="utf-8"))["model"][name]
    return sizes


def decided(is_met: bool) -> Verdict:
    """Confirmed or refuted."""
    return CONFIRMED if is_met else REFUTED


def is_near(found: float, claimed: float) -> bool:
    """Whether two figures are the same within :data:`NEAR`."""
    return abs(found - claimed) <= NEAR * claimed


def size(num_bytes: float) -> str:
    """Bytes in words; those of a petabyte as well."""
    for unit, least in (("EB", 1e18), ("PB", 1e15), ("TB", 1e12), ("GB", 1e9)):
        if num_bytes >= least:
            return f"{num_bytes / least:,.1f} {unit}"
    return f"{num_bytes / 1e6:,.1f} MB"
