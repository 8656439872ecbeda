"""A rank that dies, stops or disagrees ends every other one with a message that names it: no hang, no wrong result."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from failing import CASES, DISAGREEMENTS, NO_ANSWER, TRIALS
from support.processes import end_whole, environment, run_whole

PROGRAM = Path(__file__).with_name("failing.py")
LATEST_SECONDS = 120.0
"""After a fault until a rank has ended: a guard against hanging. What a rank says is right on a slow machine, too; how
fast it is says ``stop_trials.py``."""
HANG_SECONDS = 1200.0

END_WELL = ("ends well", "ends without a word")
"""The monitor's thread neither holds up nor aborts the interpreter's exit."""
IN_THE_SWEEP = [name for name, case in CASES.items() if case.is_slow]
IN_EVERY_RUN = [*(name for name, case in CASES.items() if not case.is_slow and name not in TRIALS), *END_WELL]


def run(folder: Path, cases: list[str]) -> list[list[dict[str, Any]]]:
    """For every case what became of every rank."""
    command = [sys.executable, str(PROGRAM), str(folder), *cases]
    done = run_whole(command, HANG_SECONDS, env=environment())
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "results.json").read_text())


def said(rank: dict[str, Any]) -> dict[str, Any]:
    """The one error of a rank."""
    assert "code" in rank, f"a rank hangs: {rank}"
    errors = [report for report in rank["reports"] if "message" in report]
    assert len(errors) == 1, rank
    return errors[0]


@pytest.mark.parametrize(
    "cases",
    [pytest.param(IN_EVERY_RUN, id="every fault"), pytest.param(IN_THE_SWEEP, id="more", marks=pytest.mark.slow)],
)
def test_a_failing_rank_ends_every_other_one_with_its_name(cases: list[str], tmp_path: Path, figure: Any) -> None:
    for case, ranks in zip(cases, run(tmp_path, cases), strict=True):
        if case in END_WELL:
            assert [rank.get("code") for rank in ranks] == [0, 0], (case, ranks)
        elif case == "disagrees":
            check_disagreements(ranks, figure)
        elif case == "tells another to end":
            check_told(ranks, figure)
        elif "sub-group" in case:
            check_sub_group(case, ranks, figure)
        else:
            check_named(case, ranks, figure)


def check_named(case: str, ranks: list[dict[str, Any]], figure: Any) -> None:
    """All other ranks name the culprit, in the same words."""
    culprit = CASES[case].culprit
    expected = CASES[case].said.format(culprit=culprit)
    faults = [report["fault"] for report in ranks[culprit]["reports"] if "fault" in report]
    assert len(faults) == 1, (case, ranks)
    survivors = [rank for number, rank in enumerate(ranks) if number != culprit]
    for rank in survivors:
        error = said(rank)
        assert (rank["code"], error["error"]) == (1, "RankFailure"), (case, rank)
        assert re.search(expected, error["message"]), (case, error)
        assert error["at"] - faults[0] < LATEST_SECONDS, (case, error)
        assert "terminate called" not in rank["stderr"], (case, rank)
    causes = {said(rank)["message"].split("): ", 1)[-1].split("; the transport")[0] for rank in survivors}
    assert len(causes) == 1, (case, causes)
    if "refuses" in case:
        assert (ranks[culprit]["code"], said(ranks[culprit])["error"]) == (1, "ValueError"), (case, ranks[culprit])
    else:
        # One that goes on, as a stopped rank does in the end, does not go on as if nothing had been.
        assert ranks[culprit].get("code") in (17, -9, 1) or case == "skips backward and ends", (case, ranks[culprit])
    slowest = max(said(rank)["at"] for rank in survivors) - faults[0]
    figure(f"failure, rank {culprit} {case}", f"{slowest:.1f} s, {said(survivors[0])['message']}")


def check_disagreements(ranks: list[dict[str, Any]], figure: Any) -> None:
    """All ranks say about what, and the group works on."""
    names = dict.fromkeys(("number of rows", "number of heads", "sequence_length"), "query")
    names["calls made"] = "call number"
    for place, what in enumerate(DISAGREEMENTS):
        messages = set()
        for rank in ranks:
            found = rank["reports"][place]
            assert (found["what"], found["error"]) == (what, "RankFailure"), (what, found)
            assert f"rank 1 has {names.get(what, what)} " in found["message"], found
            messages.add(found["message"])
        assert len(messages) == 1
        seconds = max(rank["reports"][place]["seconds"] for rank in ranks)
        figure(f"failure, rank 1 disagrees about {what}", f"{seconds:.2f} s, {messages.pop()}")
    assert [rank.get("code") for rank in ranks] == [0, 0, 0], ranks


def check_sub_group(case: str, ranks: list[dict[str, Any]], figure: Any) -> None:
    """Global ranks are named; the ranks of the other sequence stop in a collective of their own."""
    fault = next(report["fault"] for report in ranks[3]["reports"] if "fault" in report)
    named = NO_ANSWER.format(culprit=3)
    assert re.search(named, said(ranks[2])["message"]), ranks[2]
    assert [rank.get("code") for rank in ranks] == [1, 1, 1, 17 if "dies" in case else 1], ranks
    if "stops" in case:
        assert all(named in said(rank)["message"] or f": {named}" in rank["stderr"] for rank in ranks[:3]), ranks
    seconds = [f"{said(rank)['at'] - fault:.1f} s ({said(rank)['error']})" for rank in ranks[:3]]
    figure(f"failure, rank 3 {case}, ranks 0 to 2", ", ".join(seconds))


def check_told(ranks: list[dict[str, Any]], figure: Any) -> None:
    """A rank that is told to end while it waits says first what it waited for, and all say the same."""
    told = r"rank 2 received SIGTERM while sending keys around the ring \(with rank 1\)"
    assert [rank.get("code") for rank in ranks] == [1, 1, -signal.SIGTERM], ranks
    for rank in ranks[:2]:
        assert re.search(told, said(rank)["message"]), rank
    lines = [line for line in ranks[2]["stderr"].splitlines() if re.match(f"rank 2: received SIGTERM.*: {told}", line)]
    assert len(lines) == 1, ranks[2]
    figure("failure, rank 2 is told to end while it waits for rank 1", lines[0])


@pytest.mark.parametrize("case", ["dies while others wait", pytest.param("stops, heads", marks=pytest.mark.slow)])
def test_under_torchrun(case: str, tmp_path: Path, figure: Any) -> None:
    """The store is the agent's, which ends all others as soon as one has ended: they say why before they do."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(PROGRAM)]
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(
            [*command, "--one", case, str(tmp_path)], stderr=err, text=True, env=environment(), start_new_session=True
        )
    deadline = time.monotonic() + HANG_SECONDS
    try:
        while not says(tmp_path) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert says(tmp_path), (tmp_path / "err").read_text()
        fault = json.loads((tmp_path / "1.jsonl").read_text())
        figure(f"failure, rank 1 {case}, under torchrun", f"{time.monotonic() - fault['fault']:.1f} s")
        if case == "stops, heads":
            # torchrun's signal to end does not reach a stopped process: it would wait for 30 s before it kills it.
            os.kill(fault["pid"], signal.SIGCONT)
        assert process.wait(timeout=HANG_SECONDS) == 1
    finally:
        end_whole(process)


def says(folder: Path) -> bool:
    """Whether ranks 0 and 2 have both said why they end: by the error, or, told to end, in their own words."""
    named, text = NO_ANSWER.format(culprit=1), (folder / "err").read_text()
    files = [folder / f"{rank}.jsonl" for rank in (0, 2)]
    raised = [file.exists() and named in file.read_text() for file in files]
    printed = [re.search(rf"rank {rank}: received SIGTERM while .*: {named}", text) for rank in (0, 2)]
    return all(by_error or in_words for by_error, in_words in zip(raised, printed, strict=True))
