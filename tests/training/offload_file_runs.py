"""Run under torchrun: training runs whose states DeepSpeed keeps in files; see ``test_offload_files.py``.

    torchrun --nproc-per-node 2 tests/training/offload_file_runs.py FOLDER TEXTS CHANGES STOP

CHANGES is JSON, changes of the settings. One run goes to its end, one is stopped after step STOP and resumed, and one
is stopped there and left. Written to FOLDER/files.json is what lay in the offload folder when the first had taken its
last step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dilated_attention_pytorch.training import offload_files, resume, train
from dilated_attention_pytorch.training.distribution import leaving_together
from dilated_attention_pytorch.training.zero import ZeroEngine
from training.runs import quiet, stopped_run
from training.spread_runs import small_settings


def record_files(patch: pytest.MonkeyPatch, offloaded: Path, into: Path) -> None:
    """Write names and bytes of all files of ``offloaded`` after every step."""
    take = ZeroEngine.clip_and_step

    def take_and_record(self: ZeroEngine) -> float:
        norm = take(self)
        dist.barrier()
        if dist.get_rank() == 0:
            found = {str(path.relative_to(offloaded)): path.stat().st_size for path in offloaded.rglob("*.swp")}
            into.write_text(json.dumps(found))
        return norm

    patch.setattr(ZeroEngine, "clip_and_step", take_and_record)


def main() -> None:
    """Do them."""
    folder, texts, stop = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[4])
    changes: dict[str, Any] = json.loads(sys.argv[3])
    torch.set_num_threads(1)
    offload_files.SUBGROUP = 700_000  # three groups of matrices
    settings = small_settings(texts, **changes)
    assert settings.offload_folder is not None
    with leaving_together():
        with pytest.MonkeyPatch.context() as patch:
            record_files(patch, settings.offload_folder, folder / "files.json")
            train(settings, folder / "whole", quiet())
        with pytest.MonkeyPatch.context() as patch:
            stopped_run(patch, settings, folder / "resumed", stop)
        torch.manual_seed(12345)
        resume(folder / "resumed", quiet())
        with pytest.MonkeyPatch.context() as patch:
            stopped_run(patch, settings, folder / "left", stop)


if __name__ == "__main__":
    main()
