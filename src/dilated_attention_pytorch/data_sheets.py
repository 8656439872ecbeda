"""Nominal figures of devices and links, each with its source: ``data_sheets.toml``, read once."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSheet:
    """What a manufacturer says of a device, or of one thread or multiprocessor of it.

    >>> sheet_of("H100 SXM").flops["bfloat16"]
    989000000000000.0
    """

    name: str
    family: str
    """The family whose kernels it takes."""
    memory_bytes: int
    """Memory; 0 where it is not the device's own."""
    bytes_per_second: float
    """Rate of memory."""
    flops: Mapping[str, float]
    """Operations a second of dense matrix products, by dtype: float32, tf32, bfloat16, float16, float8."""
    processors: int
    """Multiprocessors; 1 for a thread."""
    cache_bytes: int
    """Second-level cache, of the whole GPU or of a core."""
    watts: float
    """Power at full load; 0 where nothing is said of it."""
    link: str
    """The link to its neighbours in a node; empty where there is none."""
    sources: Mapping[str, str]
    """The document of every figure, by the name of the field."""


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between devices."""

    name: str
    bytes_per_second: float
    """In one direction."""
    source: str
    """The document that says so."""


@functools.cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("data_sheets.toml").read_text(encoding="utf-8"))


_FIGURES = ("memory_bytes", "bytes_per_second", "flops", "processors", "cache_bytes", "watts", "link")


def _sheet(name: str, family: str, table: Mapping[str, Any]) -> DataSheet:
    documents = _tables()["source"]
    of = table.get("source_of", {})
    return DataSheet(
        name=name, family=family, memory_bytes=int(table.get("memory_bytes", 0)),
        bytes_per_second=table["bytes_per_second"], flops=table["flops"], processors=table.get("processors", 1),
        cache_bytes=table["cache_bytes"], watts=table.get("watts", 0.0), link=table.get("link", ""),
        sources={figure: documents[of.get(figure, table["source"])] for figure in _FIGURES if figure in table},
    )  # fmt: skip


def device_names() -> tuple[str, ...]:
    """The devices that there are data sheets of."""
    return tuple(_tables()["device"])


def sheet_of(name: str) -> DataSheet:
    """The data sheet of a device by its name here; upper and lower case count alike.

    Raises:
        ValueError: there is none of that name.
    """
    for known, table in _tables()["device"].items():
        if known.lower() == name.strip().lower():
            return _sheet(known, table["family"], table)
    raise ValueError(f"there is no data sheet of {name!r}; there are {', '.join(device_names())}")


def sheet_of_product(product: str) -> DataSheet | None:
    """The data sheet of a device by the name that it has for itself; None if there is none.

    >>> sheet_of_product("NVIDIA GeForce RTX 4090").name
    'RTX 4090'
    """
    for name, table in _tables()["device"].items():
        if any(word.lower() in product.lower() for word in table["words"]):
            return _sheet(name, table["family"], table)
    return None


def thread_sheet(vector_bits: int) -> DataSheet:
    """Of one thread of a processor with vectors of 128, 256 or 512 bits."""
    return _sheet(f"a thread with {vector_bits}-bit vectors", "CPU", _tables()["thread"][str(vector_bits)])


def unknown_gpu_sheet() -> DataSheet:
    """Of one multiprocessor of a GPU without a data sheet, and the number that one is taken to have."""
    return _sheet("other GPU", "other GPU", _tables()["other_gpu"])


def link_names() -> tuple[str, ...]:
    """The links whose rates are known."""
    return tuple(_tables()["link"])


def link_of(name: str) -> Link:
    """A link by its name; upper and lower case count alike.

    Raises:
        ValueError: there is none of that name.

    >>> link_of("InfiniBand NDR").bytes_per_second
    50000000000.0
    """
    for known, table in _tables()["link"].items():
        if known.lower() == name.strip().lower():
            return Link(known, table["bytes_per_second"], _tables()["source"][table["source"]])
    raise ValueError(f"there is no link {name!r}; there are {', '.join(link_names())}")
