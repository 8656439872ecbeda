"""Values on a command line, checked before anything slow is imported: how many a flag has, and of what kind.

What passes here is parsed by tyro and checked by the command's class; what does not would be refused there, seconds
later and in the words of Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def is_flag(word: str) -> bool:
    """Whether a word names a flag: dashes and a letter, but no number such as -inf. All else is a value."""
    name = word.partition("=")[0]
    is_named = name.startswith("-") and name.lstrip("-")[:1].isalpha()
    return is_named and name[1:].lower() not in ("inf", "infinity", "nan")


def wrong_value(command: str, told: Mapping[str, Any], words: Sequence[str]) -> str | None:
    """What is wrong with the values in ``words``, or None.

    Args:
        command: name of the command.
        told: its description.
        words: the words after it, with our names for all flags.
    """
    flags = {flag["name"]: flag for flag in told["flags"]}
    needs_one = any(argument["is_required"] and not argument["is_many"] for argument in told["arguments"])
    given, runs = _parted(words, flags, needs_one=needs_one)
    names = [name for name, _ in given]
    for index, (name, values) in enumerate(given):
        sentence = _wrong_in_flag(flags.get(name), name, values, is_last=name not in names[index + 1 :])
        if sentence is not None:
            return sentence
    return _wrong_arguments(command, told, runs) or _missing(command, told, given, runs)


def _parted(
    words: Sequence[str], flags: Mapping[str, Any], *, needs_one: bool
) -> tuple[list[tuple[str, list[str]]], list[list[str]]]:
    """The flags, each with its values, and the other words, in runs without a flag in between.

    As the parser takes them: after ``--`` there are no flags, and a flag with several values leaves the last word of
    the line to an argument that the command ``needs_one`` of and has not yet.
    """
    end = words.index("--") if "--" in words else len(words)
    following: list[tuple[str, list[str], int]] = [("", [], 0)]
    for word in words[:end]:
        name, equals, value = word.partition("=")
        if is_flag(word):
            following.append((name, [value] if equals else [], 1 if equals else 0))
        else:
            following[-1][1].append(word)
    given: list[tuple[str, list[str]]] = []
    runs: list[list[str]] = []
    for name, after, most in following:
        is_last = after is following[-1][1]
        if name in flags and flags[name]["is_many"]:
            leaves_one = is_last and end == len(words) and needs_one and not runs and len(after) > 1
            most = len(after) - (1 if leaves_one else 0)
        elif name in flags and not flags[name]["is_switch"]:
            most = 1
        if name:
            given.append((name, after[:most]))
        if others := [*after[most:], *(words[end + 1 :] if is_last else [])]:
            runs.append(others)
    return given, runs


def _wrong_in_flag(flag: Mapping[str, Any] | None, name: str, values: Sequence[str], *, is_last: bool) -> str | None:
    """What is wrong with the values of a flag; of numbers, only the last ones of a flag count."""
    if flag is None or flag["is_switch"]:
        return f"{name} takes no value, got {_short(values[0])}; {_OF_A_SWITCH}" if values else None
    shown = f"{name} {flag['metavar']}"
    if not values:
        may_be_empty = flag["is_many"] and flag["default"]
        return None if may_be_empty else f"{name} has no value; write {shown}"
    for value in values:
        if flag["is_optional"] and value == "None":
            continue
        if flag["choices"] and value not in flag["choices"]:
            named = _OTHER_VALUES.get(value.lower())
            meant = named if named in flag["choices"] else nearest(value, flag["choices"])
            remedy = f"; did you mean {meant}?" if meant else ""
            remedy = "; separate them by spaces" if flag["is_many"] and "," in value else remedy
            return f"{name} must be one of {', '.join(flag['choices'])}, got {value!r}{remedy}"
        if flag["kind"] in _KINDS and is_last:
            convert, what = _KINDS[flag["kind"]]
            try:
                convert(value)
            except ValueError:
                several = ", or several with spaces between" if flag["is_many"] else ""
                return f"{name} must be {what}{several}, got {_short(value)}"
    return None


def _wrong_arguments(command: str, told: Mapping[str, Any], runs: Sequence[Sequence[str]]) -> str | None:
    expected = told["arguments"]
    is_many = any(argument["is_many"] for argument in expected)
    words = [word for run in runs for word in run]
    most = len(runs[0]) if is_many and runs else len(expected)
    if len(words) <= most:
        return None
    extra, place = words[most], " in one place" if is_many else ""
    takes = f"{'' if is_many else 'one '}{expected[0]['metavar']}{place}" if expected else "no words without a flag"
    remedy = f"leave it out{', or name its flag' if told['flags'] else ''}"
    if is_many:
        remedy = "write them one after the other"
    if extra.lower() in _TRUTHS:
        remedy = _OF_A_SWITCH
    return f"{command} takes {takes}, got {'also ' if expected else ''}{_short(extra)}; {remedy}"


_TRUTHS = ("true", "false", "yes", "no", "on", "off", "1", "0")
_OF_A_SWITCH = "a switch is written alone, or with --no- to turn it off"


def _missing(
    command: str, told: Mapping[str, Any], given: Sequence[tuple[str, Sequence[str]]], runs: Sequence[Sequence[str]]
) -> str | None:
    missing = [argument for argument in told["arguments"] if argument["is_required"] and not runs]
    flags = [flag for flag in told["flags"] if flag["is_required"] and flag["name"] not in dict(given)]
    names = [argument["metavar"] for argument in missing] + [f"{flag['name']} {flag['metavar']}" for flag in flags]
    if not names:
        return None
    *first, last = names
    explained = (missing or flags)[0]["help"].partition(". ")[0].rstrip(".")
    listed = f"{', '.join(first)} and {last}" if first else last
    remedy = f"dilated-attention {command} --help explains"
    many = next((name for name, values in given if len(values) > 1), None)
    if missing and many is not None:
        remedy = f"the words after {many} are its values, so write {names[0]} first"
    return f"{command} needs {listed} ({explained[0].lower()}{explained[1:]}); {remedy}"


def _short(value: str) -> str:
    return repr(value) if len(value) <= 40 else f"{value[:40]!r}..."
