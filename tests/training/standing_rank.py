"""A run in which a rank stands still, under `torchrun --max-restarts`: all begin again, and the run comes to its end.

    python tests/training/standing_rank.py FOLDER

It takes more than half a minute, as torchrun waits so long for a process that does not end when it is told to.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from dilated_attention_pytorch.training.faults import cost_of_faults, read_faults
from support.processes import run_whole
from training.runs import write_texts
from training.test_launches import HANG_SECONDS, _command, _environment, _words


def main() -> None:
    """Run it, and print what it cost."""
    folder = Path(sys.argv[1]) / "standing"
    shutil.rmtree(folder, ignore_errors=True)
    run = folder / "run"
    words = ["waits", "1", "6", *_words(write_texts(folder / "texts"), run), "--timeout", "6", "--eval-windows", "1"]
    ended = run_whole(_command(2, words, "--max-restarts", "2"), HANG_SECONDS, env=_environment())
    assert ended.returncode == 0, ended.stderr
    (failed,), (resumed,) = read_faults(run, "failed"), read_faults(run, "resumed")
    assert failed["reason"].startswith("training: rank 1 is alive, but takes no part"), failed
    assert (resumed["step"], resumed["processes"]) == (4, 2)
    assert (run / "checkpoint-9").is_dir()
    print(f"rank 1 of 2 stands still in step 7: {cost_of_faults(run).describe()}")


if __name__ == "__main__":
    main()
