"""What is refused before the parser is imported is what the parser would refuse, and no more."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import re
from collections.abc import Callable
from typing import Annotated, Any

import pytest
import tyro
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch.cli import help_page
from dilated_attention_pytorch.cli.command import COMMANDS, defaults_for
from dilated_attention_pytorch.cli.words import in_our_names
from support.described_commands import _fields, _flag
from support.drawn import examples

NUMBERS = st.one_of(
    st.integers(-(10**20), 10**20).map(str),
    st.floats().map(str),
    st.from_regex(r"[-+]?[0-9_]{1,4}(\.[0-9_]{0,3})?([eE][-+]?[0-9]{1,3})?", fullmatch=True),
    st.text("0123_.- \u0663\uff17", min_size=1, max_size=5),
)
ODD = """True False true None none auto cpu CUDA bfloat16 nan -inf -Infinity 0x10 - -- --- --5 -5 -.5 -5x = a=b 1,2 [1]
\u0661\u0662 \u00e9 -\u00e9 -x"""
WORDS = st.sampled_from([*ODD.split(), "", " ", " 5 ", "1\n"])
VALUES = {"int": "300", "float": "1.0", "": "a"}


@functools.cache
def flags(command: str) -> dict[str, dict[str, Any]]:
    return {flag["name"]: flag for flag in help_page.descriptions()[command]["flags"]}


@functools.cache
def flags_by_shape() -> list[list[tuple[str, str]]]:
    """The flags of all commands, those with values of one kind together."""
    shapes: dict[tuple[Any, ...], list[tuple[str, str]]] = {}
    for command in COMMANDS:
        for name, flag in flags(command).items():
            shape = (*(flag[key] for key in ("kind", "is_many", "is_switch", "is_optional")), bool(flag["choices"]))
            shapes.setdefault(shape, []).append((command, name))
    return list(shapes.values())


@functools.cache
def unchecked(command: str, *names: str) -> type:
    """A class with the arguments of a command and its flags ``names``, which accepts all values of their types."""
    fields: list[Any] = []
    for field in _fields(COMMANDS[command], defaults_for(command, ["--preset", "hybrid"])):
        name = f"--{field.name}" if field.is_positional else _flag(field)["name"]
        if field.is_positional or name in names:
            hint = Annotated[field.hint, tyro.conf.arg(name=name.removeprefix("--"))]
            is_missing = field.value is dataclasses.MISSING
            default = dataclasses.field() if is_missing else dataclasses.field(default=field.value)
            fields.append(("argument" if field.is_positional else f"flag{len(fields)}", hint, default))
    return dataclasses.make_dataclass("Unchecked", fields, kw_only=True)


def refusal(take: Callable[[], Any]) -> str | None:
    """What is said to a line that is refused; None if it is taken."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            take()
        except SystemExit:
            return said.getvalue()
    return None


def assert_same_verdict(command: str, names: tuple[str, ...], words: list[str]) -> None:
    """Except for a flag of several values that has none, where that is its default, too: the parser takes it, and it
    is refused, as it may be a variable of the shell that is not set."""

    def parse() -> None:
        parsed: Any = tyro.cli(unchecked(command, *names), args=words)
        if any(one["is_required"] for one in help_page.descriptions()[command]["arguments"]) and not parsed.argument:
            raise SystemExit(2)  # as the commands do; the parser takes several arguments to be none, too

    early = refusal(lambda: in_our_names([command, *words]))
    if early is not None and (found := re.search(r": (--\S+) has no value", early)) is not None:
        flag = flags(command)[found[1]]
        if flag["is_many"] and not flag["default"]:
            return
    assert (early is None) == (refusal(parse) is None), (command, words)


def needed(command: str) -> tuple[list[str], list[tuple[str, str]]]:
    """The arguments and the flags without which a command is refused, with values."""
    required = [flag for flag in flags(command).values() if flag["is_required"]]
    arguments = help_page.descriptions()[command]["arguments"]
    return ["a"] * any(one["is_required"] for one in arguments), [(f["name"], VALUES[f["kind"]]) for f in required]


LINES = """eval --data a b
eval --context-lengths 3 a
eval --data a -- b
eval --context-lengths 3 4
train --steps a --steps 3
train --steps 3 --steps a
train --optimizer sgd --optimizer adamw
train --steps None
train --optimizer None
train --prometheus-port None
generate a --top-k None
embed a --like None --checkpoint a --output a
tune --dtypes None
bench --causal True False
bench --causal true
train --learning-rate -inf
train --learning-rate -nan
train --learning-rate -abc
train --seed --5
generate a --prompt ---
generate a --prompt=--x
generate a --prompt --x
generate -- --x
generate --prompt a -- --prompt
report a -- b
report a --output-file a -- b
report a --output-file a b
report --output-file a -- b c
info -- a
info --
train --compile true"""
"""Lines about which the two could differ, and that are drawn seldom."""


@pytest.mark.parametrize("line", LINES.splitlines())
def test_a_line_is_taken_early_as_the_parser_takes_it(line: str) -> None:
    command, *words = line.split()
    assert_same_verdict(command, tuple(name for name in flags(command) if name in line), words)


@pytest.mark.parametrize("is_joined", [False, True], ids=["--flag value", "--flag=value"])
@examples(250)
@given(data=st.data())
def test_a_flag_takes_early_the_values_that_the_parser_takes(is_joined: bool, data: st.DataObject) -> None:
    """Except for a switch with a value, which the parser takes as an argument."""
    command, name = data.draw(st.sampled_from(data.draw(st.sampled_from(flags_by_shape()))))
    flag = flags(command)[name]
    word = st.one_of(NUMBERS if flag["kind"] else WORDS, WORDS, st.sampled_from(flag["choices"] or ["a"]))
    first, *more = data.draw(st.lists(word, min_size=int(is_joined), max_size=3)) or [None]
    if is_joined and flag["is_switch"]:
        assert refusal(lambda: in_our_names([command, f"{name}={first}"])) is not None
        return
    line = [f"{name}={first}"] if is_joined else [name, *([] if first is None else [first])]
    arguments, others = needed(command)
    others = [(other, value) for other, value in others if other != name]
    parts = [arguments, [*line, *more], *map(list, others)]
    words = [word for part in data.draw(st.permutations(parts)) for word in part]
    assert_same_verdict(command, (name, *(other for other, _ in others)), words)


@examples(150)
@given(data=st.data())
def test_words_and_flags_in_any_order_are_taken_early_as_the_parser_takes_them(data: st.DataObject) -> None:
    command = data.draw(st.sampled_from(sorted(COMMANDS)))
    arguments, others = needed(command)
    names = data.draw(st.lists(st.sampled_from(sorted(flags(command)) or ["--x"]), max_size=2))
    drawn = st.one_of(WORDS, st.sampled_from(["a", "3", *names]))
    more = data.draw(st.lists(drawn, max_size=4))
    words = [*arguments, *(word for other in others for word in other), *more]
    assert_same_verdict(command, tuple({*names, *(other for other, _ in others)}), words)
