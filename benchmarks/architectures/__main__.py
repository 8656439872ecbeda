"""Judge every architecture of the installed transformers and write the table, about 15 minutes on two cores.

python -m benchmarks.architectures                      # all of them
python -m benchmarks.architectures --only bert llama    # these model types; other rows of this code stay
python -m benchmarks.architectures --page               # the page of the docs from the file of results
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

import torch

from benchmarks.measured_code import is_current, read_all
from benchmarks.study import file_of_results
from dilated_attention_pytorch.benchmarks.results import module_command, origin
from dilated_attention_pytorch.output import write_text

from .kinds import Kind, all_kinds, kinds_of
from .page import PAGE, RESULTS, page, read_results, write_results
from .sweep import sweep
from .verdict import NOT_APPLICABLE, Verdict


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="one model type, in seconds: checks the command")
    parser.add_argument("--output", type=Path, help="file of the results (default: benchmarks/results)")
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="model types to judge; other rows of this code stay")
    parser.add_argument("--missing", action="store_true", help="judge what has no row yet, after a stop for example")
    parser.add_argument("--page", action="store_true", help="judge nothing, write the page of the docs")
    parser.add_argument("--afresh", action="store_true", help="search inputs anew, not first those of the file's rows")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time (default: %(default)s)")
    arguments = parser.parse_args()
    read_all()
    file = file_of_results(arguments.output, RESULTS.name, is_tiny=arguments.tiny, is_if_stale=False)
    old_origin, old = read_results(file) if file.exists() else ({}, [])
    if arguments.page:
        write_text(PAGE, page(old_origin, old))
        return
    torch.set_num_threads(1)
    import transformers

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    kinds = kinds_of("llama") if arguments.tiny else all_kinds()
    rows = {_kind(row): row for row in old}
    wanted = set(kinds)
    recipes = {} if arguments.afresh else {kind: row.recipe for kind, row in rows.items() if row.recipe}
    if not is_current(file):
        rows = {}
    if arguments.only:
        kinds = [kind for kind in kinds if kind.model_type in arguments.only]
        rows = {kind: row for kind, row in rows.items() if kind.model_type not in arguments.only}
    elif arguments.missing:
        kinds = [kind for kind in kinds if kind not in rows]
    else:
        rows = {}
    where = origin(module_command())
    if rows:  # of which some were judged by an earlier command
        where["command"] = f"{old_origin['command']}; {where['command']}"
    begun = time.monotonic()

    def report(verdict: Verdict, taken: float) -> None:
        rows[_kind(verdict)] = verdict
        done = len(kinds) - sum(kind not in rows for kind in kinds)
        told = ": ".join(part for part in (verdict.verdict, verdict.way, verdict.reason[:300]) if part)
        print(
            f"{done}/{len(kinds)} {time.monotonic() - begun:.0f} s  {_kind(verdict).name}: {told} [{taken:.1f} s]",
            flush=True,
        )
        if done % 10 == 0 or done == len(kinds):  # what is judged outlives a stop
            write_results(file, where, [rows[kind] for kind in sorted(rows)])

    sweep(kinds, recipes, arguments.workers, report)
    verdicts = [rows[kind] for kind in sorted(rows)]
    _note_parts(verdicts)
    write_results(file, where, verdicts)
    if file == RESULTS and rows.keys() == wanted and not arguments.tiny:
        write_text(PAGE, page(*read_results(RESULTS)))
    print(dict(Counter(verdict.verdict for verdict in verdicts)))


def _kind(verdict: Verdict) -> Kind:
    return Kind(verdict.model_type, verdict.class_name, verdict.is_decoder)


def _note_parts(verdicts: list[Verdict]) -> None:
    """A class that cannot be called alone, and ran within a model that was judged, is judged there."""
    within: dict[str, Verdict] = {}
    for verdict in verdicts:
        if verdict.verdict != NOT_APPLICABLE:
            for part in verdict.parts:
                within.setdefault(part, verdict)
    for verdict in verdicts:
        if verdict.reason.startswith("not built") and verdict.class_name in within:
            verdict.reason = f"judged as a part of {within[verdict.class_name].class_name}"


if __name__ == "__main__":
    main()
