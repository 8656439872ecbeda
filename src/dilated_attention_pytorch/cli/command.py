"""Command line parsing and dispatch, with error messages and exit codes."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, Protocol, Union

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from dilated_attention_pytorch.installation import import_failure
from dilated_attention_pytorch.interrupt import MESSAGE
from dilated_attention_pytorch.memory import is_out_of_memory
from dilated_attention_pytorch.training import RunError

from .bench import Bench
from .build import Build
from .diagnose import Diagnose
from .embed import Embed
from .evaluate import Eval
from .extend import Extend, defaults_of_extend
from .finetune import Finetune
from .generate import Generate
from .heatmap import Heatmap
from .help_page import PROGRAM
from .info import Info
from .plan import PlanCommand, defaults_of_plan
from .profile import ProfileRun
from .report import Report
from .show import Show
from .stopping import flags_in
from .tokenizer import Tokenizer
from .train import Train, defaults_of
from .tune import Tune
from .words import COMPLETION, in_our_names, leave, leave_broken_pipe


class _Command(Protocol):
    """A command with its options as fields."""

    def run_command(self) -> None:
        """Run the command."""
        ...


COMMANDS: Mapping[str, type] = {
    "train": Train,
    "extend": Extend,
    "generate": Generate,
    "embed": Embed,
    "finetune": Finetune,
    "heatmap": Heatmap,
    "eval": Eval,
    "report": Report,
    "diagnose": Diagnose,
    "tokenizer": Tokenizer,
    "bench": Bench,
    "profile": ProfileRun,
    "tune": Tune,
    "plan": PlanCommand,
    "show": Show,
    "build": Build,
    "info": Info,
}
"""Commands by name."""
_DEFAULTS: Mapping[str, Callable[[Sequence[str]], Any]] = {
    "train": defaults_of,
    "extend": defaults_of_extend,
    "plan": defaults_of_plan,
}
"""Functions that compute a command's defaults from its arguments."""
_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file would be larger than the limit of this shell (ulimit -f)",
}
_EXTRAS = {
    "embed": "slides",
    "finetune": "finetune",
    "heatmap": "plot",
    "report": "report",
    "bench": "bench",
    "tune": "bench",
    "show": "plot",
}
"""Extras of the commands; of all others "train"."""
_THAT_GO_ON = ("train", "extend")

_PATHS = ConstructorRegistry()
"""Conversion of arguments to paths."""


@_PATHS.primitive_rule
def _path(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Path] | None:
    if info.type is not Path:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=_read_path,
        is_instance=lambda value: isinstance(value, Path),
        str_from_instance=lambda path: [str(path)],
    )


def _read_path(words: list[str]) -> Path:
    # Path("") is the working directory, which an empty argument hardly means.
    if not words[0].strip():
        raise RunError(
            "a path on the command line is empty (a variable of the shell that is not set?); this folder is ."
        )
    return Path(words[0])


def run_command(args: Sequence[str]) -> None:
    """Parse ``args`` and run the command; see :func:`dilated_attention_pytorch.cli.main`."""
    try:
        with _PATHS:
            command = _parse(list(args))
        command.run_command()
    except RunError as error:
        leave(str(error))
    except ImportError as error:
        leave(str(import_failure(error, args[0], _EXTRAS.get(args[0], "train"))))
    except BrokenPipeError:
        leave_broken_pipe()
    except OSError as error:
        if error.errno in _FULL:
            where = f" ({error.filename})" if error.filename else ""
            remedy = "raise it" if error.errno == errno.EFBIG else "make room"
            if args[0] in _THAT_GO_ON:
                remedy += ", then go on with --resume RUN"
            elif error.errno != errno.EFBIG:
                remedy += ", or name a folder on another disk"
            leave(f"{_FULL[error.errno]}{where}; {remedy}")
        if error.errno == errno.ENOMEM:
            _leave_out_of_memory(args[0], error)
        if error.filename is None:
            raise
        if error.errno == errno.EROFS:
            leave(f"{error.filename}: the disk is read-only; name a place on one that can be written")
        leave(f"{error.filename}: {error.strerror}; check the path and its permissions, or name another one")
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _leave_out_of_memory(args[0], error)
    except KeyboardInterrupt:
        print(MESSAGE, end="", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None


def _parse(args: list[str]) -> _Command:
    name, *rest = in_our_names(args)
    if name == COMPLETION:
        _print_completion(rest[0])
    default = defaults_for(name, rest)
    options = {} if default is None else {"default": default}
    command: _Command = tyro.cli(COMMANDS[name], args=rest, prog=f"{PROGRAM} {name}", **options)
    if isinstance(command, (Train, Extend)):
        command.given = tuple(flag.removeprefix("--").replace("-", "_") for flag in flags_in(rest))
    return command


def defaults_for(name: str, rest: Sequence[str]) -> Any:
    """The defaults of a command, of which the words after it may name others; None: those of its fields."""
    return _DEFAULTS[name](rest) if name in _DEFAULTS else None


def _print_completion(shell: str) -> NoReturn:
    parts = [Annotated[command, tyro.conf.subcommand(name)] for name, command in COMMANDS.items()]
    any_of: Any = Union[tuple(parts)]  # noqa: UP007 - of a list
    tyro.cli(any_of, prog=PROGRAM, args=["--tyro-write-completion", shell, "-"])
    raise AssertionError("tyro exits after it has written a completion")


def _leave_out_of_memory(name: str, error: Exception) -> NoReturn:
    going_on = ", or go on where there is more of it with --resume RUN" if name in _THAT_GO_ON else ""
    reason = str(error).partition("\n")[0]
    leave(f"the memory is used up{f' ({reason})' if reason else ''}; take smaller numbers{going_on}")
