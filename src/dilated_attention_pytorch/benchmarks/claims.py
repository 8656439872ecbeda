"""The earlier package's published figures, with their hardware, for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from .results import Row
from .shapes import Case


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """Figures of one shape in the earlier package's documents; None where they give none."""

    text: str
    shape: str
    rows: int
    hardware: str
    milliseconds: float | None = None
    tokens_per_second: float | None = None
    peak_megabytes: float
    kilobytes_per_token: float


_GPUS = "2x GTX 1080, 8 GB"

CLAIMS: tuple[Claim, ...] = (
    *(
        Claim(
            text="hybrid-ring.txt",
            shape="hybrid-ring",
            rows=rows,
            hardware=_GPUS,
            tokens_per_second=rate,
            peak_megabytes=megabytes,
            kilobytes_per_token=kilobytes,
        )
        for rows, megabytes, kilobytes, rate in (
            (1024, 113, 56.48, 7858),
            (2048, 340, 85.00, 14415),
            (4096, 518, 129.43, 6948),
            (8192, 816, 101.95, 6261),
            (16384, 1038, 64.86, 3523),
        )
    ),
    Claim(
        text="head-parallel.txt",
        shape="head-parallel",
        rows=8192,
        hardware="not named",
        milliseconds=8.3,
        peak_megabytes=114,
        kilobytes_per_token=14.25,
    ),
)
"""All rows of those documents' tables. Memory is per GPU; the documents do not say whether gradients were computed."""


def claim_of(case: Case) -> Claim | None:
    """The claim for this shape and number of rows; None if there is none."""
    return next((claim for claim in CLAIMS if (claim.shape, claim.rows) == (case.shape, case.rows)), None)


def print_claims(rows: Sequence[Row], device: str, console: Console) -> None:
    """Print the claims for the shapes that were run, next to our fastest implementation."""
    table = Table(
        "claim",
        "N",
        "hardware claimed",
        "claimed",
        "here",
        "of the call",
        "memory claimed",
        "here",
        "a token claimed",
        "here",
        title="claims of the earlier package beside this machine",
        title_justify="left",
        caption=f"here: {device}; float32 at H = 8, D = 64. On other hardware: a ratio of the two would say nothing of "
        "the code. Memory here is all of a call: operands, results and everything between.",
        caption_justify="left",
    )
    for case in dict.fromkeys(row.case for row in rows):
        claim = claim_of(case)
        ours = [row for row in rows if row.case == case and row.status == "timed" and row.contestant.startswith("ours")]
        if claim is None or not ours:
            continue
        best = min(ours, key=lambda row: row.seconds)
        if claim.milliseconds is not None:
            speed = f"{claim.milliseconds} ms", f"{1e3 * best.seconds:,.1f} ms"
        else:
            speed = f"{claim.tokens_per_second:,.0f} tokens/s", f"{case.rows / best.seconds:,.0f} tokens/s"
        memory, per_token = "not measured", "not measured"
        if best.peak_bytes is not None:
            memory, per_token = f"{best.peak_bytes / 1e6:,.0f} MB", f"{best.peak_bytes / 1e3 / case.rows:.2f} KB"
        table.add_row(
            claim.text,
            f"{claim.rows:,}",
            claim.hardware,
            *speed,
            case.mode.replace("_", " + "),
            f"{claim.peak_megabytes:,.0f} MB",
            memory,
            f"{claim.kilobytes_per_token:.2f} KB",
            per_token,
        )
    if table.row_count:
        console.print(table)
