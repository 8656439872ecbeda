"""What is found of every claim, as a file of results and as a page of the docs."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.options import write_results

from .claim import RESULTS, Claim, Finding, claims

FILE = RESULTS / "claims.json"
PAGE = Path(__file__).parents[2] / "docs" / "claims.md"

_HEAD = """# The earlier package's figures

Documents of an earlier package of this name promise throughputs, memory, lengths and costs. This page lists all their
headline figures: the claim, the test that it needs, and our result.
`python -m benchmarks.claims` makes the page from [the claims](../benchmarks/claims/claims.toml), through
[a results file](../benchmarks/results/claims.json). Verdicts are computed wherever possible: the
[planner](planner.md) counts the live memory of a step, result files of this repository have the measurements, and
[data sheets](../src/dilated_attention_pytorch/data_sheets.toml) bound the performance of a GPU.

- **confirmed**: measurements or plans of this package reach the claimed figure. This does not mean that the earlier
  package reached it.
- **refuted**: measurements or plans of this package contradict the figure.
- **not testable here**: no such machine was available, or the document does not say what was compared with what.

A figure with "~" may be off by a tenth; a number of tokens has to fit in full. The documents identify models by their
number of weights. The shapes are those of GPT-3 where it has that size, with the documents' own segments of 2,048,
4,096 and 8,192 at rates of 1, 2 and 4. "All optimizations" are autocast to bfloat16, recomputed blocks and AdamW in
8 bits.

{count}, of {all} figures. Planned with torch {torch} on {date}.
"""


def write_findings(file: Path, origin: Mapping[str, Any], findings: Mapping[str, Finding]) -> None:
    """The findings by the name of the claim, with where they were made."""
    found = {name: dataclasses.asdict(finding) for name, finding in findings.items()}
    write_results(file, "planner", {"machine": dict(origin), "findings": found})


def read_results(file: Path) -> tuple[dict[str, Any], dict[str, Finding]]:
    """What :func:`write_findings` wrote."""
    values = json.loads(file.read_text(encoding="utf-8"))
    return values["machine"], {name: Finding(**found) for name, found in values["findings"].items()}


def page(origin: Mapping[str, Any], findings: Mapping[str, Finding]) -> str:
    """The page of the docs, document by document."""
    all_claims = claims()
    count = Counter(findings[claim.name].verdict for claim in all_claims)
    documents = dict.fromkeys(claim.document for claim in all_claims)
    lines = [
        _HEAD.format(
            count=", ".join(f"{number} {verdict}" for verdict, number in count.most_common()),
            all=len(all_claims),
            torch=origin["versions"]["torch"].partition("+")[0],
            date=origin["date"],
        )
    ]
    for document in documents:
        lines += [
            f"## {document}",
            "",
            "| the document says | it takes | verdict | here | why |",
            "|---|---|---|---|---|",
        ]
        lines += [_row(claim, findings[claim.name]) for claim in all_claims if claim.document == document]
        lines.append("")
    return "\n".join(lines)


def _row(claim: Claim, finding: Finding) -> str:
    files = ", ".join(f"[{name}](../benchmarks/results/{name})" for name in claim.measured)
    why = f"{_plain(finding.reason)}{f' ({files})' if files else ''}"
    cells = (
        f"“{_plain(claim.text)}” ({_plain(claim.where)})",
        _plain(claim.needs),
        f"**{finding.verdict}**",
        _plain(finding.ours),
        why,
    )
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """Text that a cell of Markdown takes as it is."""
    return text.replace("|", "/").replace("*", r"\*").replace("_", r"\_").replace("~", r"\~").replace("[", r"\[")
