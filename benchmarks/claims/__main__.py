"""Judge every claim of the documents of the earlier package and write the page, about 10 minutes on two cores.

python -m benchmarks.claims                    # all of them
python -m benchmarks.claims --only 125M 1B     # those whose names contain one of these; others of this code stay
python -m benchmarks.claims --page             # the page of the docs from the file of results
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.measured_code import is_stale
from benchmarks.options import parse, parser_of
from dilated_attention_pytorch.benchmarks.results import module_command, origin
from dilated_attention_pytorch.output import write_text

from . import calls, counted, training
from .claim import Claim, Finding, claims
from .page import FILE, PAGE, page, read_results, write_findings

Judge = Callable[[Mapping[str, Any]], Finding]

JUDGES: dict[str, Judge] = {
    judge.__name__: judge
    for judge in (
        training.parameters,
        training.longest,
        training.fits,
        training.kept,
        training.unlimited,
        training.part,
        training.part_ratio,
        training.recomputed_operations,
        training.training_time,
        calls.scores,
        calls.operands,
        calls.throughput,
        calls.call_memory,
        calls.call_capacity,
        calls.memory_table,
        calls.memory_of_ranks,
        calls.block_speed,
        calls.overlap,
        calls.packing,
        counted.undefined,
        counted.reduction,
        counted.price,
        counted.projections,
        counted.zeroed,
        counted.pruned,
        counted.distinct,
        counted.sheet_memory,
        counted.sheet_slower,
        counted.sheet_has,
        counted.sheet_ratio,
    )
}
"""What decides, by the name in the data."""


def judge(claim: Claim) -> Finding:
    """What is found of a claim."""
    return JUDGES[claim.judge](claim.given)


def main() -> None:
    """The command."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="judge claims with a word in their names")
    parser.add_argument(
        "--missing", action="store_true", help="judge what has no finding yet, after a stop for example"
    )
    parser.add_argument("--page", action="store_true", help="judge nothing, write the page of the docs")
    arguments = parse(parser, FILE.name)
    file = arguments.output
    where, findings = read_results(file) if file.exists() else ({}, {})
    if not arguments.page:
        if file.exists() and is_stale(json.loads(file.read_text(encoding="utf-8"))):
            findings = {}  # of other code
        where = origin(module_command())
        asked = [
            claim
            for claim in claims()
            if not (arguments.missing and claim.name in findings)
            and (not arguments.only or any(word in claim.name for word in arguments.only))
        ]
        if arguments.tiny:
            asked = asked[-2:]  # by data sheets alone
        for claim in asked:
            begun = time.monotonic()
            findings[claim.name] = found = judge(claim)
            print(
                f"{found.verdict}: {claim.name}: {found.ours}; {found.reason} ({time.monotonic() - begun:.1f} s)",
                flush=True,
            )
            findings = {claim.name: findings[claim.name] for claim in claims() if claim.name in findings}
            write_findings(file, where, findings)
        print(f"{dict(Counter(found.verdict for found in findings.values()))}; written: {file}")
    if all(claim.name in findings for claim in claims()) and not arguments.tiny:
        write_text(PAGE, page(where, findings))
        print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
