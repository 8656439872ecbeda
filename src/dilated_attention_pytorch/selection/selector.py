"""The selector: from workload, policy and hardware to a pattern."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dilated_attention_pytorch.estimate.attention import Bytes, peak_bytes
from dilated_attention_pytorch.estimate.workload import Workload
from dilated_attention_pytorch.patterns import DilatedPattern, Pattern
from dilated_attention_pytorch.patterns.dilated import OffsetRule, Tail

from .config import SegmentSelectionConfig
from .cost import FEATURES, features, nominal_rates, weighted
from .hardware import Hardware, read_hardware
from .profile import Profile, load_profile


@dataclass(frozen=True, slots=True)
class Estimate:
    """One candidate with its estimates."""

    pattern: DilatedPattern
    flops: int
    """Operations of the matrix products."""
    bytes: Bytes
    """Upper bound of the peak memory."""
    seconds: float
    """Predicted time: from measured rates if the profile has better ones than the formula, else from nominal ones."""
    coverage: float
    """See :func:`coverage`."""
    diversity: float
    """See :func:`diversity`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen candidate, its alternatives, and the criteria."""

    best: Estimate
    efficiency: float
    """Time of the fastest candidate within the budgets over the time of the chosen one."""
    score: float
    """Weighted mean of coverage, diversity and efficiency."""
    memory_budget: int
    """Memory budget in bytes."""
    is_measured: bool
    """Whether times come from a profile of this machine."""
    fitting: tuple[Estimate, ...]
    """All candidates within the budgets, in their fixed order."""
    num_candidates: int
    """Number of candidates examined."""


class DynamicSegmentSelector:
    """Chooses the segment lengths and dilation rates of a call: a pure function of workload, policy and hardware.

    Candidates (:func:`candidates`) within the memory and time budgets are ranked by
    ``(w_c coverage + w_d diversity + w_e efficiency) / (w_c + w_d + w_e)``, or, with ``objective="speed"``, by time
    among those with at least ``coverage_floor`` times the highest coverage. Ties go to the faster candidate,
    then to the one with fewer groups, then to the first.

    The hardware record and the stored profile are read once per device, at the first choice for it, so later choices
    do not depend on changes of free memory. A new selector reads both again.

    Args:
        config: selection policy; None = the defaults.
        hardware: hardware to choose for; None = the call's device.
        profile: measured rates; None = the stored profile of this machine (from `dilated-attention tune`), or
            nominal rates if there is none. ``Profile(())`` forces nominal rates.

    Raises:
        TypeError: an argument is of the wrong type.

    >>> from dilated_attention_pytorch.selection import DynamicSegmentSelector
    >>> import torch
    >>> hardware = Hardware.of_architecture("H100", free_bytes=60 << 30)
    >>> selector = DynamicSegmentSelector(hardware=hardware, profile=Profile(()))
    >>> pattern = selector.select(4096, 1, 8, 64, torch.bfloat16, "cuda")
    >>> pattern.segment_lengths, pattern.dilation_rates
    ((512, 1280, 3200, 4096), (1, 2, 6, 8))
    """

    def __init__(
        self,
        config: SegmentSelectionConfig | None = None,
        *,
        hardware: Hardware | None = None,
        profile: Profile | None = None,
    ) -> None:
        for name, value, kind in (
            ("config", config, SegmentSelectionConfig),
            ("hardware", hardware, Hardware),
            ("profile", profile, Profile),
        ):
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name} must be a {kind.__name__} or None, got {type(value).__name__}")
        self.config = SegmentSelectionConfig() if config is None else config
        self._hardware = hardware
        self._profile = profile
        self._read: dict[torch.device, tuple[Hardware, Profile]] = {}

    def select(
        self,
        sequence_length: int,
        batch_size: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        num_kv_heads: int | None = None,
        *,
        is_causal: bool = False,
        is_padded: bool = False,
        has_dropout: bool = False,
        offset_rule: OffsetRule = "modulo",
        tail: Tail = "ragged",
        segment_shift: int | Sequence[int] = 0,
    ) -> DilatedPattern:
        """The pattern for self-attention over ``[batch_size, sequence_length, num_heads, head_dim]``.

        Args:
            sequence_length, batch_size, num_heads, head_dim: sizes N, B, H, D of the query.
            dtype: dtype of query, key and value.
            device: device of the call.
            num_kv_heads: number G of key/value heads; None = H.
            is_causal: whether attention is causal.
            is_padded: whether there is a key padding mask.
            has_dropout: whether there is attention dropout.
            offset_rule, tail, segment_shift: options of the pattern, see :class:`DilatedPattern`.

        Raises:
            TypeError: a size is not an integer, or the dtype is not supported by attention.
            ValueError: a size is below 1, head counts do not divide, or no candidate fits the budgets.
            NotImplementedError: the free memory of this kind of device cannot be read; pass ``hardware``.
        """
        workload = Workload(
            sequence_length=sequence_length,
            batch_size=batch_size,
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            is_causal=is_causal,
            is_training=self.config.is_training,
            is_padded=is_padded,
            has_dropout=has_dropout,
            offset_rule=offset_rule,
            tail=tail,
            segment_shift=segment_shift if isinstance(segment_shift, int) else tuple(segment_shift),
        )
        return self.choose(workload, device).best.pattern

    def choose(self, workload: Workload, device: torch.device | str) -> Choice:
        """:meth:`select` for a workload, with the alternatives and their estimates."""
        hardware, profile = self.machine(device)
        return _choose(self.config, workload, hardware, profile)

    def machine(self, device: torch.device | str) -> tuple[Hardware, Profile]:
        """The hardware record and the rates used for a device.

        Raises:
            ValueError: the given record is for another kind of device.
        """
        device = torch.device(device)
        if device.type == "cuda" and device.index is None and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())  # "cuda" is the current GPU
        if self._hardware is not None and self._hardware.kind != device.type:
            raise ValueError(
                f"hardware is the record of a {self._hardware.kind!r} device, got a call on {device.type!r}; pass that "
                "device's record, or none to have it read"
            )
        if device not in self._read:
            hardware = read_hardware(device) if self._hardware is None else self._hardware
            profile = load_profile(hardware) if self._profile is None else self._profile
            self._read[device] = (hardware, Profile(()) if profile is None else profile)
        return self._read[device]


def estimate(
    pattern: DilatedPattern, workload: Workload, hardware: Hardware, profile: Profile, config: SegmentSelectionConfig
) -> Estimate:
    """The estimates for one pattern."""
    rates, counts = profile.rates_of(workload), features(pattern, workload)
    return Estimate(
        pattern,
        int(counts[FEATURES.index("operations")]),
        peak_bytes(pattern, workload, threads=hardware.processors if hardware.kind == "cpu" else None),
        weighted(nominal_rates(workload, hardware) if rates is None else rates.seconds, counts),
        coverage(pattern, workload),
        diversity(pattern, workload, config),
    )


def coverage(pattern: Pattern, workload: Workload) -> float:
    """The maximum over groups of ``selected fraction x reach``.

    The reach of segment length w is the mean over positions of the position's segment length relative to the
    sequence: ``sum over segments of length^2 / N^2``. The selected fraction is that of the positions selected by any
    key/value head: the number of distinct offsets over r. Coverage is 1 if every position attends to the whole
    sequence, in at least one head, at rate r.
    """
    length, heads = workload.sequence_length, workload.num_kv_heads
    best = 0.0
    for group in pattern.groups:
        full, tail = divmod(length, min(group.segment_length, length))
        reach = (full * min(group.segment_length, length) ** 2 + tail**2) / length**2
        offsets = {group.offset(head, heads) for head in range(heads)}
        best = max(best, len(offsets) / group.dilation_rate * reach)
    return best


def diversity(pattern: Pattern, workload: Workload, config: SegmentSelectionConfig) -> float:
    """Fraction of the octaves between the shortest and longest allowed length that contain a segment length.

    Lengths beyond the sequence count as its length; the number of octaves is capped at the allowed number of lengths.
    """

    def octave(segment_length: int) -> int:
        return min(segment_length, workload.sequence_length).bit_length()

    octaves = octave(config.max_segment_size) - octave(config.min_segment_size) + 1
    covered = {octave(group.segment_length) for group in pattern.groups}
    return min(1.0, len(covered) / min(octaves, config.max_num_segments))


@functools.lru_cache(maxsize=512)
def _choose(config: SegmentSelectionConfig, workload: Workload, hardware: Hardware, profile: Profile) -> Choice:
    estimates = [
        estimate(pattern, workload, hardware, profile, config)
        for pattern in candidates(config, workload, hardware.tile_rows)
    ]
    budget = config.memory_budget(hardware.free_bytes)
    seconds = float("inf") if config.time_budget_ms is None else config.time_budget_ms / 1e3
    fitting = tuple(one for one in estimates if one.bytes.total <= budget and one.seconds <= seconds)
    if not fitting:
        raise ValueError(_nothing_fits(config, workload, hardware, estimates, budget))
    fastest = min(one.seconds for one in fitting)
    weights = (config.coverage_weight, config.diversity_weight, config.efficiency_weight)

    def score_of(one: Estimate) -> float:
        parts = (one.coverage, one.diversity, fastest / one.seconds)
        return weighted(weights, parts) / sum(weights)

    if config.objective == "speed":
        floor = config.coverage_floor * max(one.coverage for one in fitting)
        best = min((one for one in fitting if one.coverage >= floor), key=_by_time)
    else:
        best = min(fitting, key=lambda one: (-score_of(one), *_by_time(one)))
    is_measured = profile.rates_of(workload) is not None
    return Choice(best, fastest / best.seconds, score_of(best), budget, is_measured, fitting, len(estimates))


def _by_time(one: Estimate) -> tuple[float, int]:
    return one.seconds, len(one.pattern.segment_lengths)


def _nothing_fits(
    config: SegmentSelectionConfig, workload: Workload, hardware: Hardware, estimates: list[Estimate], budget: int
) -> str:
    least = min(estimates, key=lambda one: one.bytes.total).bytes
    if least.total > budget:
        return (
            f"no segments fit the memory budget: attention over {workload} takes up to {least.total / 2**30:.3f} GiB "
            f"({least.operands / 2**30:.3f} of operands, {least.results / 2**30:.3f} of results), got "
            f"{budget / 2**30:.3f} GiB of {hardware.free_bytes / 2**30:.3f} free (memory_safety_factor "
            f"{config.memory_safety_factor}, min_free_memory_gb {config.min_free_memory_gb}); free memory, shorten the "
            "sequence or the batch, or relax the two"
        )
    assert config.time_budget_ms is not None
    shortest = min(one.seconds for one in estimates if one.bytes.total <= budget)
    return (
        f"no segments fit the time budget: the fastest of {len(estimates)} candidates takes {shortest * 1e3:.3g} ms "
        f"for attention over {workload}, got time_budget_ms {config.time_budget_ms:g}; raise it, lower "
        f"min_segment_size {config.min_segment_size}, or shorten the sequence or the batch"
    )


def candidates(config: SegmentSelectionConfig, workload: Workload, tile_rows: int) -> tuple[DilatedPattern, ...]:
    """All candidates for a workload, without duplicates, in a fixed order.

    From every base w_0 (the smallest length allowed, doubled repeatedly) two families are generated, truncated at
    every number of lengths: *geometric*, ``w_i = w_0 ratio^i`` for 2 and every ratio of the policy, and *uniform*,
    ``w_i = (i + 1) w_0``. Lengths are rounded to multiples of ``tile_rows``. A family ends with the first length that
    spans the sequence, reduced to the shortest such multiple. Rates follow the lengths, ``r_i = round(w_i / w_0)``, so
    that no group costs more per row than the previous one; in a second variant no rate exceeds the number of key/value
    heads, so that some head selects every position. The first rate is 1: every row attends to its neighbours.

    >>> import torch
    >>> workload = Workload(
    ...     sequence_length=1000, batch_size=1, num_heads=4, num_kv_heads=4, head_dim=64, dtype=torch.float32
    ... )
    >>> [pattern.segment_lengths for pattern in candidates(SegmentSelectionConfig(), workload, 128)][:3]
    [(512,), (512, 1024), (512, 768)]
    """
    sizes = {
        (lengths, rates): None
        for family in _families(config, workload.sequence_length, tile_rows)
        for lengths in (family[:count] for count in range(1, len(family) + 1))
        for rates in _rates(lengths, workload.num_kv_heads)
    }
    return tuple(
        DilatedPattern(
            lengths, rates, offset_rule=workload.offset_rule, tail=workload.tail, segment_shift=workload.segment_shift
        )
        for lengths, rates in sizes
    )


def _families(config: SegmentSelectionConfig, sequence_length: int, tile_rows: int) -> Iterator[tuple[int, ...]]:
    least, most, levels = config.min_segment_size, config.max_segment_size, range(config.max_num_segments)
    base = _aligned(least, tile_rows, least, most)
    while base <= most:
        for ratio in (2.0, *config.geometric_ratios):
            yield _cut((round(base * ratio**level) for level in levels), config, sequence_length, tile_rows)
        yield _cut(((level + 1) * base for level in levels), config, sequence_length, tile_rows)
        if base >= sequence_length:
            return
        base *= 2


def _cut(
    wanted: Iterator[int], config: SegmentSelectionConfig, sequence_length: int, tile_rows: int
) -> tuple[int, ...]:
    """Increasing aligned lengths up to the first that spans the sequence, within the limits."""
    least, most = config.min_segment_size, config.max_segment_size
    lengths: list[int] = []
    for length in (_aligned(one, tile_rows, least, most) for one in wanted):
        if length > most:
            break
        if length >= sequence_length:
            # All lengths that span the sequence are equivalent: use the shortest such multiple.
            length = min(length, max(least, -(-sequence_length // tile_rows) * tile_rows))
        if not lengths or length > lengths[-1]:
            lengths.append(length)
        if length >= sequence_length:
            break
    return tuple(lengths)


def _aligned(length: int, tile_rows: int, least: int, most: int) -> int:
    """The nearest multiple of ``tile_rows`` within the limits; the length itself if there is none."""
    near = max(1, round(length / tile_rows)) * tile_rows
    for multiple in (near, near + tile_rows, near - tile_rows):
        if least <= multiple <= most:
            return multiple
    return length


def _rates(lengths: tuple[int, ...], num_kv_heads: int) -> Iterator[tuple[int, ...]]:
    free = tuple(max(1, round(length / lengths[0])) for length in lengths)
    yield free
    yield tuple(min(rate, num_kv_heads) for rate in free)
