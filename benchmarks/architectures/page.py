"""The results as a file with one row a line, and as the page of the docs."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks.measured_code import code
from benchmarks.options import RESULTS as RESULTS_FOLDER
from dilated_attention_pytorch.output import write_text

from .verdict import NEITHER, NOT_APPLICABLE, REFUSED, WORKS, Verdict

RESULTS = RESULTS_FOLDER / "architectures.json"
PAGE = Path("docs/architectures.md")
COMMAND = "python -m benchmarks.architectures"

_SIGNS = {
    "equals dense counts": "=",
    "gradients": "g",
    "causal": "c",
    "padding on the left": "l",
    "padding on the right": "r",
    "cached generation": "k",
}
_UNBUILT = ("not built", "not judged")
_HEAD = """# Architectures of transformers

What [`attn_implementation="dilated"`](transformers.md) does with every architecture of transformers {transformers}, by
`{command}` (torch {torch}, {date}).

| of {judged} classes of models with attention that were built and run | |
|---|---|
| [work](#works) | {works} |
| [are refused](#refused), in a sentence that says why | {refused} |
| [neither](#neither) | {neither} |

{others} more are [not judged](#not-judged): they have no attention, or no small model of them runs here.

Each type is represented by one class: its causal language model if it has one, otherwise the plain model, or both if
they are two networks. A small model with random weights, in float64 where possible, runs under
`DilatedPattern([8, 64], [1, 3])`.

- It **works** if its result equals dense attention with `log c` added to its scores, c counted pair by pair, computed
  by code that shares nothing with this library. The pattern must change the result, no attention may bypass the
  interface, and the laws below must hold.
- It is **refused** if it raises an error of this library that names the reason.
- Everything else is **neither**.

## Works

The column *shown* lists the laws that hold: `=` the output equals dense attention with the counts, `g` so do the
gradients of all weights, `c` a later token changes nothing before it, `l` and `r` rows padded on the left and on the
right equal the rows alone, `k` text from the model's cache equals text without one. A sign is missing if the law does
not hold for the dense model either, or if the model has no such input. "The text part alone" means
`attn_implementation={{"text_config": "dilated"}}`; a call of `set_pattern` is one on a model built without
`"dilated"`. Either way the other parts are unchanged.

| type | class | shown | besides |
|---|---|---|---|"""


def write_results(file: Path, origin: dict[str, Any], verdicts: Iterable[Verdict]) -> None:
    """A row a line, without the fields that say nothing."""
    rows = [
        json.dumps({name: x for name, x in asdict(v).items() if x is not False and x not in ("", [], None)})
        for v in verdicts
    ]
    body = ",\n  ".join(rows)
    head = f'"origin": {json.dumps(origin)},\n "code": {json.dumps(code("transformers"))}'
    write_text(file, f'{{\n {head},\n "verdicts": [\n  {body}\n ]\n}}\n')


def read_results(file: Path) -> tuple[dict[str, Any], list[Verdict]]:
    """What :func:`write_results` wrote."""
    found = json.loads(file.read_text())
    names = {field.name for field in fields(Verdict)}
    return found["origin"], [
        Verdict(**({"class_name": "", "is_decoder": False} | {name: row[name] for name in row if name in names}))
        for row in found["verdicts"]
    ]


def page(origin: dict[str, Any], verdicts: list[Verdict]) -> str:
    """The page of the docs."""
    versions = origin["versions"]
    count = Counter(verdict.verdict for verdict in verdicts)
    of = {
        name: [verdict for verdict in verdicts if verdict.verdict == name]
        for name in (WORKS, REFUSED, NEITHER, NOT_APPLICABLE)
    }
    head = _HEAD.format(
        transformers=versions["transformers"],
        torch=versions["torch"].partition("+")[0],
        date=origin["date"],
        command=COMMAND,
        judged=len(verdicts) - count[NOT_APPLICABLE],
        works=count[WORKS],
        refused=count[REFUSED],
        neither=count[NEITHER],
        others=count[NOT_APPLICABLE],
    )
    return "\n".join(
        [
            head,
            *(f"| {v.model_type} | {_class(v)} | {_shown(v)} | {v.way} |" for v in of[WORKS]),
            "",
            "## Refused",
            "",
            *_by_reason(of[REFUSED]),
            "## Neither",
            "",
            *(_table("what was seen", of[NEITHER]) or ["None.", ""]),
            "## Not judged",
            "",
            *_by_reason([v for v in of[NOT_APPLICABLE] if not v.reason.startswith(_UNBUILT)]),
            *_table("why it was not built or called", [v for v in of[NOT_APPLICABLE] if v.reason.startswith(_UNBUILT)]),
        ]
    )


def _class(verdict: Verdict) -> str:
    return (f"`{verdict.class_name}`" if verdict.class_name else "") + (", `is_decoder`" if verdict.is_decoder else "")


def _shown(verdict: Verdict) -> str:
    signs = "".join(_SIGNS[check] for check in verdict.checks if check in _SIGNS)
    others = [check for check in verdict.checks if check not in _SIGNS]
    return " ".join([f"`{signs}`", *others])


def _table(title: str, verdicts: list[Verdict]) -> list[str]:
    if not verdicts:
        return []
    rows = [f"| {v.model_type} | {_class(v)} | {_plain(v.reason.partition(' | ')[0])} |" for v in verdicts]
    return [f"| type | class | {title} |", "|---|---|---|", *rows, ""]


def _by_reason(verdicts: list[Verdict]) -> list[str]:
    """Classes under the sentence that they share, the most frequent first."""
    groups: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        groups[_plain(_without_names(verdict))].append(verdict)
    lines = []
    for reason, rows in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        lines += [f"**{reason}** ({len(rows)})", "", ", ".join(f"{v.model_type} {_class(v)}".strip() for v in rows), ""]
    return lines


def _without_names(verdict: Verdict) -> str:
    """A reason without what differs between models: names of classes and layers, numbers of shapes."""
    reason = verdict.reason.partition("; got")[0].partition(", got")[0]
    if verdict.class_name:
        reason = reason.replace(verdict.class_name, "…")
    reason = re.sub(r' \((?:\w+ of )?"[^"]*"\)| \([A-Z0-9_]{2,}\)', "", reason)
    reason = re.sub(r"\b[A-Z]\w*(?:Attention|Model|LM|Layer|Encoder|Decoder|Generation|Config)\w*\b", "…", reason)
    return re.sub(r"\([0-9, ]+\)", "(…)", re.sub(r"…\w+", "…", reason))


def _plain(text: str) -> str:
    """Text that a table of Markdown takes as it is."""
    return " ".join(text.split()).replace("|", "/").replace("*", r"\*").replace("<", "&lt;")
