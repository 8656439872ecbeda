"""From a shape, a policy and a machine to a pattern."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dilated_attention_pytorch.patterns import DilatedPattern, OffsetRule, Tail

from . import score
from .candidates import candidates
from .config import SegmentSelectionConfig
from .cost import nominal_seconds
from .counts import flops, num_pairs
from .hardware import Hardware, read_hardware
from .memory import Bytes, peak_bytes
from .profile import Profile, load_profile
from .workload import Workload


@dataclass(frozen=True, slots=True)
class Estimate:
    """One candidate, with everything that it is judged by."""

    pattern: DilatedPattern
    num_pairs: int
    """Pairs of a query and a key, exactly those of the plan."""
    flops: int
    """Operations of the matrix products over them."""
    bytes: Bytes
    """Upper bound of the memory at the peak."""
    seconds: float
    """Predicted time: measured rates where there is a profile for the dtype, else nominal ones."""
    coverage: float
    """See :func:`dilated_attention_pytorch.selection.score.coverage`."""
    diversity: float
    """See :func:`dilated_attention_pytorch.selection.score.diversity`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, among what, and why."""

    best: Estimate
    efficiency: float
    """Time of the fastest candidate within the budgets, over that of the best."""
    score: float
    """Weighted mean of coverage, diversity and efficiency."""
    memory_budget: int
    """Bytes that the policy allows."""
    is_measured: bool
    """Whether the seconds come from a profile of this machine."""
    fitting: tuple[Estimate, ...]
    """All candidates within the budgets, in their fixed order."""
    num_candidates: int
    """How many were looked at."""


class DynamicSegmentSelector:
    """Chooses the segment lengths and dilation rates of a call: a pure function of shape, policy and machine.

    The candidates (:func:`candidates`) that fit the memory budget and the time budget are compared: by
    ``(w_c coverage + w_d diversity + w_e efficiency) / (w_c + w_d + w_e)``, or, for ``objective="speed"``, by time
    among those whose coverage is at least ``coverage_floor`` times the highest of all that fit. Of equals the faster,
    then the one with fewer groups, then the one that comes first.

    The machine is read once for every device, at the first choice for it, and so is its stored profile: choices that
    follow do not depend on what has become of the free memory. A new selector reads both anew.

    Args:
        config: the policy; the defaults without it.
        hardware: the machine to choose for; without it the device's own.
        profile: measured rates; without it the stored ones of this machine (`dilated-attention tune` makes them), and
            nominal rates where there are none. ``Profile(())`` takes nominal rates in any case.

    Raises:
        TypeError: an argument is of the wrong type.

    >>> import torch
    >>> hardware = Hardware.of_architecture("H100", free_bytes=60 << 30)
    >>> selector = DynamicSegmentSelector(hardware=hardware, profile=Profile(()))
    >>> pattern = selector.select(4096, 1, 8, 64, torch.bfloat16, "cuda")
    >>> pattern.segment_lengths, pattern.dilation_rates
    ((512, 1024, 2048, 4096), (1, 2, 4, 8))
    """

    def __init__(
        self,
        config: SegmentSelectionConfig | None = None,
        *,
        hardware: Hardware | None = None,
        profile: Profile | None = None,
    ) -> None:
        for name, value, kind in (
            ("config", config, SegmentSelectionConfig), ("hardware", hardware, Hardware), ("profile", profile, Profile)
        ):  # fmt: skip
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
            dtype: of query, key and value.
            device: where the call is computed.
            num_kv_heads: number G of key/value heads; H without it.
            is_causal: whether queries see nothing after them.
            is_padded: whether there will be a key padding mask.
            has_dropout: whether probabilities are dropped.
            offset_rule, tail, segment_shift: of the pattern, see :class:`DilatedPattern`.

        Raises:
            TypeError: a size is no integer, or the dtype is none of attention's.
            ValueError: a size below 1, heads that do not divide; or no candidate is within the memory and time budget.
            NotImplementedError: the free memory of this kind of device cannot be read; pass ``hardware``.
        """
        workload = Workload(
            sequence_length=sequence_length, batch_size=batch_size, num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads, head_dim=head_dim, dtype=dtype,
            is_causal=is_causal, is_training=self.config.is_training, is_padded=is_padded, has_dropout=has_dropout,
            offset_rule=offset_rule, tail=tail,
            segment_shift=segment_shift if isinstance(segment_shift, int) else tuple(segment_shift),
        )  # fmt: skip
        return self.choose(workload, device).best.pattern

    def choose(self, workload: Workload, device: torch.device | str) -> Choice:
        """:meth:`select` for a workload, with what the choice is made of."""
        hardware, profile = self.machine(device)
        return _choose(self.config, workload, hardware, profile)

    def machine(self, device: torch.device | str) -> tuple[Hardware, Profile]:
        """The record and the rates that choices for a device are made with.

        Raises:
            ValueError: the record that was given is of another kind of device.
        """
        device = torch.device(device)
        if device.type == "cuda" and device.index is None and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())  # one GPU, one record
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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config})"


def estimate(
    pattern: DilatedPattern,
    workload: Workload,
    hardware: Hardware,
    profile: Profile,
    config: SegmentSelectionConfig,
) -> Estimate:
    """Everything that a candidate is judged by."""
    measured = profile.seconds_of(pattern, workload, hardware)
    return Estimate(
        pattern, num_pairs(pattern, workload), flops(pattern, workload), peak_bytes(pattern, workload, hardware),
        nominal_seconds(pattern, workload, hardware) if measured is None else measured,
        score.coverage(pattern, workload), score.diversity(pattern, workload, config),
    )  # fmt: skip


@functools.lru_cache(maxsize=512)
def _choose(config: SegmentSelectionConfig, workload: Workload, hardware: Hardware, profile: Profile) -> Choice:
    found = [
        estimate(pattern, workload, hardware, profile, config)
        for pattern in candidates(config, workload, hardware.tile_rows)
    ]
    budget = config.memory_budget(hardware.free_bytes)
    seconds = float("inf") if config.time_budget_ms is None else config.time_budget_ms / 1e3
    fitting = tuple(one for one in found if one.bytes.total <= budget and one.seconds <= seconds)
    if not fitting:
        raise ValueError(_nothing_fits(config, workload, hardware, found, budget))
    fastest = min(one.seconds for one in fitting)
    weights = (config.coverage_weight, config.diversity_weight, config.efficiency_weight)

    def score_of(one: Estimate) -> float:
        parts = (one.coverage, one.diversity, fastest / one.seconds)
        return sum(weight * part for weight, part in zip(weights, parts, strict=True)) / sum(weights)

    if config.objective == "speed":
        floor = config.coverage_floor * max(one.coverage for one in fitting)
        best = min((one for one in fitting if one.coverage >= floor), key=_by_time)
    else:
        best = min(fitting, key=lambda one: (-score_of(one), *_by_time(one)))
    measured = profile.seconds_of(best.pattern, workload, hardware) is not None
    return Choice(best, fastest / best.seconds, score_of(best), budget, measured, fitting, len(found))


def _by_time(one: Estimate) -> tuple[float, int]:
    return one.seconds, len(one.pattern.segment_lengths)


def _nothing_fits(
    config: SegmentSelectionConfig, workload: Workload, hardware: Hardware, found: list[Estimate], budget: int
) -> str:
    least = min(found, key=lambda one: one.bytes.total).bytes
    if least.total > budget:
        return (
            f"no segments fit the memory budget: attention over {workload} takes up to {least.total / 2**30:.3f} GiB "
            f"({least.operands / 2**30:.3f} of operands, {least.results / 2**30:.3f} of results), got "
            f"{budget / 2**30:.3f} GiB of {hardware.free_bytes / 2**30:.3f} free (memory_safety_factor "
            f"{config.memory_safety_factor}, min_free_memory_gb {config.min_free_memory_gb}); free memory, shorten the "
            "sequence or the batch, or relax the two"
        )
    assert config.time_budget_ms is not None
    shortest = min(one.seconds for one in found if one.bytes.total <= budget)
    return (
        f"no segments fit the time budget: the fastest of {len(found)} candidates takes {shortest * 1e3:.3g} ms for "
        f"attention over {workload}, got time_budget_ms {config.time_budget_ms:g}; raise it, lower min_segment_size "
        f"{config.min_segment_size}, or shorten the sequence or the batch"
    )
