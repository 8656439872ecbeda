"""Run under torchrun: training runs that DeepSpeed splits, one after the other; see ``test_zero.py``.

    torchrun --nproc-per-node 2 tests/training/zero_runs.py FOLDER TEXTS CASES

CASES is JSON: a list of ``[name, changes of the settings, step to stop after and resume from, or null]``. Then one run
in which a weight of one process becomes NaN, and one that is stopped and left.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dilated_attention_pytorch.models import token_loss
from dilated_attention_pytorch.training import RunError, resume, train
from dilated_attention_pytorch.training.distribution import leaving_together
from dilated_attention_pytorch.training.trainer import LongNetTrainer
from training.runs import quiet, stopped_run
from training.spread_runs import small_settings


def break_loss(patch: pytest.MonkeyPatch, step: int) -> None:
    """Let the loss of ``step`` become NaN in the second process."""
    compute = LongNetTrainer.compute_loss

    def compute_and_break(self: LongNetTrainer, *args: Any, **kwargs: Any) -> Any:
        loss = compute(self, *args, **kwargs)
        is_broken = dist.get_rank() == 1 and self.state.global_step == step - 1
        return loss * math.nan if is_broken else loss

    patch.setattr(LongNetTrainer, "compute_loss", compute_and_break)


def main() -> None:
    """Do them."""
    folder, texts, cases = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    # One process has all logits at once, these a block of rows' at a time.
    token_loss.LOGITS_AT_ONCE, token_loss.LEAST_ROWS = 256 * 30, 1
    half: dict[str, Any] = {"batch_size": 1, "gradient_accumulation": 2}
    with leaving_together():
        for name, changes, stop in cases:
            settings = small_settings(texts, **changes)
            if stop is None:
                train(settings, folder / name, quiet())
                continue
            with pytest.MonkeyPatch.context() as patch:
                stopped_run(patch, settings, folder / name, stop)
            torch.manual_seed(12345)
            resume(folder / name, quiet())
        with pytest.MonkeyPatch.context() as patch:
            break_loss(patch, 3)
            with pytest.raises(RunError) as raised:
                train(small_settings(texts, data_parallel="zero2", **half), folder / "broken", quiet())
        if dist.get_rank() == 0:
            (folder / "broken.txt").write_text(str(raised.value))
        with pytest.MonkeyPatch.context() as patch:
            stopped_run(patch, small_settings(texts, data_parallel="zero3", **half), folder / "left", 13)


if __name__ == "__main__":
    main()
