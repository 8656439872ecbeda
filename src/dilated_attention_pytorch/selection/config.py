"""The selection policy: limits of segments, memory and time, and the objective."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from dilated_attention_pytorch.patterns.pattern import check_count

Objective = Literal["score", "speed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentSelectionConfig:
    """The policy of :class:`DynamicSegmentSelector`. Frozen and hashable: equal policies make equal choices.

    Raises:
        TypeError: a value is of the wrong type.
        ValueError: a value is out of range, or the objective is unknown.

    >>> from dilated_attention_pytorch.selection import SegmentSelectionConfig
    >>> SegmentSelectionConfig(min_segment_size=1024, max_segment_size=32768, memory_safety_factor=0.6).objective
    'score'
    """

    min_segment_size: int = 512
    """Shortest segment length w, in positions."""
    max_segment_size: int = 65536
    """Longest segment length w, in positions."""
    max_num_segments: int = 8
    """Maximum number of segment lengths per pattern."""
    geometric_ratios: tuple[float, ...] = (1.5, 2.0, 2.5, 3.0)
    """Ratios of successive segment lengths; each gives a family of candidates."""
    memory_safety_factor: float = 0.8
    """Fraction of the free memory that a call may use."""
    min_free_memory_gb: float = 0.5
    """Free memory to leave unused in any case, in GiB."""
    time_budget_ms: float | None = None
    """Time limit of a call in milliseconds (forward and backward if ``is_training``); None = no limit."""
    is_training: bool = True
    """Whether calls compute gradients, which take memory and time. Use the same value in training and evaluation, so
    that a module makes the same choice in both."""
    objective: Objective = "score"
    """``"score"``: maximise the weighted sum of coverage, diversity and efficiency. ``"speed"``: minimise time among
    the candidates with sufficient coverage."""
    coverage_floor: float = 0.9
    """For ``"speed"``: required coverage relative to the highest of any candidate within the budgets."""
    coverage_weight: float = 0.5
    """For ``"score"``: weight of the fraction of the sequence that the longest segments span."""
    diversity_weight: float = 0.2
    """For ``"score"``: weight of the number of scales."""
    efficiency_weight: float = 0.3
    """For ``"score"``: weight of the speed relative to the fastest candidate."""

    def __post_init__(self) -> None:
        for name in ("min_segment_size", "max_segment_size", "max_num_segments"):
            check_count(name, getattr(self, name))
        if self.max_segment_size < self.min_segment_size:
            raise ValueError(
                f"max_segment_size must be at least min_segment_size {self.min_segment_size}, got "
                f"{self.max_segment_size}"
            )
        if not isinstance(self.geometric_ratios, tuple):
            raise TypeError(f"geometric_ratios must be a tuple of numbers, got {self.geometric_ratios!r}")
        for ratio in self.geometric_ratios:
            if not _number("geometric_ratios", ratio) > 1.0:
                raise ValueError(f"geometric_ratios must be above 1, got {ratio} in {self.geometric_ratios}")
        for name in ("memory_safety_factor", "coverage_floor"):
            if not 0.0 < _number(name, getattr(self, name)) <= 1.0:
                raise ValueError(f"{name} must be above 0 and at most 1, got {getattr(self, name)}")
        for name in ("min_free_memory_gb", "coverage_weight", "diversity_weight", "efficiency_weight"):
            if _number(name, getattr(self, name)) < 0.0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not self.coverage_weight + self.diversity_weight + self.efficiency_weight > 0.0:
            raise ValueError("one of coverage_weight, diversity_weight and efficiency_weight must be above 0, got 0")
        if self.time_budget_ms is not None and not _number("time_budget_ms", self.time_budget_ms) > 0.0:
            raise ValueError(f"time_budget_ms must be above 0, or None for no limit, got {self.time_budget_ms}")
        if not isinstance(self.is_training, bool):
            raise TypeError(f"is_training must be True or False, got {self.is_training!r}")
        if self.objective not in get_args(Objective):
            raise ValueError(f'objective must be "score" or "speed", got {self.objective!r}')

    def memory_budget(self, free_bytes: int) -> int:
        """Memory budget of a call in bytes: ``max(0, min(safety * free, free - min_free))``."""
        kept = round(self.min_free_memory_gb * 2**30)
        return max(0, min(int(self.memory_safety_factor * free_bytes), free_bytes - kept))


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    return float(value)
