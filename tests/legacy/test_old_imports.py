"""Imports that code for earlier packages makes: each works with a warning, or says what to use."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import tomllib
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

import dilated_attention_pytorch
from dilated_attention_pytorch.legacy import table
from dilated_attention_pytorch.legacy.table import path_of
from support.pages import DOCS

PACKAGE = "dilated_attention_pytorch"
ROWS: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("old_imports.toml").read_text())["import"]
IMPORTS: list[tuple[str, str]] = [(row["module"], name) for row in ROWS for name in row["names"]]
# Where an old import is today's: the module is where it was.
SAME = {(module, name) for module in ("core", "core.config") for name in dilated_attention_pytorch.core.__all__}
SAME |= {("", name) for name in dir(dilated_attention_pytorch)}


class Taken(NamedTuple):
    """How an import is taken: ``words`` are those of its warning or of its error, ``found`` the object."""

    kind: Literal["works", "answered", "neither"]
    words: str
    found: object


def take(module: str, name: str) -> Taken:
    """Run ``from module import name``."""
    scope: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(f"from {path_of(module)} import {name} as found", scope)
        except ImportError as error:
            is_answered = " is not here: " in str(error)
            return Taken("answered" if is_answered else "neither", str(error), None)
    words = {str(warning.message) for warning in caught if warning.category is DeprecationWarning}
    if len(words) > 1:
        return Taken("neither", " and ".join(sorted(words)), scope["found"])
    return Taken("works", next(iter(words), ""), scope["found"])


def test_every_import_works_with_a_warning_or_is_answered() -> None:
    sentences = set(table.read()["sentences"].values())
    for module, name in IMPORTS:
        taken = take(module, name)
        assert taken.kind != "neither", f"{path_of(module)}.{name}: {taken.words}"
        if taken.kind == "answered":
            assert taken.words.partition(" is not here: ")[2] in sentences
        elif (module, name) not in SAME:
            assert taken.words.startswith(f"{path_of(module)}.{name} is the old name; ")
            # Earlier packages returned a tensor.
            assert ("returns (out, None)" in taken.words) == ("Multihead" in taken.words.partition("import ")[2])
            scope: dict[str, Any] = {}
            exec(taken.words.split("`")[1], scope)  # what it says to write
            (new,) = (value for key, value in scope.items() if key != "__builtins__")
            assert "it keeps its old arguments" in taken.words or new is taken.found


def test_the_counts_of_the_migration_page_are_those_of_the_table() -> None:
    kinds = Counter(take(module, name).kind for module, name in IMPORTS)
    modules, names = len({module for module, _ in IMPORTS}), len({name for _, name in IMPORTS})
    page = (DOCS / "migration.md").read_text()
    sentence = r"(\d+) imports of (\d+) names from (\d+) modules: (\d+) work, and (\d+) raise an error"
    figures = re.search(sentence.replace(" ", r"\s+"), page)
    assert figures is not None
    counted = (len(IMPORTS), names, modules, kinds["works"], kinds["answered"])
    assert tuple(map(int, figures.groups())) == counted
    assert names >= 213
    assert kinds["neither"] == 0


def test_no_import_is_listed_twice_and_each_says_where_it_stands() -> None:
    assert len(set(IMPORTS)) == len(IMPORTS)
    assert {row["source"] for row in ROWS} == {
        "exports",
        "tests",
        "examples",
        "benchmarks",
        "docs",
        "first",
        "documents",
    }


def test_every_old_module_imports_or_says_why_not() -> None:
    for module in table.read()["modules"]:
        sentence = table.module(module)
        if sentence:
            # Python imports the parents first, and those may have nothing here either.
            with pytest.raises(ModuleNotFoundError, match=rf"{PACKAGE}\.[\w.]+ is not here: {re.escape(sentence)}"):
                importlib.import_module(path_of(module))
        else:
            found = importlib.import_module(path_of(module))
            assert found.__name__ == path_of(module)
            assert not hasattr(found, "NoName")
            assert importlib.util.find_spec(path_of(module)) is not None


def test_a_module_taken_from_its_parent_says_why_it_is_not_here() -> None:
    tried = 0
    for module in table.read()["modules"]:
        parent, _, leaf = module.rpartition(".")
        # A parent that is not here either is the first that Python imports.
        if table.module(module) and not table.module(parent):
            with pytest.raises(ImportError, match=rf"{PACKAGE}\.{module} is not here: "):
                exec(f"from {path_of(parent)} import {leaf}")
            tried += 1
    assert tried > 50


def test_every_answer_of_the_table_is_here() -> None:
    for key, name in ((key, key.rpartition(":")[2]) for key in table.read()["names"]):
        answer = table.answer(key.rpartition(":")[0], name)
        assert answer
        if isinstance(answer, table.OldName):
            assert hasattr(importlib.import_module(path_of(answer.home)), answer.name)
    read = table.read()
    for home, _, kind in (
        found.partition(":") for part in ("types", "multihead_types") for found in read[part].values()
    ):
        assert not kind or hasattr(importlib.import_module(path_of(home)), kind)
    used = {key for part in ("names", "families", "modules", "types", "multihead_types") for key in read[part].values()}
    assert set(read["sentences"]) <= used, "a sentence that no name has"


def test_what_old_names_stand_for_is_on_the_migration_page() -> None:
    page = (DOCS / "migration.md").read_text()
    for key in table.read()["names"]:
        answer = table.answer(*key.split(":")) if ":" in key else table.answer("", key)
        if isinstance(answer, table.OldName):
            assert answer.instead.rstrip("`").rpartition(" ")[2] in page, key


def test_the_warning_points_at_the_line_that_imports() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from dilated_attention_pytorch.ring_dilated_attention_v3 import RingDilatedAttentionV3  # noqa: F401

        from dilated_attention_pytorch import ImprovedDilatedAttention  # noqa: F401
    assert {warning.filename for warning in caught} == {__file__}


def test_an_unknown_name_or_module_fails_as_python_says() -> None:
    with pytest.raises(AttributeError, match="no attribute 'FastestAttention'"):
        _ = dilated_attention_pytorch.FastestAttention
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from dilated_attention_pytorch.improved_dilated_attention import Nothing  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{PACKAGE}.ring_dilated_attention_v99'"):
        importlib.import_module(f"{PACKAGE}.ring_dilated_attention_v99")
    assert importlib.util.find_spec(f"{PACKAGE}.ring_dilated_attention_v99") is None


def test_today_s_function_is_not_hidden_by_the_old_module_of_its_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from dilated_attention_pytorch.dilated_attention import DilatedAttention
    assert DilatedAttention is dilated_attention_pytorch.nn.DilatedAttention
    assert dilated_attention_pytorch.dilated_attention.__module__.startswith(f"{PACKAGE}.ops")


def test_walking_the_package_finds_no_old_module() -> None:
    found = {module.name for module in pkgutil.walk_packages(dilated_attention_pytorch.__path__, f"{PACKAGE}.")}
    assert not found & {path_of(module) for module in table.read()["modules"]}


@pytest.mark.parametrize("name", ["simulate", "Simulation"])
def test_the_simulation_of_ranks_names_the_plan_of_them(name: str) -> None:
    with pytest.raises(ImportError, match=rf"parallel\.{name} is not here: .*parallel\.plan_parallel\(.*machine="):
        getattr(dilated_attention_pytorch.parallel, name)
