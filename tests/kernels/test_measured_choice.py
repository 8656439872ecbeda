"""A choice between routines: by measurement, of equal results alone, kept once for all processes of a machine."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch.folders import cache_folder
from dilated_attention_pytorch.kernels import measured_choice as module
from dilated_attention_pytorch.kernels.measured_choice import MeasuredChoice, Routine, measured_choice
from support.routines import RESULT, failing, taking

SLOW, FAST = 0.02, 0.001


@pytest.fixture(autouse=True)
def _short_and_of_this_test(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS", 0.0)


def chosen(usual: Routine, other: Routine, subject: str = "test", threads: int = 1) -> MeasuredChoice:
    return measured_choice(subject, {"usual": usual, "other": other}, operations=1e9, tolerance=1e-5, threads=threads)


def never() -> tuple[Tensor, ...]:
    raise AssertionError("it was measured again")


def test_the_faster_routine_is_chosen_with_the_rates_of_both() -> None:
    choice = chosen(taking(SLOW), taking(FAST, RESULT * (1 + 1e-6)))
    assert choice.name == "other"
    assert 2 * choice.rates["usual"] < choice.rates["other"] <= 1e9 / FAST
    assert re.fullmatch(r"other \(usual \d\d, other \d{3} GFLOP/s\)", choice.describe())


@pytest.mark.parametrize(
    "other",
    [taking(SLOW), failing, taking(0.0, 1.01 * RESULT), taking(0.0, RESULT * torch.nan), taking(0.0, RESULT[:2])],
    ids=["slower", "raises", "other numbers", "NaN", "other shape"],
)
def test_the_usual_routine_stays_where_the_other_is_slower_or_wrong(other: Routine) -> None:
    choice = chosen(taking(FAST), other)
    assert choice.name == "usual"
    assert choice.rates["usual"] > 0


def test_a_routine_that_is_hardly_faster_changes_nothing() -> None:
    assert chosen(taking(SLOW), taking(0.97 * SLOW)).name == "usual"


def test_a_choice_is_kept_for_its_subject_threads_processor_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = chosen(taking(SLOW), taking(FAST))
    assert chosen(never, never) == choice
    for change in (
        lambda: chosen(never, never, "another"),
        lambda: chosen(never, never, threads=2),
    ):
        with pytest.raises(AssertionError, match="measured again"):
            change()
    for where, name, other in ((module, "processor_features", lambda: "another one"), (torch, "__version__", "9.0")):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, other)
            with pytest.raises(AssertionError, match="measured again"):
                chosen(never, never)
    assert chosen(never, never) == choice


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-9],
        lambda text: "",
        lambda text: "[1]",
        lambda text: text.replace('"usual"', "[1]", 1),
        lambda text: json.dumps({"name": "usual", "rates": {"usual": 10**400, "other": 1}}),
        lambda text: text.replace('"usual"', '"third"', 1),
        lambda text: json.dumps({"name": "usual", "rates": {"usual": 1.0, "other": float("nan")}}),
        lambda text: json.dumps({"name": "usual", "rates": {"usual": 1.0}}),
    ],
)
def test_a_damaged_file_is_measured_again(damage: Callable[[str], str]) -> None:
    chosen(taking(FAST), taking(SLOW))
    (file,) = cache_folder().glob("choice-test-*.json")
    file.write_text(damage(file.read_text()))
    assert chosen(taking(SLOW), taking(FAST)).name == "other"
    assert chosen(never, never).name == "other"


def test_without_a_folder_it_is_measured_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        assert chosen(taking(SLOW), taking(FAST)).name == "other"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", classmethod(lambda _: (_ for _ in ()).throw(RuntimeError("no home"))))
    assert chosen(taking(SLOW), taking(FAST)).name == "other"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into every folder")
def test_a_read_only_folder_is_no_obstacle() -> None:
    cache_folder().mkdir(parents=True, exist_ok=True)
    cache_folder().chmod(0o500)
    assert chosen(taking(SLOW), taking(FAST)).name == "other"


def rank_choice(rank: int, calls: Path, begin: Barrier, choices: SimpleQueue[MeasuredChoice]) -> None:
    """The choice of a rank that measures the usual routine as the faster one if ``rank`` is 1."""

    def taking_noted(seconds: float) -> Routine:
        def call() -> tuple[Tensor, ...]:
            with calls.open("a") as file:
                file.write(f"{rank}\n")
            return taking(seconds)()

        return call

    usual, other = (FAST, SLOW) if rank else (SLOW, FAST)
    begin.wait()
    choices.put(chosen(taking_noted(usual), taking_noted(other)))


def test_ranks_that_begin_at_once_take_one_choice(tmp_path: Path) -> None:
    """Each rank would measure another one."""
    processes = multiprocessing.get_context("fork")
    begin, choices = processes.Barrier(2), processes.SimpleQueue()
    arguments = (tmp_path / "calls", begin, choices)
    ranks = [processes.Process(target=rank_choice, args=(rank, *arguments)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    assert choices.get() == choices.get()
    for rank in ranks:
        rank.join()
    assert len(set((tmp_path / "calls").read_text().split())) == 1
