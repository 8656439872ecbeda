"""Embedding by Ray: the files of one command, also when a worker is killed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import pytest

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.slides import Embedder, EmbedSettings, worker
from dilated_attention_pytorch.slides.claims import Claims
from dilated_attention_pytorch.slides.memory import TileLimits
from dilated_attention_pytorch.slides.ray_engine import RayEngine, _packed, _RayWorker, _read, cluster
from slides.made_slides import CONFIG, checkpoint, tiles_of, write_hdf5, write_slides
from support.processes import free_port


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.h5"))}


def command(folder: Path, output: str, *words: object) -> list[str]:
    begin = ("embed", folder / "features", "--checkpoint", folder / "slide_encoder.pth", "--threads", 1)
    return [str(word) for word in (*begin, "--output", folder / output, *words)]


def test_the_steps_of_the_pipeline_embed_refuse_and_leave_what_another_process_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = TileLimits(tile_bytes=10**6, of_batch=1, of_slide=10**9)
    monkeypatch.setattr(worker, "measure_limits", lambda *_, **__: limits)
    weights = checkpoint(tmp_path)
    paths = write_slides(tmp_path / "features", [20, 30, 9])
    broken = write_hdf5(tmp_path / "features" / "broken.h5", *tiles_of(9, 0))  # without a tile size
    settings = EmbedSettings()
    Embedder([paths[0], paths[1]], weights, tmp_path / "alone", settings).run()
    inputs = {"inputs": _packed([(path.stem, [path]) for path in (*paths, broken)])}
    rows = _read(inputs, CONFIG, settings)
    other = Claims(tmp_path / "out")
    assert other.take("slide2")
    columns: Any = {"read": numpy.array([row["read"] for row in rows], dtype=object)}
    found = _RayWorker(weights, tmp_path / "out", settings)(columns)
    assert found["name"] == ["slide0", "slide1", "slide2", "broken"]
    assert found["is_held"] == [False, False, True, False]
    assert found["tiles"] == [20, 30, 0, 0]
    assert found["failed"] == ["", "", "", str(broken)]
    assert "it does not give its tile size" in found["reason"][3]
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def test_batches_hold_as_many_tiles_as_they_may() -> None:
    engine = RayEngine.__new__(RayEngine)
    engine._tiles, engine._of_batch = {"a": 5, "b": 4, "c": 50, "d": 1}, 10
    batches = [*engine._batches([(name, [Path(f"{name}.h5")]) for name in "abcd"])]
    assert batches[0]["inputs"].tobytes() == _packed([(n, [Path(f"{n}.h5").absolute()]) for n in "ab"]).tobytes()
    assert len(batches) == 3


def test_an_address_that_cannot_be_used_says_so() -> None:
    with pytest.raises(ValueError, match="ray_address is read by engine ray alone"):
        EmbedSettings(ray_address="auto")
    with (
        pytest.raises(RunError, match=r"no Ray cluster can be used there .*refused.*; start one by"),
        cluster(f"localhost:{free_port()}"),
    ):
        pass


def workers_of(process: int) -> list[int]:
    """The processes of Ray that compute, below a process."""
    parents, names = {}, {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            names[int(folder.name)] = (folder / "cmdline").read_text()

    def is_below(number: int) -> bool:
        return number == process or (number in parents and is_below(parents[number]))

    return [number for number, name in names.items() if name.startswith("ray::MapWorker") and is_below(number)]


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_the_files_are_those_of_one_command(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    write_slides(tmp_path / "features", [2000 + 7 * number for number in range(60)])
    write_hdf5(tmp_path / "features" / "broken.h5", *tiles_of(9, 0))  # without a tile size
    with pytest.raises(SystemExit) as left:
        main(command(tmp_path, "alone"))
    assert left.value.code == 1
    words = [sys.executable, "-m", "dilated_attention_pytorch", *command(tmp_path, "shared", "--engine", "ray")]
    run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while run.poll() is None and not contents(tmp_path / "shared"):
        time.sleep(0.01)
    killed = workers_of(run.pid)
    os.kill(killed[0], signal.SIGKILL)
    assert len(contents(tmp_path / "shared")) < 60
    out, errors = run.communicate(timeout=400)
    assert run.returncode == 1, errors
    embedded, others = re.findall(
        r"(\d+) slides of .* were there, (?:(\d+) embedded meanwhile)?", " ".join(out.split())
    )[0]
    assert int(embedded) + int(others or 0) == 60  # one that was written when its worker died counts as another's
    assert "broken.h5: it does not give its tile size" in " ".join(errors.split())
    assert contents(tmp_path / "shared") == contents(tmp_path / "alone")
    assert {path.name for path in (tmp_path / "shared").iterdir() if path.suffix != ".h5"} == {"_embed.json"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own code
def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path)
    write_slides(tmp_path / "features", [9])
    embedder = Embedder([tmp_path / "features"], weights, tmp_path / "out", EmbedSettings(engine="ray", threads=1))
    weights.rename(tmp_path / "moved.pth")
    with pytest.raises(RunError, match=f"a worker of the Ray cluster cannot start: --checkpoint {weights}: there"):
        embedder.run()
