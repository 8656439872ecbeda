"""Nominal specifications of devices and links, read once from ``data_sheets.toml``, which names their sources."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSheet:
    """The manufacturer's specification of a device, or of one thread or multiprocessor of it.

    >>> sheet_of("H100 SXM").flops["bfloat16"]
    989000000000000.0
    """

    name: str
    family: str
    """Device family; selects the kernels."""
    memory_bytes: int
    """Device memory in bytes; 0 if the device uses the host's."""
    bytes_per_second: float
    """Memory bandwidth in bytes per second."""
    flops: Mapping[str, float]
    """Peak dense matrix throughput in FLOP/s by dtype: float32, tf32, bfloat16, float16, float8."""
    processors: int
    """Number of multiprocessors; 1 for a CPU thread."""
    watts: float
    """Maximum power in watts; 0 if not specified."""
    link: str
    """Name of the link between devices of a node; empty if there is none."""


@dataclass(frozen=True, slots=True)
class Link:
    """An interconnect between devices."""

    name: str
    bytes_per_second: float
    """Bandwidth in one direction, in bytes per second."""


@functools.cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("data_sheets.toml").read_text(encoding="utf-8"))


_REPRESENTATIVE = {"H100": "H100 SXM", "A100": "A100 80 GB", "RTX": "RTX 3090", "AMD MI": "MI250X"}
"""Data sheets that stand for families of several devices."""


def _sheet(name: str, family: str, table: Mapping[str, Any]) -> DataSheet:
    return DataSheet(
        name=name,
        family=family,
        memory_bytes=int(table.get("memory_bytes", 0)),
        bytes_per_second=table["bytes_per_second"],
        flops=table["flops"],
        processors=table.get("processors", 1),
        watts=table.get("watts", 0.0),
        link=table.get("link", ""),
    )


def device_names() -> tuple[str, ...]:
    """Names of the devices with a data sheet."""
    return tuple(_tables()["device"])


def sheet_of(name: str) -> DataSheet:
    """The data sheet of a device by name, case-insensitive.

    Raises:
        ValueError: no data sheet has that name.
    """
    for known, table in _tables()["device"].items():
        if known.lower() == name.strip().lower():
            return _sheet(known, table["family"], table)
    raise ValueError(f"there is no data sheet of {name!r}; there are {', '.join(device_names())}")


def family_sheet(family: str) -> DataSheet:
    """The representative data sheet of a device family: of a thread for "CPU", of a multiprocessor for "other GPU".

    Raises:
        ValueError: the family is unknown.
    """
    families = dict.fromkeys(table["family"] for table in _tables()["device"].values()) | {"CPU": None}
    if family not in families:
        raise ValueError(f"architecture must be one of {', '.join(families)}, got {family!r}")
    if family == "CPU":
        return thread_sheet(512)
    return unknown_gpu_sheet() if family == "other GPU" else sheet_of(_REPRESENTATIVE.get(family, family))


def sheet_of_product(product: str) -> DataSheet | None:
    """The data sheet of a device by the product name that its driver reports; None if there is none.

    >>> sheet_of_product("NVIDIA GeForce RTX 4090").name
    'RTX 4090'
    """
    for name, table in _tables()["device"].items():
        if any(word.lower() in product.lower() for word in table["words"]):
            return _sheet(name, table["family"], table)
    return None


def thread_sheet(vector_bits: int) -> DataSheet:
    """Data sheet of one CPU thread with vectors of 128, 256 or 512 bits."""
    return _sheet(f"a thread with {vector_bits}-bit vectors", "CPU", _tables()["thread"][str(vector_bits)])


def unknown_gpu_sheet() -> DataSheet:
    """Data sheet of one multiprocessor of a GPU without a data sheet, and the assumed number of multiprocessors."""
    return _sheet("other GPU", "other GPU", _tables()["other_gpu"])


def link_names() -> tuple[str, ...]:
    """Names of the links with a data sheet."""
    return tuple(_tables()["link"])


def link_of(name: str) -> Link:
    """A link by name, case-insensitive.

    Raises:
        ValueError: no link has that name.

    >>> link_of("InfiniBand NDR").bytes_per_second
    50000000000.0
    """
    for known, table in _tables()["link"].items():
        if known.lower() == name.strip().lower():
            return Link(known, table["bytes_per_second"])
    raise ValueError(f"there is no link {name!r}; there are {', '.join(link_names())}")
