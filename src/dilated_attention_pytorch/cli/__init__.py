"""The command ``dilated-attention``."""

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line ``args``; None takes the process's own.

    Raises:
        SystemExit: with 2 for problems that the user can fix, after a message on standard error; with 128 plus the
            number of the signal for a run that was stopped.
    """
    words = list(sys.argv[1:] if args is None else args)
    try:
        from .command import run_command
    except ModuleNotFoundError as error:
        if error.name not in ("tyro", "rich"):
            raise
        _run_without(error.name, words)
    else:
        run_command(words)


def _run_without(missing: str, words: Sequence[str]) -> None:
    """Run without the packages that parse command lines: commands without options, or a message on what to install."""
    from dilated_attention_pytorch.errors import RunError
    from dilated_attention_pytorch.installation import install_command

    if words == ["info"]:
        from .info import Info

        Info().run_command()
        return
    if words == ["build"]:
        from .build import Build

        try:
            Build().run_command()
        except RunError as error:
            print(f"dilated-attention: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        return
    print(
        f"dilated-attention: the command needs {missing}, not installed here: {install_command('train')} "
        "(`dilated-attention info` and `dilated-attention build` run without)",
        file=sys.stderr,
    )
    raise SystemExit(2)
