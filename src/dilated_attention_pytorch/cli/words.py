"""The words of a command line, read before anything slow is imported: help, the version, and misspelt names."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from .help_page import PROGRAM, descriptions, negated, page, top_page
from .names import OTHER_COMMANDS, OTHER_NAMES, REFUSED, nearest
from .values import is_flag, wrong_value

SHELLS = ("bash", "zsh", "fish")
COMPLETION = "--print-completion"
_INPUTS = ("model", "run", "run-dir", "input", "inputs", "file", "path", "folder", "slides", "features", "labels")
_HELP, _HELP_ALL = ("-h", "--help"), ("-H", "--help-all")


def answer(words: Sequence[str]) -> None:
    """Print what needs no command to run, or what is wrong with the names in ``words``, and exit; else return.

    Raises:
        SystemExit: with 0 after help or the version, with 2 after a sentence about a wrong name.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Paths and generated text may have characters that the terminal's encoding lacks.
            stream.reconfigure(errors="backslashreplace")
    in_our_names(words)


def in_our_names(words: Sequence[str]) -> list[str]:
    """``words`` with every flag under our own name.

    Raises:
        SystemExit: see :func:`answer`.
    """
    name, rest = (words[0], list(words[1:])) if words else ("", [])
    commands = descriptions()
    if name == "help":
        name, rest = (rest[0], ["--help"]) if rest else ("--help", [])
    if name in (*_HELP, *_HELP_ALL):
        _print(top_page())
    if name == "--version":
        from dilated_attention_pytorch import __version__

        _print(f"{PROGRAM} {__version__}")
    if name == COMPLETION:
        if rest[:1] == [] or rest[0] not in SHELLS or len(rest) > 1:
            leave(f"{COMPLETION} takes one of {', '.join(SHELLS)}, got {' '.join(rest) or 'nothing'}")
        return [name, *rest]
    if not name:
        print(top_page(), file=sys.stderr)
        raise SystemExit(2)
    if name not in commands:
        leave(_of_command(name, rest))
    if any(word in _HELP_ALL for word in rest):
        _print(page(name, rest, is_all=True))
    if any(word in _HELP for word in rest):
        _print(page(name, rest, is_all=False))
    end = rest.index("--") if "--" in rest else len(rest)
    rest = [ours for word in rest[:end] for ours in _ours(name, word)] + rest[end:]
    sentence = wrong_value(name, commands[name], rest)
    if sentence is not None:
        leave(sentence)
    return [name, *rest]


def leave(sentence: str) -> NoReturn:
    """Print a sentence about what is wrong, and exit."""
    print(f"{PROGRAM}: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def _print(text: str) -> NoReturn:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        leave_broken_pipe()
    raise SystemExit(0)


def leave_broken_pipe() -> NoReturn:
    """Exit after the reader of the output went away."""
    # Python flushes the output once more at exit, which must not fail.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(128 + signal.SIGPIPE) from None


def _of_command(name: str, rest: Sequence[str]) -> str:
    commands = descriptions()
    if name.startswith("-"):
        command = next((word for word in rest if word in commands), None)
        if command is not None:
            return f"the command comes first: {PROGRAM} {command} {name} ..."
        return f"there is no flag {name.partition('=')[0]} without a command; {PROGRAM} --help lists the commands"
    meant = OTHER_COMMANDS.get(name.lower()) or nearest(name.lower(), commands)
    if meant is None:
        return f"there is no command {name}; choose one of {', '.join(commands)}"
    return f"there is no command {name}; did you mean {PROGRAM} {meant}? {PROGRAM} --help lists the commands"


def _ours(command: str, word: str) -> list[str]:
    """A word of a command line, as one or two words with our names; wrong flags leave with a sentence."""
    if not is_flag(word):
        return [word]
    if not word.startswith("--"):
        leave(_of_letter(command, word))
    flag, equals, value = word.partition("=")
    flag = flag.replace("_", "-")
    told = descriptions()[command]
    if flag in _names(told):
        return [f"{flag}{equals}{value}"]
    if flag in REFUSED.get(command, {}):
        leave(f"{command} has no flag {flag}: {REFUSED[command][flag]}")
    ours = OTHER_NAMES.get(command, {}).get(flag)
    if ours is None:
        leave(_of_flag(command, flag, told))
    if len(ours) > 1 and equals:
        leave(f"{flag} takes no value, got {value!r}; it means {' '.join(ours)}")
    return list(ours) if len(ours) > 1 else [f"{ours[0]}{equals}{value}"]


def _names(told: Mapping[str, Any]) -> list[str]:
    """The flags of a command, with the ``--no-`` of its switches."""
    names = [flag["name"] for flag in told["flags"]]
    return names + [negated(flag["name"]) for flag in told["flags"] if flag["is_switch"]]


def _of_letter(command: str, word: str) -> str:
    """About a word with one dash, which no flag has."""
    flag = f"-{word.partition('=')[0]}"
    names = [*_names(descriptions()[command]), *OTHER_NAMES.get(command, {})]
    begins = sorted((name for name in names if name.startswith(flag)), key=len)
    meant = begins[0] if begins else None
    shown = "" if meant is None else f"; did you mean {' '.join(OTHER_NAMES.get(command, {}).get(meant, (meant,)))}?"
    return f"{command} has no flag {flag[1:]}, as flags begin with two dashes{shown or f' ({command} --help)'}"


def _nearest_flag(command: str, flag: str, names: Sequence[str]) -> str | None:
    """Our flag whose name, or other name, is near ``flag``."""
    others = OTHER_NAMES.get(command, {})
    meant = nearest(flag[2:], [name[2:] for name in (*names, *others)])
    return None if meant is None else " ".join(others.get(f"--{meant}", (f"--{meant}",)))


def _of_flag(command: str, flag: str, told: Mapping[str, Any]) -> str:
    begin = f"{command} has no flag {flag}"
    for argument in told["arguments"]:
        if flag[2:] in argument["names"] or flag[2:] in _INPUTS:
            return f"{begin}: name it without a flag: {PROGRAM} {command} {argument['metavar']}"
    names = _names(told)
    parts = [name for name in names if name.endswith(f".{flag[2:]}") or name.startswith(f"{flag}.")]
    meant = parts[0] if parts else _nearest_flag(command, flag, names)
    if meant is not None:
        return f"{begin}; did you mean {meant}?"
    owners = [name for name, other in descriptions().items() if flag in _names(other)]
    if owners:
        return f"{begin}; it is one of {', '.join(owners[:3])}. {PROGRAM} {command} --help-all lists those of {command}"
    return f"{begin}; {PROGRAM} {command} --help-all lists its flags"
