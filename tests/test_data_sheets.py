"""Nominal figures: each has a source and a plausible magnitude, and selection reads them."""

from __future__ import annotations

import pytest

from dilated_attention_pytorch import data_sheets
from dilated_attention_pytorch.selection.hardware import Hardware

DEVICES = data_sheets.device_names()
TABLES = data_sheets._tables()
PLAUSIBLE = {
    "memory_bytes": (8e9, 300e9),
    "bytes_per_second": (0.3e12, 10e12),
    "processors": (20, 400),
    "watts": (150, 1200),
}


@pytest.mark.parametrize("name", DEVICES)
def test_every_figure_of_a_device_has_a_source_and_a_plausible_magnitude(name: str) -> None:
    sheet = data_sheets.sheet_of(name)
    table = TABLES["device"][name]
    assert table.keys() >= {*PLAUSIBLE, "flops", "link", "source"}
    assert all("https://" in TABLES["source"][one] for one in (table["source"], *table.get("source_of", {}).values()))
    compared = table.get("compared", {})
    assert all(TABLES["page"][page].startswith("https://") for page in compared)
    assert {figure for figures in compared.values() for figure in figures} <= {*PLAUSIBLE, "flops", "link"}
    for field, (least, most) in PLAUSIBLE.items():
        assert least <= getattr(sheet, field) <= most, field
    rates = sheet.flops
    assert 5e12 < rates["float32"] < 200e12
    assert rates.get("float8", rates["float16"]) >= rates["float16"]
    assert rates.get("bfloat16", rates["float16"]) == rates["float16"]
    assert rates.get("tf32", rates["float32"]) >= rates["float32"]
    # Data sheets print rates of sparse matrices, twice as high: operations a byte would then stand out.
    assert rates["float16"] / sheet.bytes_per_second < 430
    assert data_sheets.link_of(sheet.link).bytes_per_second > 1e10


@pytest.mark.parametrize("name", data_sheets.link_names())
def test_every_link_has_a_source_and_a_plausible_rate(name: str) -> None:
    link = data_sheets.link_of(name)
    assert 1e9 <= link.bytes_per_second <= 1e12
    table = TABLES["link"][name]
    assert len(TABLES["source"][table["source"]]) > 20
    assert "compared" not in table or table["compared"] in TABLES["page"]


def test_a_thread_computes_by_the_width_of_its_vectors() -> None:
    rates = [data_sheets.thread_sheet(bits).flops["float32"] for bits in (128, 256, 512)]
    assert rates == [25e9, 50e9, 100e9]
    assert all(table["source"] in TABLES["source"] for table in TABLES["thread"].values())


def test_selection_reads_the_same_figures() -> None:
    for family, name in (("H200", "H200"), ("A100", "A100 80 GB"), ("RTX", "RTX 3090"), ("AMD MI", "MI250X")):
        sheet, hardware = data_sheets.sheet_of(name), Hardware.of_architecture(family, free_bytes=1)
        assert hardware.flops_16 == sheet.flops["float16"]
        assert hardware.flops_32 == sheet.flops["float32"]
        assert hardware.bytes_per_second == sheet.bytes_per_second
    products = {
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H100 PCIe": "H100",
        "NVIDIA GH200 480GB": "H200",
        "NVIDIA B200": "B200",
        "NVIDIA A100-SXM4-40GB": "A100",
        "Tesla V100-SXM2-32GB": "V100",
        "NVIDIA L40S": "RTX",
        "NVIDIA GeForce RTX 5090": "RTX",
        "NVIDIA GeForce GTX 1080": "other GPU",
        "AMD Instinct MI250X": "AMD MI",
        "AMD Instinct MI210": "other GPU",
        "Tesla T4": "other GPU",
    }
    for product, family in products.items():
        found = data_sheets.sheet_of_product(product)
        assert ("other GPU" if found is None else found.family) == family


def test_unknown_names_are_answered_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"no data sheet of 'H300'; there are H200, H100 SXM, .*MI325X"):
        data_sheets.sheet_of("H300")
    with pytest.raises(ValueError, match=r"no link 'token ring'; there are NVLink 1, .*Ethernet 800"):
        data_sheets.link_of("token ring")
    assert data_sheets.sheet_of(" h100 sxm ").name == "H100 SXM"
