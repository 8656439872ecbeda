"""Commands that embed one cohort together: each slide once, none lost when one of them is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import h5py
import pytest

from dilated_attention_pytorch.slides import Embedder, EmbedSettings, worker
from dilated_attention_pytorch.slides.claims import CLAIMS_NAME, Claims, local_process, part_of, part_of_launcher
from dilated_attention_pytorch.slides.memory import TileLimits
from dilated_attention_pytorch.slides.store import SETTINGS_NAME
from slides.made_slides import checkpoint, tiles_of, write_hdf5, write_slides

NUMBERS = [20 + 7 * number for number in range(12)]
_FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def _memory_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = TileLimits(tile_bytes=10**6, of_batch=1, of_slide=10**9)
    monkeypatch.setattr(worker, "measure_limits", lambda *_, **__: limits)


def embed(features: Path, weights: Path, output: Path, results: Any = None, *, seconds: float = 0.0) -> None:
    """Embed all slides, each for so many seconds; the outcome is sent."""
    embedder = Embedder([features], weights, output, EmbedSettings())
    embedder.encoder.register_forward_hook(lambda *_: time.sleep(seconds))
    outcome = embedder.run()
    if results is not None:
        results.put((outcome.embedded, outcome.kept + outcome.by_others, sorted(map(str, outcome.failed))))


def contents(folder: Path) -> dict[str, bytes]:
    """All numbers of all files, by name."""
    found = {}
    for path in sorted(folder.glob("*.h5")):
        with h5py.File(path) as file:
            found[path.name] = file["embedding"][()].tobytes() + file["layers"][()].tobytes()
    return found


@pytest.mark.parametrize("number", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_three_commands_embed_each_slide_once_also_when_one_is_killed(number: int, tmp_path: Path) -> None:
    features, weights = tmp_path / "features", checkpoint(tmp_path)
    write_slides(features, [20 + 7 * index for index in range(number)])
    write_hdf5(features / "broken.h5", tiles_of(9, 0)[0], tiles_of(9, 0)[1])  # without a tile size
    embed(features, weights, tmp_path / "alone")
    results = _FORK.SimpleQueue()
    commands = [
        _FORK.Process(target=embed, args=(features, weights, tmp_path / "shared", results), kwargs={"seconds": 0.2})
        for _ in range(3)
    ]
    for command in commands:
        command.start()
    deadline = time.monotonic() + 60
    while len([*(tmp_path / "shared").glob("*.h5")]) < number // 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert commands[0].pid is not None
    os.kill(commands[0].pid, signal.SIGKILL)
    outcomes = [results.get() for _ in range(2)]
    for command in commands:
        command.join()
    of_killed = number - sum(embedded for embedded, _, _ in outcomes)
    assert 0 <= of_killed < number / 2
    for embedded, others, failed in outcomes:
        assert 0 < embedded < number
        assert embedded + others == number
        assert failed == [str(features / "broken.h5")]
    assert contents(tmp_path / "shared") == contents(tmp_path / "alone")
    left = {path.name for path in (tmp_path / "shared").iterdir() if path.suffix != ".h5"}
    assert {SETTINGS_NAME} <= left <= {SETTINGS_NAME, CLAIMS_NAME}  # locks of the killed command may stay


def test_a_slide_that_another_command_holds_is_waited_for(tmp_path: Path) -> None:
    features, weights, output = tmp_path / "features", checkpoint(tmp_path), tmp_path / "out"
    write_slides(features, [9, 5])
    other = Claims(output)
    assert other.take("slide0")
    assert not Claims(output).take("slide0")
    timer = threading.Timer(1.5, other.release, ["slide0"])  # it ends without an embedding
    timer.start()
    begun = time.monotonic()
    embed(features, weights, output)
    timer.join()
    assert time.monotonic() - begun > 1.0
    assert sorted(contents(output)) == ["slide0.h5", "slide1.h5"]


def test_parts_are_balanced_and_cover_all_slides(tmp_path: Path) -> None:
    write_slides(tmp_path, NUMBERS)
    paths = {path.stem: (path,) for path in tmp_path.iterdir()}
    parts = [part_of(paths, part, 3) for part in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == sorted(paths)
    sizes = [sum(path.stat().st_size for (path,) in part.values()) for part in parts]
    assert max(sizes) < 1.2 * min(sizes)
    weights = checkpoint(tmp_path.parent)
    settings = EmbedSettings(part="2/3")
    assert Embedder([tmp_path], weights, tmp_path.parent / "out", settings).run().embedded == len(parts[1])


@pytest.mark.parametrize(
    ("variables", "part"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "2", "WORLD_SIZE": "4"}, (3, 4)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (2, 2)),
        (
            {
                "SLURM_ARRAY_TASK_ID": "7",
                "SLURM_ARRAY_TASK_MIN": "3",
                "SLURM_ARRAY_TASK_COUNT": "5",
                "SLURM_ARRAY_TASK_STEP": "2",
            },
            (3, 5),
        ),
        (
            {
                "SLURM_ARRAY_TASK_ID": "1",
                "SLURM_ARRAY_TASK_MIN": "0",
                "SLURM_ARRAY_TASK_COUNT": "3",
                "SLURM_PROCID": "1",
                "SLURM_NTASKS": "2",
            },
            (4, 6),
        ),
        ({"SLURM_PROCID": "x", "SLURM_NTASKS": "2"}, None),
        ({"RANK": "5", "WORLD_SIZE": "4"}, None),
    ],
)
def test_launchers_name_the_part_to_begin_with(variables: dict[str, str], part: tuple[int, int] | None) -> None:
    assert part_of_launcher(variables) == part


def test_each_process_of_a_machine_has_its_number() -> None:
    assert local_process({}) == 0
    assert local_process({"LOCAL_RANK": "3", "SLURM_LOCALID": "0"}) == 3
    assert local_process({"SLURM_LOCALID": "2"}) == 2
    assert local_process({"SLURM_LOCALID": "x"}) == 0


@pytest.mark.parametrize("part", ["0/3", "4/3", "3", "a/b", "1/0"])
def test_a_part_that_is_none_says_so(part: str) -> None:
    with pytest.raises(ValueError, match="part must be like 3/16"):
        EmbedSettings(part=part)


def test_progress_counts_tiles_within_a_slide(tmp_path: Path) -> None:
    write_slides(tmp_path / "features", [100, 20])
    embedder = Embedder([tmp_path / "features"], checkpoint(tmp_path), tmp_path / "out", EmbedSettings())
    seen = []
    embedder.run(progress=lambda done: seen.append((round(done.tiles), done.slides, done.total_tiles)))
    assert seen == [(50, 0, 120), (100, 0, 120), (100, 1, 120), (110, 1, 120), (120, 1, 120), (120, 2, 120)]
