"""The claims are those of the earlier package's documents, row by row."""

from __future__ import annotations

import io

from rich.console import Console

from dilated_attention_pytorch.benchmarks.claims import CLAIMS, print_claims
from dilated_attention_pytorch.benchmarks.presets import PRESETS, planned_cases
from dilated_attention_pytorch.benchmarks.results import Row
from dilated_attention_pytorch.benchmarks.settings import BenchSettings
from dilated_attention_pytorch.benchmarks.shapes import SHAPES

HYBRID_RING = [
    (1024, 113, 56.48, 7858),
    (2048, 340, 85.00, 14415),
    (4096, 518, 129.43, 6948),
    (8192, 816, 101.95, 6261),
    (16384, 1038, 64.86, 3523),
]


def test_the_rows_are_those_of_the_documents() -> None:
    ring = [claim for claim in CLAIMS if claim.shape == "hybrid-ring"]
    assert [
        (claim.rows, claim.peak_megabytes, claim.kilobytes_per_token, claim.tokens_per_second) for claim in ring
    ] == HYBRID_RING
    (heads,) = (claim for claim in CLAIMS if claim.shape == "head-parallel")
    assert (heads.rows, heads.milliseconds, heads.peak_megabytes, heads.kilobytes_per_token) == (8192, 8.3, 114, 14.25)
    assert len(CLAIMS) == len(ring) + 1


def test_the_preset_measures_every_claim_in_float32() -> None:
    cases = list(planned_cases(BenchSettings(), PRESETS["claims"]))
    assert {(claim.shape, claim.rows) for claim in CLAIMS} == {(case.shape, case.rows) for case in cases}
    assert {case.dtype for case in cases} == {"float32"}


def test_a_claim_stands_beside_the_fastest_of_ours_with_its_hardware() -> None:
    case = SHAPES["hybrid-ring"].case(rows=2048)
    rows = [
        Row(case=case, contestant=name, computes="pattern", status="timed", samples=[seconds], peak_bytes=20_000_000)
        for name, seconds in (("ours, aten", 0.5), ("ours, triton", 0.25), ("dense SDPA", 0.01))
    ]
    console = Console(file=io.StringIO(), width=200)
    print_claims(rows, "this machine", console)
    said = console.file.getvalue()
    for words in ("GTX 1080", "14,415 tokens/s", "8,192 tokens/s", "340 MB", "20 MB", "85.00 KB", "9.77 KB"):
        assert words in said
