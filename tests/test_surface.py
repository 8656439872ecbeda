"""What users may name: public names with their parameters, and the command's flags, as ``surface.txt`` lists them.

After an intended change, ``python tests/test_surface.py`` writes the list anew; what left it is in the changelog.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import dilated_attention_pytorch
from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.cli.command import COMMANDS
from dilated_attention_pytorch.cli.help_page import descriptions

PACKAGE = Path(dilated_attention_pytorch.__file__).parent
LIST = Path(__file__).with_name("surface.txt")
ROOMS = ("", *sorted(file.parent.name for file in PACKAGE.glob("*/__init__.py")))


def module_of(room: str) -> ModuleType:
    return importlib.import_module(".".join(filter(None, ("dilated_attention_pytorch", room))))


def public_names(room: str) -> list[str]:
    return sorted(getattr(module_of(room), "__all__", ()))


def names() -> Iterator[str]:
    for room in ROOMS:
        module = module_of(room)
        for name in public_names(room):
            found = getattr(module, name)
            is_call = callable(found) and not (isinstance(found, type) and issubclass(found, BaseException))
            parameters = f"({', '.join(inspect.signature(found).parameters)})" if is_call else ""
            yield f"{room}:{name}{parameters}"


def help_of(*words: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as left:
        main([*words, "--help"])
    assert left.value.code == 0
    return printed.getvalue()


def flags() -> Iterator[str]:
    for command in COMMANDS:
        assert f"usage: dilated-attention {command}" in help_of(command)
        yield command
        yield from sorted(f"{command} {flag['name']}" for flag in descriptions()[command]["flags"])


def surface() -> list[str]:
    return [*names(), *flags()]


def test_help_names_the_commands() -> None:
    explained = help_of()
    assert "usage: dilated-attention" in explained
    assert all(command in explained for command in COMMANDS)


def test_public_names_parameters_and_flags_are_those_of_the_list() -> None:
    assert surface() == LIST.read_text().splitlines(), f"python {__file__} writes the list; see the changelog's rules"


if __name__ == "__main__":
    LIST.write_text("".join(f"{line}\n" for line in surface()))
