"""Runs over several processes: every loss, and the weights at the end, are those of one process."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.training import train
from dilated_attention_pytorch.training.callbacks import read_metrics
from dilated_attention_pytorch.training.diagnosis import diagnose
from dilated_attention_pytorch.training.faults import read_faults
from dilated_attention_pytorch.training.report import read_run
from dilated_attention_pytorch.training.tensor_parallel import order_of, row_orders
from support.forked import BESIDE, run_forked
from training import spread_runs
from training.compared import furthest
from training.runs import quiet, small_settings, weights, write_texts

LOSS_TOLERANCE = 1e-5  # nats, of losses of 3 to 6
WEIGHT_TOLERANCE = 1e-5

TEN = {"steps": 10, "eval_steps": 5, "save_steps": 5}
# The changes to the settings of the single process, which takes 2 windows a step, and the step to stop after.
TWO: dict[str, tuple[dict[str, Any], int | None]] = {
    "heads, ddp": ({"context_parallel": 2, "strategy": "heads", "layout": "zigzag"}, None),
    "ring, fsdp": ({"context_parallel": 2, "strategy": "ring", "layout": "zigzag", "data_parallel": "fsdp"}, None),
    "accumulating, stopped, damaged, ddp": ({"context_parallel": 2, "batch_size": 1, "gradient_accumulation": 2}, 6),
    "tensor, stopped": ({"tensor_parallel": 2}, 6),
    "gather, recomputing, fsdp": (
        {"context_parallel": 2, "strategy": "gather", "data_parallel": "fsdp", "recomputing": True},
        None,
    ),
}
MORE_OF_TWO: dict[str, tuple[dict[str, Any], int | None]] = {
    "ring, ddp": ({"context_parallel": 2, "strategy": "ring"}, None),
    "heads, fsdp": ({"context_parallel": 2, "strategy": "heads", "data_parallel": "fsdp"}, None),
    "accumulating, stopped, fsdp": (
        {"context_parallel": 2, "data_parallel": "fsdp", "batch_size": 1, "gradient_accumulation": 2},
        3,
    ),
}
FOUR: dict[str, tuple[dict[str, Any], int | None]] = {
    "ring of 4, ddp": ({"context_parallel": 4, "strategy": "ring", "layout": "zigzag"}, None),
    "heads over 4, fsdp": ({"context_parallel": 4, "strategy": "heads", "data_parallel": "fsdp"}, None),
    "ring of 2, heads over 2, fsdp": (
        {"context_parallel": 4, "heads_parallel": 2, "strategy": "ring", "data_parallel": "fsdp"},
        None,
    ),
    "2 sequences, heads, ddp": ({"context_parallel": 2, "strategy": "heads", "batch_size": 1}, None),
    "2 sequences, ring, stopped, fsdp": (
        {"context_parallel": 2, "strategy": "ring", "batch_size": 1, "data_parallel": "fsdp"},
        8,
    ),
    "ring of 2, tensor, stopped, fsdp": ({"context_parallel": 2, "tensor_parallel": 2, "data_parallel": "fsdp"}, 4),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, and the run of one process."""
    folder = tmp_path_factory.mktemp("spread")
    train(small_settings(write_texts(folder / "texts"), **TEN), folder / "one", quiet())
    return folder


def spread(ranks: int, folder: Path, cases: Any, *, with_parts: bool = False) -> str:
    """Have ranks do runs, by :mod:`training.spread_runs`; what they printed."""
    run = run_forked(spread_runs.spread, folder, cases, with_parts, folder=folder, ranks=ranks)
    assert run["code"] == 0, run["output"][-8000:]
    printed: str = run["output"]
    return printed


def _check_follows(folder: Path, name: str, figure: Any) -> None:
    # Where a run is taken up a line says what the machine can do.
    expected, found = (
        [entry for entry in read_metrics(folder / run) if "matrix_product_flops" not in entry] for run in ("one", name)
    )
    assert [entry["step"] for entry in found] == [entry["step"] for entry in expected]
    differences = {}
    for key in ("bits_per_byte", "eval_bits_per_byte"):
        pairs = [(one[key], several[key]) for one, several in zip(expected, found, strict=True) if key in one]
        assert len(pairs) == (10 if key == "bits_per_byte" else 2)
        differences[key] = max(abs(one - several) * math.log(2) for one, several in pairs)
    assert max(differences.values()) <= LOSS_TOLERANCE
    norms = [
        (one["grad_norm"], several["grad_norm"])
        for one, several in zip(expected, found, strict=True)
        if "grad_norm" in one
    ]
    assert all(math.isclose(one, several, rel_tol=1e-5) for one, several in norms)
    ends = [json.loads((folder / run / "training.json").read_text())["result"] for run in ("one", name)]
    for key in ("bits_per_byte", "last_quarter_alone"):
        assert abs(ends[0][key] - ends[1][key]) <= LOSS_TOLERANCE
    of_weight = furthest(weights(folder / name), weights(folder / "one"))
    assert of_weight <= WEIGHT_TOLERANCE
    figure(
        f"10 steps beside one process, {name}: largest difference of a loss (nats), held-out loss, weight",
        f"{differences['bits_per_byte']:.1e}, {differences['eval_bits_per_byte']:.1e}, {of_weight:.1e}",
    )


def _check_wrapping(folder: Path, name: str, changes: dict[str, Any], num_processes: int) -> None:
    record = json.loads((folder / name / "wrapped.json").read_text())
    is_fsdp, is_split = changes.get("data_parallel") == "fsdp", "tensor_parallel" in changes
    kind = "FSDPLongNetForCausalLM" if is_fsdp else "LongNetForCausalLM" if is_split else "DistributedDataParallel"
    assert record["type"] == kind
    share = 1.1 / num_processes if is_fsdp or is_split else 1.0
    assert record["local_weights"] <= share * record["weights"]


def _check_checkpoint(folder: Path, name: str) -> None:
    """It holds whole weights by the names of one process: those of the end."""
    expected, found = weights(folder / "one"), weights(folder / name / "checkpoint-10")
    assert {key: tensor.shape for key, tensor in found.items()} == {
        key: tensor.shape for key, tensor in expected.items()
    }
    assert all(torch.equal(found[key], tensor) for key, tensor in weights(folder / name).items())
    if "damaged" in name:
        # It went on from step 5, and what it had written after that has gone.
        assert {path.name for path in (folder / name).glob("checkpoint-*")} == {"checkpoint-5", "checkpoint-10"}


def _check_parts_of_matrices(folder: Path, num_processes: int, figure: Any) -> None:
    assert json.loads((folder / f"muon-{num_processes}.json").read_text()) == 0.0
    difference = json.loads((folder / f"split-{num_processes}.json").read_text())
    # Sums of up to 62 rows and 48 columns of numbers around 1, gradients up to a hundred: 1e-16 of each, and some.
    assert difference <= 1e-11
    figure(f"matrices split over {num_processes}, float64: largest difference of a logit or gradient", difference)


# One test for each launch: parallel workers of pytest would each repeat what tests share.
@pytest.mark.parametrize(
    ("num_processes", "cases"),
    [
        pytest.param(2, TWO, id="two"),
        pytest.param(2, MORE_OF_TWO, id="two, more", marks=pytest.mark.slow),
        pytest.param(4, FOUR, id="four", marks=pytest.mark.slow),
    ],
)
def test_several_processes_follow_one(
    num_processes: int, cases: dict[str, tuple[dict[str, Any], int | None]], folder: Path, figure: Any
) -> None:
    spread(
        num_processes, folder, [(name, TEN | changes, stop) for name, (changes, stop) in cases.items()], with_parts=True
    )
    for name, (changes, _) in cases.items():
        _check_follows(folder, name, figure)
        _check_wrapping(folder, name, changes, num_processes)
        _check_checkpoint(folder, name)
    # A run that was taken up begins with a first step again.
    assert json.loads((folder / f"averages-{num_processes}.json").read_text()) == []
    _check_parts_of_matrices(folder, num_processes, figure)


STEP_PATTERNS: dict[str, dict[str, Any]] = {
    "staged": {
        "stages": {
            "lengths": (48, 97),
            "patterns": ("DilatedPattern([13, 48], [1, 2])", "DilatedPattern([48, 97], [2, 3])"),
        }
    },
    "drawn": {
        "layer_patterns": ("local_window(20)", "local_window(9) + DilatedPattern([48, 97], [2, 3])"),
        "random_local_windows": (2, 50),
        "seed": 3,
    },
}


def test_every_process_has_the_patterns_of_the_step(tmp_path: Path, figure: Any) -> None:
    """Of its own heads under tensor parallelism, and the same draw as all others."""
    few = {"steps": 6, "eval_steps": 6, "save_steps": 6, "eval_windows": 1, "final_eval_windows": 1}
    ways: dict[str, dict[str, Any]] = {
        "staged, tensor": {"tensor_parallel": 2},
        "drawn, tensor": {"tensor_parallel": 2},
        "drawn, ring": {"context_parallel": 2, "strategy": "ring"},
        "drawn, data": {"batch_size": 1},
    }
    texts = write_texts(tmp_path / "texts")
    for name, changes in STEP_PATTERNS.items():
        train(small_settings(texts, **few, **changes), tmp_path / name, quiet())
    cases = {name: {**few, **STEP_PATTERNS[name.partition(",")[0]], **spreading} for name, spreading in ways.items()}
    spread(2, tmp_path, [(name, changes, None) for name, changes in cases.items()])
    for name in cases:
        found, expected = (weights(tmp_path / run) for run in (name, name.partition(",")[0]))
        distance = furthest(found, expected)
        figure(f"6 steps beside one process, {name}: largest difference of a weight", f"{distance:.1e}")
        assert distance <= WEIGHT_TOLERANCE


def test_two_processes_follow_one_in_lower_precision_and_a_rank_that_sleeps_is_named(folder: Path, figure: Any) -> None:
    """float16, whose gradients overflow at first, and moments in bfloat16, which are rounded at random."""
    few = {"steps": 8, "eval_steps": 8, "save_steps": 8, "eval_windows": 1, "final_eval_windows": 1}
    alone = {"float16": {**few, "precision": "float16"}, "moments": {**few, "optimizer": "adamw-bf16"}}
    cases = {
        "overflowing, float16, fsdp": {**alone["float16"], "batch_size": 1, "data_parallel": "fsdp"},
        "moments, ddp": {**alone["moments"], "batch_size": 1},
        "sleeping, ddp": {**few, "batch_size": 1, "log_steps": 2},
    }
    printed = spread(2, folder, [(name, changes, None) for name, changes in cases.items()])
    for name, changes in alone.items():
        train(small_settings(folder / "texts", **changes), folder / f"alone, {name}", quiet())

    def distance(name: str, other: str) -> tuple[float, float]:
        losses = [[entry["loss"] for entry in read_metrics(folder / run) if "loss" in entry] for run in (name, other)]
        of_loss = max(abs(one - several) for one, several in zip(*losses, strict=True))
        return of_loss, furthest(weights(folder / name), weights(folder / other))

    references = ("alone, float16", "alone, moments")
    found = {name: distance(name, other) for name, other in zip(cases, references, strict=False)}
    for name, (loss, weight) in found.items():
        figure(
            f"8 steps beside one process, {name}: largest difference of a loss (nats), weight",
            f"{loss:.1e}, {weight:.1e}",
        )
    overflows = read_faults(folder / "overflowing, float16, fsdp", "overflow")
    assert len(overflows) > 10
    assert {fault["step"] for fault in overflows} == {1}
    # Logits are about 1 at first, and float16 rounds them by 2^-11: two units.
    assert found["overflowing, float16, fsdp"][0] <= 2.0**-10
    assert found["moments, ddp"][0] <= LOSS_TOLERANCE
    # A moment that is rounded to its other neighbour is 2^-7 of itself away, and forgotten after some 10 steps.
    assert found["moments, ddp"][1] <= 3e-3 * 2.0**-7 * 10
    assert printed.count("slow rank: rank 1 works ") == 1
    assert read_run(folder / "sleeping, ddp").figures["slow ranks, and seconds of their own a step"].startswith("1 (")
    for entry in (entry for entry in read_metrics(folder / "sleeping, ddp") if "loss" in entry):
        assert entry["step_seconds"] >= entry["own_seconds_of_rank_1"] >= 0.2 > entry["own_seconds_of_rank_0"]
    assert any(sentence.startswith("Slow rank: rank 1 works ") for sentence in diagnose(folder / "sleeping, ddp"))


def test_the_command_reports_once_and_ends_in_all_processes(folder: Path) -> None:
    words = "dilated_attention_pytorch train --preset tiny --steps 2 --context-parallel 2 --device cpu --data texts"
    run = run_forked("-m", *words.split(), "--output", folder / "command", folder=folder, ranks=2)
    assert run["code"] == 0, run["output"][-8000:]
    assert "in 2 processes: 1 data (ddp) x 2 context (" in run["output"]
    assert run["output"].count("xz -9e takes") == 2  # before the run and beside its result
    assert run["output"].count("step 2/2") == 1
    assert (folder / "command" / "model.safetensors").exists()


def test_a_stopped_process_ends_the_run_with_its_number_in_every_other(folder: Path, figure: Any) -> None:
    """Two sequences of two processes: those of the other sequence wait in a collective of torch's own."""
    place = folder / "stopped"
    place.mkdir()
    changes = {"context_parallel": 2, "strategy": "ring", "batch_size": 1, "timeout": 6}
    said = [place / f"said-{rank}.json" for rank in range(4)]
    ranks = BESIDE.submit(
        run_forked, spread_runs.train_and_stop, place, folder / "texts", changes, folder=place, ranks=4
    )
    while not all(map(_is_whole, said)):
        assert not ranks.done(), ranks.result()["output"]
        time.sleep(0.05)
    stopped = json.loads(said[3].read_text())
    os.kill(stopped["pid"], signal.SIGKILL)
    ranks.result()
    for file in said[:3]:
        ended = json.loads(file.read_text())
        assert ": rank 3 does not answer: the process was killed or stopped" in ended["message"]
        assert ended["message"].endswith("; no checkpoint was complete yet")
        figure(f"training with --timeout 6, rank 3 is stopped, {file.stem}", f"{ended['at'] - stopped['at']:.1f} s")


def _is_whole(file: Path) -> bool:
    """Whether a rank has written all that it says."""
    return file.exists() and file.read_text().endswith("}")


def test_a_process_has_its_part_of_gate_and_up() -> None:
    config = LongNetConfig(
        embed_dim=12, num_layers=1, num_heads=6, num_kv_heads=2, ffn_dim=4, segment_lengths=[8], dilation_rates=[1]
    )
    orders = row_orders(config, 2)
    assert orders["feed_forward.in_proj.weight"].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert order_of("model.blocks.0.attention.out_proj.weight", orders) is None
