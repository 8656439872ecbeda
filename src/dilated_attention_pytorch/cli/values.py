"""Values on a command line, checked before anything slow is imported: how many a flag has, and of what kind.

What passes here is parsed by tyro and checked by the command's class; what does not would be refused there, seconds
later and in the words of Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .names import nearest

_KINDS = {"int": (int, "a whole number"), "float": (float, "a number")}
_OTHER_VALUES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "fp8": "float8",
    "adam": "adamw",
    "adamw_torch": "adamw",
    "adamw_8bit": "adamw-8bit",
    "gpu": "cuda",
    "cuda:0": "cuda",
    "backward": "forward_backward",
}
"""Values that other programs take, with ours."""


def wrong_value(command: str, told: Mapping[str, Any], words: Sequence[str]) -> str | None:
    """What is wrong with the values in ``words``, or None.

    Args:
        command: name of the command.
        told: its description.
        words: the words after it, with our names for all flags.
    """
    flags = {flag["name"]: flag for flag in told["flags"]}
    given, arguments = set(), list[str]()
    for name, values in _parted(words, flags):
        if name is None:
            arguments += values
            continue
        given.add(name)
        sentence = _wrong_in_flag(flags.get(name), name, values)
        if sentence is None and name in flags and not flags[name]["is_many"]:
            arguments += values[0 if flags[name]["is_switch"] else 1 :]
        if sentence is not None:
            return sentence
    return _wrong_arguments(command, told, arguments) or _missing(command, told, given, arguments)


def _parted(words: Sequence[str], flags: Mapping[str, Any]) -> Iterator[tuple[str | None, list[str]]]:
    """The words before the first flag, and every flag with the words after it."""
    name: str | None = None
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            yield name, values
            name, equals, value = word.partition("=")
            values = [value] if equals else []
        else:
            values.append(word)
    yield name, values


def _wrong_in_flag(flag: Mapping[str, Any] | None, name: str, values: Sequence[str]) -> str | None:
    if flag is None or flag["is_switch"]:
        return None
    shown = f"{name} {flag['metavar']}"
    if not values:
        may_be_empty = flag["is_many"] and flag["default"]
        return None if may_be_empty else f"{name} has no value; write {shown}"
    for value in values if flag["is_many"] else values[:1]:
        if flag["choices"] and value not in (*flag["choices"], "None"):
            named = _OTHER_VALUES.get(value.lower())
            meant = named if named in flag["choices"] else nearest(value, flag["choices"])
            remedy = f"; did you mean {meant}?" if meant else ""
            remedy = "; separate them by spaces" if flag["is_many"] and "," in value else remedy
            return f"{name} must be one of {', '.join(flag['choices'])}, got {value!r}{remedy}"
        if flag["kind"] in _KINDS and value != "None":
            convert, what = _KINDS[flag["kind"]]
            try:
                convert(value)
            except ValueError:
                several = ", or several with spaces between" if flag["is_many"] else ""
                return f"{name} must be {what}{several}, got {_short(value)}"
    return None


def _wrong_arguments(command: str, told: Mapping[str, Any], arguments: Sequence[str]) -> str | None:
    expected = told["arguments"]
    if any(argument["is_many"] for argument in expected) or len(arguments) <= len(expected):
        return None
    extra = arguments[len(expected)]
    takes = f"one {expected[0]['metavar']}" if expected else "no words without a flag"
    remedy = "leave it out, or name its flag"
    if extra.lower() in _TRUTHS:
        remedy = "a switch is written alone, or with --no- to turn it off"
    return f"{command} takes {takes}, got {'also ' if expected else ''}{_short(extra)}; {remedy}"


_TRUTHS = ("true", "false", "yes", "no", "on", "off", "1", "0")


def _missing(command: str, told: Mapping[str, Any], given: set[str], arguments: Sequence[str]) -> str | None:
    missing = [argument for argument in told["arguments"] if argument["is_required"] and not arguments]
    flags = [flag for flag in told["flags"] if flag["is_required"] and flag["name"] not in given]
    names = [argument["metavar"] for argument in missing] + [f"{flag['name']} {flag['metavar']}" for flag in flags]
    if not names:
        return None
    *first, last = names
    explained = (missing or flags)[0]["help"].partition(". ")[0].rstrip(".")
    listed = f"{', '.join(first)} and {last}" if first else last
    return (
        f"{command} needs {listed} ({explained[0].lower()}{explained[1:]}); dilated-attention {command} --help explains"
    )


def _short(value: str) -> str:
    return repr(value) if len(value) <= 40 else f"{value[:40]!r}..."
