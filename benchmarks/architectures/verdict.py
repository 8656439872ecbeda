"""One row of the table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WORKS, REFUSED, NEITHER, NOT_APPLICABLE = "works", "refused", "neither", "not applicable"


@dataclass(slots=True)
class Verdict:
    """One row of the table."""

    model_type: str
    class_name: str
    is_decoder: bool
    verdict: str
    reason: str = ""
    way: str = ""
    """What was done besides ``attn_implementation="dilated"`` and ``set_pattern``."""
    checks: list[str] = field(default_factory=list)
    """What was shown to hold."""
    error: float | None = None
    """Largest difference from the reference, relative to the largest result."""
    effect: float | None = None
    """The same between the reference and dense attention: what ignoring the pattern would give."""
    attention: list[str] = field(default_factory=list)
    """Classes of attention that ran."""
    parts: list[str] = field(default_factory=list)
    """Models that ran within it."""
    recipe: list[Any] = field(default_factory=list)
    """Level, dtype and number of the inputs, to be found again quickly."""
