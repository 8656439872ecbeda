"""For the whole tree: the names that docstring examples use, and one summary of the figures that tests measured."""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Tests and the programs that they start run beside each other on small inputs: more threads would wait for each other.
# Before PyTorch is imported. What modules and their fixtures compute equals what their tests compute to the last bit.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

# Before Triton is imported: its kernels then run on CPU tensors. TRITON_INTERPRET=0 tests them on a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Without measuring which of both kernels is faster here: what tests expect is that of one of them.
os.environ["DILATED_ATTENTION_CPU"] = "native"
# PyTorch's store asks for the name of every address that connects, this machine's own too, and waits for the answer.
# A lost one then holds up a rank, or all of them, for 5 s, which is most of the timeouts in tests of failing ranks.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import dilated_attention_pytorch
from dilated_attention_pytorch.kernels.compilation import BuildError, library_path
from dilated_attention_pytorch.selection import hardware

_FIGURES = "figures.jsonl"


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported stays: no collection has to go through it


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _names_of_examples(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace["torch"] = torch
    # Names that need transformers are loaded on first use: an example that shows one imports it.
    doctest_namespace.update((n, x) for n, x in vars(dilated_attention_pytorch).items() if n[0] != "_")


@pytest.fixture(autouse=True)
def _seeded_and_on_one_thread() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a test before may have taken more


def _new_cache(cache: Path) -> str:
    """A cache folder with the compiled kernels of this machine alone: made if they are not there."""
    with contextlib.suppress(BuildError):
        path = library_path()
        (cache / "dilated-attention-pytorch").mkdir(parents=True)
        (cache / "dilated-attention-pytorch" / path.parent.name).symlink_to(path.parent)
    return str(cache)


@pytest.fixture(autouse=True, scope="session")
def _no_profile_of_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Rates that the user measured would choose other segments than those that tests and examples expect."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", _new_cache(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test writes into the cache folder, such as a profile, is there in this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", _new_cache(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _examples_have_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples choose segments as a user's program does. A container may have less memory left than that takes."""
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.setattr(hardware, "free_memory", lambda device: 8 << 30)


@pytest.fixture
def figure(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``figure("what", value)`` prints a measured figure at the end of the run, also from a parallel worker."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if hasattr(request.config, "workerinput") else folder

    def record(what: str, value: object) -> None:
        with open(folder / _FIGURES, "a") as file:
            file.write(json.dumps([what, str(value)]) + "\n")

    return record


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    """A :class:`support.browser.Browser`; the test is skipped where no Chromium is installed."""
    from support.browser import Browser, find_browser

    program = find_browser()
    if program is None:
        pytest.skip("no Chromium is installed (apt-get install chromium-headless-shell)")
    with Browser(program, tmp_path / "browser") as opened:
        yield opened


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    factory = getattr(config, "_tmp_path_factory", None)
    if factory is None:
        return
    file = Path(factory.getbasetemp()) / _FIGURES
    if file.exists():
        terminalreporter.section("figures measured by the tests")
        for line in sorted(file.read_text().splitlines()):
            what, value = json.loads(line)
            terminalreporter.write_line(f"{what}: {value}")
