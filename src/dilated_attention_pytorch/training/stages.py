"""Stages of a run with growing windows, each with its fraction of the steps, pattern and learning rate; the patterns
of every step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.models.config import LongNetConfig
from dilated_attention_pytorch.patterns import DilatedPattern, Pattern, pattern_from_expression
from dilated_attention_pytorch.patterns.mixing import splitmix64

_SHORTEST = 8


@dataclass(kw_only=True, slots=True)
class StageSettings:
    """Stages of a run; each list has one entry per stage. Without lengths there is one stage.

    Raises:
        ValueError: a value is out of range, or lists have different lengths.
    """

    lengths: tuple[int, ...] = ()
    """Window length of each stage, rising to context_length. A batch has about the same number of tokens in every
    stage, in whole windows."""
    fractions: tuple[float, ...] = ()
    """Fraction of the steps of each stage, 1 in all. Default: equal fractions."""
    windows: tuple[int, ...] = ()
    """Windows of each stage that replace one of context_length. Default: as many as have its tokens."""
    learning_rates: tuple[float, ...] = ()
    """Factor of the learning rates in each stage. Default: 1."""
    patterns: tuple[str, ...] = ()
    """Segment lengths and rates of each stage, in Python syntax. For example "DilatedPattern([256, 1024], [1, 4])".
    Default: the model's, which evaluations always use."""

    def __post_init__(self) -> None:
        for name in ("lengths", "fractions", "windows", "learning_rates", "patterns"):
            values = tuple(getattr(self, name))
            setattr(self, name, values)
            if values and len(values) != len(self.lengths):
                raise ValueError(
                    f"stages.{name} must have an entry for each of the {len(self.lengths)} stages.lengths, got "
                    f"{list(values)}"
                )
        for name, least in (("lengths", _SHORTEST), ("windows", 1)):
            values = getattr(self, name)
            if any(isinstance(value, bool) or not isinstance(value, int) or value < least for value in values):
                raise ValueError(f"stages.{name} must be integers of at least {least}, got {list(values)}")
        for name in ("fractions", "learning_rates"):
            values = getattr(self, name)
            if any(isinstance(value, bool) or not 0 < value < math.inf for value in values):
                raise ValueError(f"stages.{name} must be finite numbers above 0, got {list(values)}")
        if self.fractions and abs(sum(self.fractions) - 1) > 1e-6:
            raise ValueError(f"stages.fractions must add up to 1, got {list(self.fractions)}")
        self.read_patterns()

    def check(self, context_length: int, steps: int, model: LongNetConfig, *, stage_steps: int = 0) -> None:
        """Raise ``ValueError`` unless the stages are valid for windows of ``context_length``; for the steps see
        :func:`stage_ends`."""
        if not self.lengths:
            if stage_steps:
                raise ValueError(f"stage_steps is for a run with stages.lengths, got {stage_steps}; leave it out")
            return
        if max(self.lengths) != context_length or list(self.lengths) != sorted(self.lengths):
            raise ValueError(
                f"stages.lengths must rise and end with the context_length {context_length}, got {list(self.lengths)}"
            )
        check_stage_ends(stage_ends(steps, len(self.lengths), self.fractions, stage_steps=stage_steps))
        for length, windows in zip(self.lengths, self.windows, strict=False):
            if windows * length > context_length:
                raise ValueError(
                    f"stages.windows must have no more tokens than one of the context_length {context_length}, got "
                    f"{windows} of {length}"
                )
        self.patterns_of(model)

    def read_patterns(self) -> list[DilatedPattern]:
        """Segment lengths and rates per stage; empty if the model's apply."""
        patterns = []
        for expression in self.patterns:
            try:
                pattern = pattern_from_expression(expression)
            except ValueError as error:
                raise ValueError(f"stages.patterns: {error}") from error
            if not isinstance(pattern, DilatedPattern) or pattern != DilatedPattern(
                pattern.segment_lengths, pattern.dilation_rates
            ):
                raise ValueError(
                    "stages.patterns say segment lengths and rates, DilatedPattern(lengths, rates); all else is the "
                    f"model's: got {expression}"
                )
            patterns.append(pattern)
        return patterns

    def patterns_of(self, model: LongNetConfig) -> tuple[tuple[Pattern, ...], ...]:
        """The pattern of every layer of ``model``, per stage; empty if its own apply.

        Raises:
            ValueError: a pattern is invalid for the model.
        """
        configs = []
        for pattern in self.read_patterns():
            lengths, rates = tuple(pattern.segment_lengths), tuple(pattern.dilation_rates)
            try:
                configs.append(replace(model, segment_lengths=lengths, dilation_rates=rates))
            except ValueError as error:
                raise ValueError(f"stages.patterns: {pattern!r}: {error}") from error
        return tuple(tuple(map(config.pattern, range(model.num_layers))) for config in configs)

    def ending_at(self, context_length: int) -> StageSettings:
        """The stages with a last one of ``context_length``: shorter ones as they are, for the same parts of a batch.

        >>> stages = StageSettings(lengths=(512, 2048, 8192), windows=(8, 4, 1), fractions=(0.3, 0.3, 0.4))
        >>> [(one.lengths, one.windows) for one in map(stages.ending_at, (16384, 2048, 512))]
        [((512, 2048, 16384), (16, 8, 1)), ((512, 2048), (2, 1)), ((), ())]
        """
        shorter = sum(length < context_length for length in self.lengths[:-1])
        if not shorter:
            return StageSettings()
        factor = Fraction(context_length, self.lengths[-1])
        fields = {name: (*values[:shorter], values[-1]) for name, values in asdict(self).items() if values}
        fields["lengths"] = (*self.lengths[:shorter], context_length)
        if self.fractions:
            fields["fractions"] = (*self.fractions[:shorter], sum(self.fractions[shorter:]))
        if self.windows:
            scaled = (max(1, int(factor * windows)) for windows in self.windows[:shorter])
            fields["windows"] = (*scaled, self.windows[-1])
        return StageSettings(**fields)

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON-serialisable values."""
        return {name: list(values) for name, values in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StageSettings:
        """The inverse of :meth:`to_dict`.

        Raises:
            TypeError, ValueError: an unknown key, or a value out of range.
        """
        return cls(**{name: tuple(entries) for name, entries in values.items()})


def stage_ends(steps: int, count: int, fractions: Sequence[float] = (), *, stage_steps: int = 0) -> tuple[int, ...]:
    """The step before which each of ``count`` stages ends, out of ``steps``.

    With ``stage_steps`` the stages divide that number of steps, and the last one lasts to the end.

    >>> stage_ends(7, 3), stage_ends(10, 2, [0.3, 0.7]), stage_ends(20, 2, stage_steps=7)
    ((3, 5, 7), (3, 10), (4, 20))
    """
    parts = [Fraction(part).limit_denominator(10**6) for part in fractions] or [Fraction(1, count)] * count
    return (*(math.ceil(end * (stage_steps or steps)) for end in list(accumulate(parts))[:-1]), steps)


def check_stage_ends(ends: Sequence[int]) -> None:
    """Raise ``ValueError`` unless every stage has a step."""
    if any(first >= last for first, last in zip((0, *ends), ends, strict=False)):
        raise ValueError(
            f"stages must have a step each, got {len(ends)} that end after the steps {', '.join(map(str, ends))}; "
            "take more steps, or fewer stages"
        )


def steps_with_drawn_windows(steps: int) -> int:
    """The steps of a run that random_local_windows apply to: all but the last tenth, rounded up.

    >>> [steps_with_drawn_windows(steps) for steps in (1, 9, 10, 11, 100)]
    [0, 8, 9, 9, 90]
    """
    return steps * 9 // 10


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of a run by optimizer step.

    Args:
        lengths: window lengths.
        ends: the step before which each stage ends.
        windows: windows per window of the longest length, by stage.
        learning_rates: factors of the learning rates.
        patterns: attention patterns of the layers; empty if the model's own apply.
        drawn: attention patterns of the layers under each of random_local_windows.
        seed: seed of their draws.
    """

    lengths: tuple[int, ...]
    ends: tuple[int, ...]
    windows: tuple[int, ...]
    learning_rates: tuple[float, ...] = ()
    patterns: tuple[tuple[Pattern, ...], ...] = ()
    drawn: tuple[tuple[Pattern, ...], ...] = ()
    seed: int = 0

    def at(self, step: int) -> int:
        """The stage of an optimizer step (both from 0); after the end, the last one."""
        return next((stage for stage, end in enumerate(self.ends) if step < end), len(self.ends) - 1)

    def learning_rate(self, step: int) -> float:
        """The factor of the learning rates at an optimizer step."""
        return self.learning_rates[self.at(step)] if self.learning_rates else 1.0

    def patterns_at(self, step: int) -> tuple[Pattern, ...]:
        """The attention patterns of the layers at an optimizer step; empty if the model's own apply."""
        if self.drawn and step < steps_with_drawn_windows(self.ends[-1]):
            return self.drawn[int(self._draws(step, step + 1))]
        return self.patterns[self.at(step)] if self.patterns else ()

    def _draws(self, start: int, stop: int) -> Tensor:
        """Indices into ``drawn`` of the steps from ``start`` up to ``stop``, each from the seed and the step alone."""
        return splitmix64(splitmix64(torch.tensor(self.seed)) ^ torch.arange(start, stop)) % len(self.drawn)

    def texts_after(self, step: int) -> Iterator[tuple[int, int, tuple[Pattern, ...]]]:
        """Numbers, lengths and :meth:`patterns_at` of the texts in the first ``step`` optimizer steps, for one batch of
        one window of the longest length per step."""
        drawn_until = steps_with_drawn_windows(self.ends[-1]) if self.drawn else 0
        of_stages = self.patterns or ((),) * len(self.lengths)
        each = zip((0, *self.ends), self.ends, self.windows, self.lengths, of_stages, strict=False)
        for start, end, count, length, patterns in each:
            stop = max(start, min(step, end))
            own_from = max(start, min(stop, drawn_until))
            if own_from > start:
                numbers = self._draws(start, own_from).bincount(minlength=len(self.drawn)).tolist()
                yield from ((count * number, length, drawn) for number, drawn in zip(numbers, self.drawn, strict=True))
            yield count * (stop - own_from), length, patterns

    def tokens_after(self, step: int) -> int:
        """Number of tokens in these texts."""
        return sum(count * length for count, length, _ in self.texts_after(step))
