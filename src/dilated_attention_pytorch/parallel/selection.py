"""Segment selection that all ranks agree on."""

from __future__ import annotations

import dataclasses

import torch
from torch.distributed.device_mesh import DeviceMesh

from dilated_attention_pytorch.selection import (
    DynamicSegmentSelector,
    Hardware,
    Profile,
    Rates,
    SegmentSelectionConfig,
)

from .communicator import communicator_of, world_mesh
from .failure import RankFailure, disagreement


def agreed_selector(
    config: SegmentSelectionConfig | None = None,
    *,
    mesh: DeviceMesh | None = None,
    hardware: Hardware | None = None,
    profile: Profile | None = None,
) -> DynamicSegmentSelector:
    """A selector that makes the same choices on every rank of ``mesh``. A collective: all ranks call it.

    It uses the hardware record of the mesh's first rank with the smallest free memory of all ranks, and the rates that
    the first rank measured or was given. Later choices need no communication: they are a pure function of
    these values. Each rank is assumed to compute the whole call, as under
    data parallelism; where ranks share the rows of a sequence, each needs less memory than estimated.

    Args:
        config: selection policy, the same on every rank.
        mesh: the ranks, in one or two dimensions; None = all ranks of the process group.
        hardware: this rank's hardware record; None = the device's own.
        profile: measured rates, of which the first rank's are used; None = those stored on its machine.

    Returns:
        the selector, for ``select`` and for ``DynamicDilatedAttention(selector=...)``. In a single process without a
        mesh, a local selector.

    Raises:
        TypeError: ``mesh`` is not a ``DeviceMesh``, or another argument is of the wrong type.
        RankFailure: policies or device kinds differ; the message names the rank and the difference.

    >>> from dilated_attention_pytorch.selection import SegmentSelectionConfig
    >>> agreed_selector(SegmentSelectionConfig(max_num_segments=3)).config.max_num_segments  # one process
    3
    """
    own = DynamicSegmentSelector(config, hardware=hardware, profile=profile)
    device_type = _kind(hardware, mesh)
    mesh = world_mesh(device_type) if mesh is None else mesh
    if mesh is None:
        return own
    record, rates = own.machine(torch.device(device_type))
    said = {"the kind of device": record.kind}
    said |= {f"SegmentSelectionConfig.{name}": str(value) for name, value in dataclasses.asdict(own.config).items()}
    for communicator in (communicator_of(mesh, dim) for dim in range(mesh.ndim)):
        number = communicator.agree({"call": "agreed_selector"})
        ranks = communicator.all_gather_json([said, dataclasses.asdict(record), _as_lists(rates)], tag=number)
        if any(policy != said for policy, _, _ in ranks):
            raise RankFailure(disagreement([0] * len(ranks), [policy for policy, _, _ in ranks], communicator.ranks))
        _, first, lists = ranks[0]
        least = min(other["free_bytes"] for _, other, _ in ranks)
        record = dataclasses.replace(Hardware(**first), free_bytes=least)
        rates = Profile(tuple(Rates(dtype, is_training, tuple(seconds)) for dtype, is_training, seconds in lists))
    return DynamicSegmentSelector(own.config, hardware=record, profile=rates)


def _kind(hardware: Hardware | None, mesh: DeviceMesh | None) -> str:
    """The device kind that segments are chosen for."""
    if hardware is not None:
        return hardware.kind
    if mesh is not None:
        return mesh.device_type
    return "cuda" if torch.cuda.is_available() else "cpu"


def _as_lists(profile: Profile) -> list[tuple[str, bool, tuple[float, ...]]]:
    """The rates that predict better than the formula; others are not used."""
    return [(entry.dtype, entry.is_training, entry.seconds) for entry in profile.rates if entry.is_better]
