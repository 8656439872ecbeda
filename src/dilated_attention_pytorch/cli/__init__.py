"""The command ``dilated-attention``."""

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line ``args``, without it the process's own.

    Raises:
        SystemExit: with 2 for what the user can mend, after a sentence on standard error; with 128 and the number of
            the signal for a run that was stopped.
    """
    try:
        from .command import run_command
    except ModuleNotFoundError as error:
        if error.name not in ("tyro", "rich"):
            raise
        print(
            f"dilated-attention: the command needs {error.name}, not installed here: "
            "pip install 'dilated-attention-pytorch[train]'",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    run_command(sys.argv[1:] if args is None else args)
