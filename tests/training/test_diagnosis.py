"""What a run's log shows in sentences, and the profile of its steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.estimate.memory import footprint
from dilated_attention_pytorch.memory import in_bytes
from dilated_attention_pytorch.training import RunError, TrainSettings, train
from dilated_attention_pytorch.training.diagnosis import diagnose
from dilated_attention_pytorch.training.faults import note_fault
from dilated_attention_pytorch.training.profiled_step import profile_run
from training.broken_runs import break_at
from training.runs import change_sealed, quiet, tiny_settings, write_texts


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, a run that is finished, and one that NaN has ended."""
    folder = tmp_path_factory.mktemp("diagnosis")
    settings = _settings(write_texts(folder / "texts"))
    train(settings, folder / "run", quiet())
    with pytest.MonkeyPatch.context() as patch:
        break_at(patch, "loss", 3)
        with pytest.raises(RunError):
            train(settings, folder / "broken", quiet())
    return folder


def _settings(texts: Path) -> TrainSettings:
    return tiny_settings(texts, steps=4, save_steps=2, precision="float32", optimizer="adamw")


def test_a_log_without_losses_says_nothing_about_the_time_of_a_step(world: Path, tmp_path: Path) -> None:
    (tmp_path / "training.json").write_text((world / "broken" / "training.json").read_text())
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "seconds": 0}\n{"step": 2, "seconds": 3, "eval_loss": 1}\n')
    assert not any(line.startswith("Time") for line in diagnose(tmp_path))


def test_a_log_of_every_kind_of_event_is_told(world: Path) -> None:
    """40 steps of 2 s, four of them slower, 10 evaluations of 6 s, a slow rank, and faults of every kind."""
    run = world / "made"
    run.mkdir()
    (run / "training.json").write_text((world / "broken" / "training.json").read_text())
    change_sealed(run / "training.json", result={"evaluation_seconds": 20.0})
    entries = [{"step": 0, "seconds": 0.0, "matrix_product_flops": 1e9}]
    for step in range(4, 44, 4):
        seconds = entries[-1]["seconds"] + (24.0 if step == 24 else 8.0)
        ranks = {"own_seconds_of_rank_0": 0.5, "own_seconds_of_rank_1": 1.5, "step_seconds": 2.0}
        rate = {"tokens_per_second": 5000 if step <= 20 else 2500, "peak_memory_bytes": 7e8}
        entries.append({"step": step, "seconds": seconds, "loss": 1.0, **rate, **ranks})
        entries.append({"step": step, "seconds": seconds + 6.0, "eval_bits_per_byte": 2.0})
    (run / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    note_fault(run, "resumed", after="killed", step=2, processes=1, down_seconds=10.0, redone_seconds=30.0)
    note_fault(run, "overflow", step=5, scale=2.0)
    note_fault(run, "overflow", step=5, scale=1.0)
    note_fault(run, "slow rank", step=5, rank=1)  # of an earlier version
    note_fault(run, "skipped", step=7, batches=[12, 13], reason="step 7 is not taken: NaN or infinity is in its loss")
    note_fault(run, "broken", step=9, reason="NaN or infinity is in 1 of 9 weights")
    note_fault(run, "failed", step=40, reason="the disk is full; make room")
    least = in_bytes(footprint(_settings(world / "texts"), 1).total)
    assert list(diagnose(run)) == [
        "The run is not finished: the log has 40 of 4 steps.",
        "Time: 96.0 s in steps and their checkpoints (44%), 60.0 s in evaluations on the way (28%), 20.0 s in the "
        "evaluation at the end (9%), 40.0 s lost by restarts (19%); 2 s a step (median).",
        "Throughput: 5,000 tokens/s in the first half of the log, 2,500 in the second (medians).",
        f"Memory: 700 MB at the peak of the first process; its settings need at least {least}.",
        "Slow rank: rank 1 works 1.5 s by itself in a step, the others 0.5 s (median), and they wait for it, 50% of a "
        "step.",
        "Faults: 1 restarts, 1 steps without their batch, 40.0 s lost (faults.jsonl).",
        "Gradients overflowed in 1 steps, which were repeated with a lower scale of the loss.",
        "The batch of step 7 was left out: step 7 is not taken: NaN or infinity is in its loss.",
        "The run rewound after step 9: NaN or infinity is in 1 of 9 weights.",
        "The run ended after step 40: the disk is full; make room.",
    ]


def test_runs_as_they_end_are_told(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["diagnose", str(world / "run")])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "The run is finished: the log has 4 of 4 steps."
    assert [line.partition(":")[0] for line in said[1:]] == ["Time", "Throughput", "Memory"]
    main(["diagnose", str(world / "broken")])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(
        "The run ended after step 2: step 3 is not taken: NaN or infinity is in 1 of 1 losses (nan);"
    )
    assert "--resume" in last


def test_a_run_that_was_killed_before_its_first_entry_is_told(world: Path, tmp_path: Path) -> None:
    (tmp_path / "training.json").write_text((world / "broken" / "training.json").read_text())
    assert list(diagnose(tmp_path)) == ["The run is not finished: the log has 0 of 4 steps."]


def test_a_profile_has_the_parts_of_each_step_and_a_trace(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["profile", str(world / "run"), "--steps", "2", "--output", str(tmp_path / "new")])
    said = capsys.readouterr().out
    table = (tmp_path / "new" / "profile.txt").read_text()
    assert table in said
    assert "Self CPU time total: " in table
    assert "Self CPU Mem" in table
    events = json.loads((tmp_path / "new" / "trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    assert {name: names.count(name) for name in ("forward", "backward", "optimizer")} == dict.fromkeys(
        ("forward", "backward", "optimizer"), 2
    )
    assert any("attend_backward" in name for name in names)


def test_runs_whose_steps_one_process_cannot_take_are_not_profiled(world: Path, tmp_path: Path) -> None:
    settings = json.loads((world / "run" / "training.json").read_text())["settings"]
    for name, change, sentence in (
        ("split", {"settings": {**settings, "context_parallel": 2}}, "splits its sequences or matrices over several"),
        ("of extend", {"kind": "extend"}, "is one of `extend`"),
        ("other text", {"corpus": {"bytes": 1}}, "the text is not what the run began with"),
        ("of another version", {"settings": {**settings, "width": 3}}, "training.json describes no run"),
    ):
        run = tmp_path / name
        run.mkdir()
        (run / "training.json").write_text((world / "run" / "training.json").read_text())
        change_sealed(run / "training.json", **change)
        with pytest.raises(RunError, match=sentence):
            profile_run(run, tmp_path / "new")
    assert not (tmp_path / "new").exists()
