"""A run that goes on over other processes than it began with takes the same steps on the same windows."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch.training import RunError, resume, train
from dilated_attention_pytorch.training.spreading import respread
from support.forked import run_forked
from training.compared import distances, losses, moments
from training.runs import quiet, record_samples, samples_of, small_settings, stop_after, stopped_run, write_texts
from training.spread_runs import go_on

STEPS = 20


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.integers(1, 4),
    st.integers(1, 12),
    st.sampled_from([None, 1, 2, 4]),
)
def test_a_step_takes_as_many_windows_on_any_number_of_processes(
    batch: int, accumulation: int, context: int, tensor: int, sequences: int, processes: int, new_context: int | None
) -> None:
    settings = small_settings(
        Path("x"),
        batch_size=batch,
        gradient_accumulation=accumulation,
        context_parallel=context,
        tensor_parallel=tensor,
        strategy="ring" if context > 1 else "auto",
    )
    began_with, windows = sequences * context * tensor, batch * accumulation * sequences
    changes = {} if new_context is None else {"context_parallel": new_context}
    try:
        spread = respread(settings, began_with, processes, changes)
    except RunError:
        together = (new_context or math.gcd(context, max(1, processes // math.gcd(tensor, processes)))) * math.gcd(
            tensor, processes
        )
        assert windows % max(1, processes // together)
        return
    if processes == began_with and not changes:
        assert spread is settings
        return
    assert spread.context_parallel == new_context or context % spread.context_parallel == 0
    together = spread.context_parallel * spread.tensor_parallel
    assert spread.batch_size * spread.gradient_accumulation * max(1, processes // together) == windows
    assert spread.batch_size <= batch
    if new_context is None:
        assert processes % together == 0


def go_on_over(processes: int, run: Path, stop: int | None, changes: dict[str, Any], samples: Path) -> None:
    """Resume ``run`` in ranks, stop it after a step, and have ``samples`` filled with what it trains on."""
    ended = run_forked(go_on, run, stop, changes, samples, folder=samples.parent, ranks=processes)
    assert ended["code"] == 0, ended["output"]


@pytest.mark.slow
def test_two_processes_then_one_then_four_train_what_one_trains(tmp_path: Path, figure: Any) -> None:
    """FSDP on two, one alone, four of which two share a sequence, one again: the curve of one that never moved."""
    settings = small_settings(write_texts(tmp_path / "texts"), batch_size=2, gradient_accumulation=2, save_steps=5)
    seen, seen_whole = tmp_path / "seen", tmp_path / "seen-whole"
    with pytest.MonkeyPatch.context() as patch:
        record_samples(patch, seen_whole)
        whole = train(settings, tmp_path / "whole", quiet()).run
    with pytest.MonkeyPatch.context() as patch:
        record_samples(patch, seen)
        run = stopped_run(patch, settings, tmp_path / "run", 3).run
    go_on_over(2, run, 8, {"data_parallel": "fsdp"}, seen)
    with pytest.MonkeyPatch.context() as patch:
        record_samples(patch, seen)
        stop_after(patch, 11, signal.SIGINT)
        resume(run, quiet())
    go_on_over(4, run, 15, {"context_parallel": 2}, seen)
    assert moments(run / "checkpoint-16").keys() == moments(whole / "checkpoint-20").keys()
    with pytest.MonkeyPatch.context() as patch:
        record_samples(patch, seen)
        ended = resume(run, quiet())
    assert ended.step == STEPS
    assert samples_of(seen) == samples_of(seen_whole)
    assert list(losses(run)) == list(range(1, STEPS + 1))
    found = distances(run, whole, STEPS)
    figure(
        "1 -> 2 (fsdp) -> 1 -> 4 (context 2) -> 1 processes: largest difference of a loss, weight, moment",
        "{:.1e}, {:.1e}, {:.1e}".format(*found),
    )
    assert max(found) < 1e-5


def test_what_a_run_of_one_process_was_told_stays_when_other_things_change() -> None:
    settings = small_settings(Path("x"), data_parallel="zero1", offload="optimizer", optimizer="adamw")
    spread = respread(settings, 1, 1, {"workers": 1})
    assert (spread.data_parallel, spread.offload, spread.workers) == ("zero1", "optimizer", 1)


@pytest.mark.parametrize(
    ("batch_size", "changes", "words"),
    [
        (3, {}, r"takes 6 windows, which 4 groups .* go on with 1, 2, 3 or 6 processes"),
        (2, {"batch_size": 3}, r"--batch-size 3 must divide the 4 windows that .*; take 1, 2 or 4"),
    ],
)
def test_what_cannot_be_shared_says_what_can(batch_size: int, changes: dict[str, Any], words: str) -> None:
    settings = small_settings(Path("x"), batch_size=batch_size, gradient_accumulation=2)
    with pytest.raises(RunError, match=words):
        respread(settings, 1, 1 if changes else 4, changes)
