"""``python -m dilated_attention_pytorch.benchmarks``: the benchmark with only torch, rich and matplotlib installed.

``dilated-attention bench`` is the same run with every option on the command line.
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
from .shapes import DtypeName, Mode

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
    parser.add_argument("--output", type=Path, help="folder for bench.json and the plots; default runs/bench-PRESET")
    parser.add_argument("--shapes", nargs="+", default=(), help="sweep these shapes instead")
    parser.add_argument("--rows", nargs="+", type=int, default=(), help="numbers of rows")
    parser.add_argument("--head-dims", nargs="+", type=int, default=(), help="widths of a head")
    parser.add_argument("--modes", nargs="+", choices=get_args(Mode), default=(), help="what to time")
    parser.add_argument("--dtypes", nargs="+", choices=get_args(DtypeName), default=(), help="dtypes")
    parser.add_argument("--contestants", nargs="+", default=(), help="parts of the names of those who take part")
    parser.add_argument("--time-limit", type=float, help="seconds after which no further call is begun")
    parser.add_argument("--resume", action="store_true", help="go on with the run in the output folder")
    parser.add_argument("--compare", type=Path, help="bench.json of an earlier run")
    parser.add_argument("--dry-run", action="store_true", help="a few rows: sees that everything works")
    words = parser.parse_args()
    # When the output is a file, use lines as wide as the tables.
    console = plain_console(width=150)
    try:
        settings = BenchSettings(
            preset=words.preset,
            output=words.output,
            shapes=tuple(words.shapes),
            rows=tuple(words.rows),
            head_dims=tuple(words.head_dims),
            modes=tuple(words.modes),
            dtypes=tuple(words.dtypes),
            contestants=tuple(words.contestants),
            time_limit=words.time_limit,
            resume=words.resume,
            compare=words.compare,
            dry_run=words.dry_run,
        )
        run(settings, console, module_command())
    except DeviceLostError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        raise SystemExit(LEAVES_WHEN_LOST) from error
    except (RunError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
