"""Runs whose weights and moments DeepSpeed keeps in files: those of one process, and nothing is left on the disk."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dilated_attention_pytorch.training import RunError, resume, train
from dilated_attention_pytorch.training.offload_files import check_folder, load_operator
from dilated_attention_pytorch.training.spreading import respread
from training.compared import distances, losses
from training.runs import assert_same_weights, quiet, small_settings, weights, write_texts
from training.test_distribution import spread
from training.test_zero import HALF, NEEDS_DEEPSPEED, TOLERANCE

LEAST = 1 << 18
"""Elements, of float32 1 MiB; DeepSpeed keeps smaller pieces in memory."""
WIDE: dict[str, Any] = {"widths": (512, 1024)}
"""Half of a matrix of the feed-forward is large enough for a file."""
FILES: dict[str, Any] = {"data_parallel": "zero3", "offload": "nvme"}


def _needs_libaio() -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        pytest.skip("libaio is not installed: apt-get install libaio-dev")


@NEEDS_DEEPSPEED
def test_states_in_files_train_what_one_process_trains(tmp_path: Path, figure: Any) -> None:
    _needs_libaio()
    texts, offloaded = write_texts(tmp_path / "texts"), tmp_path / "offloaded"
    offloaded.mkdir()
    settings = small_settings(texts, batch_size=2, gradient_accumulation=2, **WIDE)
    one = train(settings, tmp_path / "one", quiet()).run
    changes = {**FILES, **HALF, **WIDE, "offload_folder": offloaded}
    spread(2, tmp_path, [("whole", changes, None), ("resumed", changes, 12), ("left", changes, 12)])
    assert not list(offloaded.iterdir())

    # Moments of all matrices of the blocks were in files, three groups of the optimizer; norms, biases and the
    # embedding are less than 1 MiB. So were those weights whose pieces are not.
    found: dict[str, int] = json.loads((tmp_path / "whole.json").read_text())
    sizes = {name: value.numel() for name, value in weights(one).items()}
    of_matrices = sum(
        4 * value.numel() for name, value in weights(one).items() if "blocks" in name and value.dim() == 2
    )
    assert sum(Path(name).name.startswith("exp_avg-") for name in found) == 2 * 3
    for key in ("exp_avg-", "exp_avg_sq-"):
        assert sum(size for name, size in found.items() if Path(name).name.startswith(key)) == of_matrices
    kept = sum(size for name, size in found.items() if "float32params" in name)
    assert kept == sum(4 * size for size in sizes.values() if size // 2 >= LEAST) > 0

    assert list(losses(one)) == list(range(1, 21))
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")
    assert_same_weights(tmp_path / "resumed", tmp_path / "whole")
    resume(tmp_path / "left", quiet())  # one process takes up what two have stopped
    for name in ("whole", "left"):
        distance = distances(tmp_path / name, one, 20)
        figure(
            f"20 steps beside one process, in files, {name}: largest difference of a loss (nats), weight, moment",
            "{:.1e}, {:.1e}, {:.1e}".format(*distance),
        )
        assert max(distance) < TOLERANCE


@pytest.mark.skipif(sys.platform != "linux", reason="libaio is of Linux")
def test_a_folder_that_takes_no_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        RunError, match=r"--offload-folder .*missing is not a folder; name one on a disk of this machine"
    ):
        check_folder(tmp_path / "missing")
    with pytest.raises(RunError, match=r"--offload-folder /proc/self: no files can be written there \("):
        check_folder(Path("/proc/self"))
    opened = os.open

    def open_without_direct(path: Any, flags: int, *others: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *others, **named)

    monkeypatch.setattr(os, "open", open_without_direct)
    with pytest.raises(RunError, match=r"file system without direct access \(Invalid argument\)"):
        check_folder(tmp_path)
    assert not list(tmp_path.iterdir())


@NEEDS_DEEPSPEED
def test_without_the_operator_a_run_with_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    def fail(self: AsyncIOBuilder, verbose: bool = False) -> None:
        raise RuntimeError("no ninja")

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: False)
    with pytest.raises(RunError, match=r"--offload nvme needs libaio with its headers, and a C\+\+ compiler"):
        load_operator()
    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: True)
    monkeypatch.setattr(AsyncIOBuilder, "load", fail)
    with pytest.raises(RunError, match=r"async_io cannot be compiled or loaded here: no ninja"):
        load_operator()


def test_a_run_that_goes_on_without_files_drops_their_folder() -> None:
    settings = small_settings(Path("x"), offload_folder=Path("/files"), **FILES, **HALF)
    for changes in ({"data_parallel": "ddp"}, {"offload": "parameters"}):
        assert respread(settings, 2, 2, changes).offload_folder is None
    assert respread(settings, 2, 1, {}).offload_folder is None
    assert respread(settings, 2, 2, {"workers": 1}).offload_folder == Path("/files")
