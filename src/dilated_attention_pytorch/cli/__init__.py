"""The command ``dilated-attention``."""

import importlib
import sys
from collections.abc import Sequence

from dilated_attention_pytorch.installation import check_files, importing

from .words import answer

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line ``args``; None takes the process's own.

    Raises:
        SystemExit: with 2 for problems that the user can fix, after a message on standard error; with 128 plus the
            number of the signal for a run that was stopped.
    """
    words = list(sys.argv[1:] if args is None else args)
    answer(words)
    try:
        check_files()  # again: the package's own __init__.py may have been overwritten
    except ImportError as error:
        print(f"dilated-attention: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    try:
        with importing("the command", "train"):
            for name in ("tyro", "rich"):
                importlib.import_module(name)
    except ImportError as error:
        _run_without(str(error), words)
    else:
        try:
            from .command import run_command
        except MemoryError:
            sentence = "the memory is used up before the command begins; give it more (ulimit -v)"
            print(f"dilated-attention: {sentence}", file=sys.stderr)
            raise SystemExit(2) from None
        run_command(words)


def _run_without(problem: str, words: Sequence[str]) -> None:
    """Run without the packages that parse command lines: commands without options, or a message on what to install."""
    from dilated_attention_pytorch.errors import RunError

    if words in (["info"], ["info", "--check"]):
        from .info import Info

        Info(check="--check" in words).run_command()
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
        f"dilated-attention: {problem} (`dilated-attention info` and `dilated-attention build` run without)",
        file=sys.stderr,
    )
    raise SystemExit(2)
