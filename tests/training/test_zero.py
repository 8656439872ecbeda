"""Runs whose states DeepSpeed splits: the losses of one process, in checkpoints that every other run takes up."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention_pytorch.training import RunError, resume, train
from dilated_attention_pytorch.training.zero import check_engine, check_zero
from training.compared import distances, losses, moments
from training.runs import assert_same_weights, quiet, small_settings, weights, write_texts
from training.test_distribution import spread

NEEDS_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="the extra deepspeed is not installed: make zero"
)
TOLERANCE = 1e-5
"""Of losses in nats, weights and moments: sums of other orders in float32."""
HALF: dict[str, Any] = {"batch_size": 1, "gradient_accumulation": 2}
CASES: dict[str, tuple[dict[str, Any], int | None]] = {
    "zero1, stopped": ({"data_parallel": "zero1", **HALF}, 12),
    "zero2": ({"data_parallel": "zero2", **HALF}, None),
    "zero3, recomputing, stopped": ({"data_parallel": "zero3", "recomputing": True, **HALF}, 7),
    "zero3, offload": ({"data_parallel": "zero3", "offload": "parameters", **HALF}, None),
}
BROKEN = [("broken", {"data_parallel": "zero2", **HALF}, None), ("left", {"data_parallel": "zero3", **HALF}, 13)]


@NEEDS_DEEPSPEED
def test_every_stage_trains_what_one_process_trains(tmp_path: Path, figure: Any) -> None:
    texts = write_texts(tmp_path / "texts")
    one = train(small_settings(texts, batch_size=2, gradient_accumulation=2), tmp_path / "one", quiet()).run
    spread(2, tmp_path, [*((name, *case) for name, case in CASES.items()), *BROKEN])
    assert list(losses(one)) == list(range(1, 21))
    for name in CASES:
        found = distances(tmp_path / name, one, 20)
        figure(
            f"20 steps beside one process, {name}: largest difference of a loss (nats), weight, moment",
            "{:.1e}, {:.1e}, {:.1e}".format(*found),
        )
        assert max(found) < TOLERANCE
    # A NaN in one weight of one process: no step is taken with what comes of it.
    assert (tmp_path / "broken.txt").read_text().startswith("step 3 is not taken: NaN or infinity is in the losses")
    assert not (tmp_path / "broken" / "checkpoint-10").exists()
    # One process takes up what two have stopped.
    assert resume(tmp_path / "left", quiet()).step == 20
    expected = losses(one)
    assert max(abs(expected[step] - loss) for step, loss in losses(tmp_path / "left").items()) < TOLERANCE


@NEEDS_DEEPSPEED
def test_a_run_resumes_where_the_processes_do_not_divide_the_weights(tmp_path: Path) -> None:
    """The pieces of the last process end in padding."""
    write_texts(tmp_path / "texts")
    changes = {"data_parallel": "zero3", "batch_size": 1}
    spread(3, tmp_path, [("whole", changes, None), ("stopped", changes, 7)])
    assert any(value.numel() % 3 for value in weights(tmp_path / "whole").values())
    assert_same_weights(tmp_path / "stopped", tmp_path / "whole")
    theirs, ours = moments(tmp_path / "whole" / "checkpoint-20"), moments(tmp_path / "stopped" / "checkpoint-20")
    assert all(torch.equal(value, ours[key]) for key, value in theirs.items())


@NEEDS_DEEPSPEED
def test_what_another_engine_wraps_is_refused() -> None:
    settings = small_settings(Path("x"), data_parallel="zero2")
    with pytest.raises(RunError, match=r"the model was wrapped in Linear, which is no ZeRO of stage 2"):
        check_engine(torch.nn.Linear(2, 3), settings)


@pytest.mark.parametrize(("changes", "message"), [
    ({"optimizer": "muon"}, "does not go with --optimizer muon, as it steps one flat part of all weights, and only "
     "AdamW takes the same steps there; take --optimizer adamw, or --data-parallel fsdp"),
    ({"optimizer": "adamw-8bit"}, "does not go with --optimizer adamw-8bit"),
    ({"context_parallel": 2}, "does not go with --context-parallel 2, as it splits states over processes that read "
     "other windows; leave it out, or --data-parallel fsdp"),
    ({"tensor_parallel": 2}, "does not go with --tensor-parallel 2"),
    ({"on_nan": "skip"}, "does not go with --on-nan skip, as going back within a process would hand it the model a "
     "second time; take --on-nan stop"),
    ({"compile": True}, "does not go with --compile, as its hooks gather"),
])  # fmt: skip
def test_what_the_engine_cannot_carry_out_is_refused(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(RunError) as raised:
        check_zero(small_settings(Path("x"), data_parallel="zero1", **changes))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offload": "nvme", "offload_folder": "x"}, 'set data_parallel to "zero1", "zero2" or "zero3", got "ddp"'),
        (
            {"offload": "nvme", "offload_folder": "x", "data_parallel": "zero2"},
            'weights that are split: set data_parallel to "zero3", got "zero2"',
        ),
        ({"offload_folder": "x"}, 'got offload "none" and offload_folder x: set both or none'),
    ],
)
def test_offload_that_nothing_carries_out_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        small_settings(Path("x"), **changes)
    assert message in str(raised.value)
