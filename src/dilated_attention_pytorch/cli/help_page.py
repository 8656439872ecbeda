"""Pages of ``--help``, from the description of the commands in ``help.json``."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from .names import others_of

PROGRAM = "dilated-attention"
COMMAND_GROUPS: Mapping[str, Sequence[str]] = {
    "slides": ("embed", "finetune", "heatmap"),
    "language models": ("train", "extend", "generate", "eval", "tokenizer"),
    "runs": ("report", "diagnose", "profile"),
    "planning": ("plan", "show"),
    "this machine": ("info", "build", "bench", "tune"),
}
"""Commands by what they are for."""
_WIDEST, _NARROWEST = 100, 40
_LEFT = 27
"""Columns of the flags, before their explanation."""
_TOP = """\
Multi-scale dilated attention: whole slides, and language models with long contexts."""
_TOP_EXAMPLES = (
    "dilated-attention train --preset tiny",
    "dilated-attention embed features/ --checkpoint slide_encoder.pth --output embeddings/",
    'dilated-attention show "DilatedPattern([256, 1024], [1, 4])"',
)


@cache
def descriptions() -> Mapping[str, Any]:
    """The commands by name: summary, explanation, examples, arguments and flags.

    ``python tests/cli/test_help.py`` writes the file from the commands' classes, whose import needs torch.
    """
    return json.loads(Path(__file__).with_name("help.json").read_text(encoding="utf-8"))


def top_page() -> str:
    """What the program can do, a line a command."""
    width = _width()
    lines = [f"usage: {PROGRAM} COMMAND [flags]", "", *_filled(_TOP, width)]
    for group, commands in COMMAND_GROUPS.items():
        lines += ["", f"{group}:"]
        for command in commands:
            lines += _entry(f"  {command}", descriptions()[command]["summary"], width, 14)
    lines += ["", "examples:", *(f"  {example}" for example in _TOP_EXAMPLES), ""]
    lines += _filled(
        f"{PROGRAM} COMMAND --help explains a command. --version prints the version; --print-completion bash, zsh "
        "or fish prints a script that completes commands and flags.",
        width,
    )
    return "\n".join(lines)


def page(command: str, words: Sequence[str], *, is_all: bool) -> str:
    """The page of a command.

    Args:
        command: its name.
        words: the words after it, of which ``--preset`` changes the defaults shown.
        is_all: whether every flag is shown in full, or only those that one begins with.
    """
    told, width = descriptions()[command], _width()
    usage = [f"usage: {PROGRAM} {command}", *(argument["metavar"] for argument in told["arguments"])]
    usage += [f"{flag['name']} {flag['metavar']}" for flag in told["flags"] if flag["is_required"]]
    lines = [*_filled(" ".join([*usage, "[flags]"]), width, " " * 8), "", *_filled(told["summary"], width)]
    hidden = not is_all and len(told["explanation"]) > 1
    for paragraph in told["explanation"][: None if is_all else 1]:
        lines += ["", *_filled(paragraph, width)]
    lines += ["", "examples:"]
    for example in told["examples"]:
        lines += [f"  # {example['about']}"] if example["about"] else []
        lines += _example(example["line"], width)
    others, preset = others_of(command), _preset(told, words)
    if told["arguments"]:
        lines += ["", "arguments:"]
        for argument in told["arguments"]:
            lines += _entry(f"  {argument['metavar']}", argument["help"], width, _LEFT)
    for group in dict.fromkeys(flag["group"] for flag in told["flags"]):
        entries: list[str] = []
        for flag in told["flags"]:
            if flag["group"] != group:
                continue
            if not (is_all or flag["is_first"]):
                hidden = True
                continue
            text = flag["help"] if is_all else _short(flag["help"])
            hidden |= not is_all and (text != flag["help"] or flag["name"] in others)
            entries += _entry(f"  {_left(flag)}", " ".join([text, *_details(flag, preset)]), width, _LEFT)
            if is_all and flag["name"] in others:
                entries += _entry("", f"also {', '.join(others[flag['name']])}", width, _LEFT)
        lines += ["", f"{group}:", *entries] if entries else []
    if hidden:
        lines += ["", f"{PROGRAM} {command} --help-all shows every flag, in full."]
    return "\n".join(lines)


def _preset(told: Mapping[str, Any], words: Sequence[str]) -> Mapping[str, str]:
    """The defaults that differ under the ``--preset`` in ``words``."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        flag, _, value = word.partition("=")
        if flag == "--preset":
            return told["presets"].get(value or after, {})
    return {}


def _left(flag: Mapping[str, Any]) -> str:
    name = flag["name"]
    if flag["is_switch"] and flag["default"] == "yes":
        name = negated(name).replace("no-", "[no-]", 1)
    return f"{name} {flag['metavar']}".rstrip()


def negated(name: str) -> str:
    """The flag that turns the switch ``name`` off."""
    part, dot, last = name[2:].rpartition(".")
    return f"--{part}{dot}no-{last}"


def _details(flag: Mapping[str, Any], preset: Mapping[str, str]) -> Iterator[str]:
    default = preset.get(flag["name"], flag["default"])
    choices = ", ".join(flag["choices"])
    is_said = "Default:" in flag["help"] or (flag["is_switch"] and default == "no")
    words = [choices, *([] if is_said or not default else [f"default: {default}"])]
    if any(words):
        yield f"({'; '.join(filter(None, words))})"


def _short(text: str) -> str:
    """The first sentence, and the one of the default."""
    first, end, rest = text.partition(". ")
    _, begin, default = rest.partition("Default: ")
    is_short = default and len(default) < _LEFT
    return f"{first}{end}{begin}{default}" if is_short else first + end.strip()


def _entry(left: str, text: str, width: int, column: int) -> list[str]:
    """A flag, then its explanation: on the same line, or below a long flag."""
    column = min(column, width // 2)
    wrapped = textwrap.wrap(text, width - column, break_long_words=False, break_on_hyphens=False) or [""]
    if len(left) + 2 <= column:
        wrapped[0] = left.ljust(column) + wrapped[0]
        return [wrapped[0].rstrip(), *(" " * column + line for line in wrapped[1:])]
    return [left, *(" " * column + line for line in wrapped)]


def _example(line: str, width: int) -> list[str]:
    """A command line in lines that a shell takes: flags stay with their values, and no quoted word is cut."""
    lines = [" "]
    for word in re.findall(r'(?:--\S+ )?(?:"[^"]*"|[^\s"-])(?:"[^"]*"|\S)*|\S+', line):
        if len(lines[-1]) + len(word) + 3 > width:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    return lines


def _filled(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _width() -> int:
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size((80, 24)).columns))
