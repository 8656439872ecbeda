"""``python -m dilated_attention_pytorch.benchmarks``: the benchmark with only torch and rich installed.

``dilated-attention bench`` is the same run, with more options.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.terminal import plain_console

from .measure import DeviceLostError
from .results import module_command
from .run import run
from .settings import BenchSettings, PresetName

LEAVES_WHEN_LOST = 75
"""Exit code after an error that only a new process can recover from."""


def main() -> None:
    """Parse the command line and run.

    Raises:
        SystemExit: with 2, after an error message, for problems that the user can fix; with 75 if the
            device is lost to this process, and the same command with --resume continues.
    """
    parser = argparse.ArgumentParser(
        prog="python -m dilated_attention_pytorch.benchmarks",
        description=BenchSettings.__doc__,
        epilog="Every other option: dilated-attention bench --help (needs the extra bench).",
    )
    parser.add_argument("--preset", choices=get_args(PresetName), default="auto", help="which sweeps to run")
    parser.add_argument("--output", type=Path, help="folder for bench.json and page.md; default runs/bench-PRESET")
    parser.add_argument("--shapes", nargs="+", default=(), help="sweep these shapes instead")
    parser.add_argument("--implementations", nargs="+", default=(), help="parts of the names of those to time")
    parser.add_argument("--time-limit", type=float, help="seconds after which no further call is begun")
    parser.add_argument("--resume", action="store_true", help="continue the run in the output folder")
    parser.add_argument("--dry-run", action="store_true", help="a few rows: checks that everything works")
    words = vars(parser.parse_args())
    words |= {"shapes": tuple(words["shapes"]), "contestants": tuple(words.pop("implementations"))}
    try:
        # When the output is a file, use lines as wide as the tables.
        run(BenchSettings(**words), plain_console(width=150), module_command())
    except DeviceLostError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        raise SystemExit(LEAVES_WHEN_LOST) from error
    except (RunError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
