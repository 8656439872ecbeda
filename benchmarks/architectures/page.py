"""The results as a file with one row a line, and as the page of the docs."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks.measured_code import code
from benchmarks.study import RESULTS as RESULTS_FOLDER
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
_BIAS = "a layer adds numbers of its own to the scores of every pair"
_SEQUENCES = "a layer attends to another sequence, or to a shorter form of its own"
_REASONS = (
    (
        "every layer of the model has a sliding window",
        "every layer has a sliding window: remove the pattern, or set `config.sliding_window = None` before the model "
        "is built",
    ),
    ("chooses by content", "a layer chooses its keys by content"),
    ("came with numbers for every pair", _BIAS),
    ("adds a bias of its own", _BIAS),
    ("to its scores", _BIAS),
    (
        "attention interface, through which",
        "a form of attention that is not a softmax over keys, or PyTorch's own layer",
    ),
    ("computes attention itself and", "a layer's own code has an operation on its scores that attention does not have"),
    ("attention that is not causal is of a sequence to itself", _SEQUENCES),
    ("attends to other sequences alone", _SEQUENCES),
    ("attends to its own sequence and to another", _SEQUENCES),
    ("may be of another sequence or of its own", _SEQUENCES),
    ("reads the values of its attention mask", "a layer reads the values of its mask"),
    (
        "a mask for every pair of tokens is honoured",
        "a mask that follows none of the [rules](transformers.md#padding-packed-rows)",
    ),
    ("does not honour", "an argument of attention that is not computed"),
    ("did not come to the attention", "an option keeps a layer from the attention interface"),
    ("in config.layer_types, and its model gives it", "a window of layers that have none in the configuration"),
)
"""What the errors of many models have in common, and what the page says of it."""
_HEAD = """# Architectures of transformers

This page has the result of [`attn_implementation="dilated"`](transformers.md) for every architecture of transformers
{transformers}. Find a model by its type (`config.model_type`): the line above it says what holds, or why it is refused.
`{command}` makes this page (torch {torch}, {date});
[a file](../benchmarks/results/{file}) has classes and errors.

| of {judged} classes of models with attention that were built and run | |
|---|---|
| [work](#works) | {works} |
| [are refused](#refused), with an error that names the reason | {refused} |
| [neither](#neither): a wrong result, or another error | {neither} |

{others} more are not judged: they have no attention, or no small model of them runs here.

Each type is represented by its causal language model if it has one, otherwise by the plain model, or by both if they
are two networks (an encoder, and the same built with `is_decoder=True`, marked "(decoder)"). A small model with random
weights, in float64 where possible, runs under `DilatedPattern([8, 64], [1, 3])`. It **works** if its result equals that
of dense attention with [`log c`](definition.md#attention-under-counts) added to its scores, in a second implementation
that shares no code with this library; if no attention bypasses the pattern; and if the laws below hold wherever they
hold for the dense model. Attention to another sequence, windows and chunks take no counts; a mask of documents takes
those of each document's own positions.

## Works

| sign | law |
|---|---|
| `=` | the output equals dense attention with the counts |
| `g` | so do the gradients of all weights |
| `c` | a later token changes nothing before it |
| `r`, `l` | rows padded on the right, on the left, equal the rows alone |
| `k` | text generated with the model's cache equals text generated without one |

A sign is missing if the law does not hold for the dense model either, or if the model has no such input. "The text part
alone" means `attn_implementation={{"text_config": "dilated"}}`; a call of `set_pattern` is one on a model built without
`"dilated"`. Either way the other parts are unchanged.
"""


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
    of = {name: [verdict for verdict in verdicts if verdict.verdict == name] for name in (WORKS, REFUSED, NEITHER)}
    head = _HEAD.format(
        transformers=versions["transformers"],
        torch=versions["torch"].partition("+")[0],
        date=origin["date"],
        command=COMMAND,
        file=RESULTS.name,
        judged=len(verdicts) - count[NOT_APPLICABLE],
        works=count[WORKS],
        refused=count[REFUSED],
        neither=count[NEITHER],
        others=count[NOT_APPLICABLE],
    )
    return "\n".join(
        [
            head,
            *_grouped(of[WORKS], _shown),
            "## Refused",
            "",
            'The error names the layer, the operation or argument, and the remedy: `"sdpa"` for most models.',
            "",
            *_grouped(of[REFUSED], _reason),
            "## Neither",
            "",
            *(_grouped(of[NEITHER], lambda verdict: _plain(verdict.reason.partition(" | ")[0])) or ["None.", ""]),
        ]
    )


def _grouped(verdicts: list[Verdict], title: Callable[[Verdict], str]) -> list[str]:
    """Names under the title that they share, the most frequent first."""
    groups: dict[str, list[str]] = defaultdict(list)
    for verdict in verdicts:
        groups[title(verdict)].append(_name(verdict))
    lines = []
    for shared, names in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        lines += [f"**{shared}** ({len(names)})", "", ", ".join(names), ""]
    return lines


def _name(verdict: Verdict) -> str:
    return f"{verdict.model_type} (decoder)" if verdict.is_decoder else verdict.model_type


def _shown(verdict: Verdict) -> str:
    signs = "".join(sign for check, sign in _SIGNS.items() if check in verdict.checks)
    others = [check for check in verdict.checks if check not in _SIGNS]
    return ", ".join([f"`{signs}`", *others, *([verdict.way] if verdict.way else [])])


def _reason(verdict: Verdict) -> str:
    """The reason that models share; the error itself where there is none."""
    return next((shown for words, shown in _REASONS if words in verdict.reason), _plain(verdict.reason))


def _plain(text: str) -> str:
    """Text that a table of Markdown takes as it is."""
    return " ".join(text.split()).replace("|", "/").replace("*", r"\*").replace("<", "&lt;")
