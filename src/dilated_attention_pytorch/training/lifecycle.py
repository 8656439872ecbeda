"""The life cycle of training runs: acquire the folder, resume from a checkpoint, train to the end."""

from __future__ import annotations

import gc
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.machine import machine
from dilated_attention_pytorch.output import check_writable, make_output, write_text

from . import preflight
from .autocast import computing_dtype
from .checkpoint import SETTINGS_NAME, WEIGHTS_NAME, Start, checkpoint_step, choose_start, staging_folder
from .configuration import CONFIGURATION_NAME, configuration_text
from .corpus import CORPUS_KEYS
from .faults import Interrupted, cost_of_faults, interrupted, note_fault, steps_of
from .lease import Lease
from .manifest import read_sealed, sealed
from .measures import WorkDone, matrix_product_rate
from .together import all_or_none, from_all, from_first, in_first, is_first_process, num_processes, process_rank

if TYPE_CHECKING:
    from rich.console import Console

    from .run_settings import RunSettings
    from .run_trainer import RunTrainer
    from .trackers import Trackers


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenRun:
    """A run folder held exclusively by this job."""

    folder: Path
    """Run folder."""
    run_id: str
    """Unique id of the run."""
    start: Start
    """Checkpoint to start from."""
    lease: Lease | None
    """The lease of the folder; None in processes that write no files of their own."""
    staging: Path
    """Folder in which this job writes checkpoints."""
    console: Console
    """Console for messages."""
    before: Interrupted | None = None
    """State of the previous job, if the run is resumed."""
    skipped: frozenset[int] = frozenset()
    """Steps (from 1) taken without their batch."""
    broken: frozenset[int] = frozenset()
    """Steps after which the state was not finite and the run rewound."""

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return 0 if self.start.checkpoint is None else checkpoint_step(self.start.checkpoint)

    def write_record(self, command: str, settings: RunSettings, device: str, **values: Any) -> dict[str, Any]:
        """Write what identifies the run, for :func:`read_record`, and its settings as a configuration file.

        Returns the record: ``values``, the id of the run, its settings with the chosen device, and the machine.
        """
        chosen = {**settings.to_dict(), "device": device}
        record = {**values, "run": self.run_id, "settings": chosen, "machine": machine()}
        write_text(self.folder / SETTINGS_NAME, sealed(record))
        write_text(self.folder / CONFIGURATION_NAME, configuration_text(chosen, command))
        return record

    def say(self, *lines: str) -> None:
        """Print lines verbatim."""
        for line in lines:
            _say(self.console, line)


@contextmanager
def begin(output: Path, console: Console) -> Iterator[OpenRun]:
    """Create the run folder ``output`` and hold it within the context. A collective of all processes.

    Raises:
        RunError: another job holds it, or ran there since it was checked.
    """
    run_id, start = from_first(lambda: secrets.token_hex(8)), Start(checkpoint=None, left={})
    with _held(output, console, is_new=True) as (lease, staging):
        yield OpenRun(folder=output, run_id=run_id, start=start, lease=lease, staging=staging, console=console)


@contextmanager
def open_for_resume(
    folder: Path, console: Console, *, run_id: str, check: Callable[[Path], None], may_begin: bool = False
) -> Iterator[OpenRun]:
    """Hold the folder of a stopped run within the context, to resume it. A collective of all processes.

    Args:
        folder: run folder.
        console: console for messages.
        run_id: unique id of the run.
        check: raises :class:`RunError` for an intact checkpoint of another run.
        may_begin: whether the run may start without a checkpoint.

    Raises:
        RunError: another job holds it, or no checkpoint is intact.
    """
    what = f"--resume {folder}"
    before = in_first(lambda: interrupted(folder))
    with _held(folder, console) as (lease, staging):

        def choose() -> Start:
            start = choose_start(folder, run_id, num_processes(), check)
            if start.checkpoint is None and not may_begin:
                raise RunError(
                    f"{what}: the run was stopped before its first checkpoint; start a new run with another --output"
                )
            return start

        start = from_first(choose)
        all_or_none(lambda: start.verify_here(run_id, num_processes(), process_rank()))
        skipped, broken = from_first(lambda: (steps_of(folder, "skipped"), steps_of(folder, "broken")))
        yield OpenRun(
            folder=folder,
            run_id=run_id,
            start=start,
            lease=lease,
            staging=staging,
            console=console,
            before=before,
            skipped=skipped,
            broken=broken,
        )


@contextmanager
def _held(folder: Path, console: Console, *, is_new: bool = False) -> Iterator[tuple[Lease | None, Path]]:
    """Hold ``folder`` within the context, and create it if it ``is_new``. A collective of all processes.

    Yields the lease, which only the first process has, and this job's staging folder.
    """
    with ExitStack() as held:

        def take() -> Lease:
            if is_new:
                make_output(folder)
            lease = held.enter_context(Lease(folder, partial(_say, console)))
            if is_new:
                preflight.check_output(folder)
            return lease

        lease = in_first(take)
        yield lease, staging_folder(folder, from_first(lambda: "" if lease is None else lease.token))


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def read_record(folder: Path, command: str, *, finished: str) -> Iterator[dict[str, Any]]:
    """Context with the record of a run; errors while reading it become messages.

    Args:
        folder: run folder.
        command: command that starts such runs.
        finished: advice for a run that is already finished.

    Raises:
        RunError: the run does not exist, its record is damaged or of another command, or it is finished.
    """
    what = f"--resume {folder}"
    if not folder.is_dir():
        raise RunError(f"{what}: there is no such folder; name the --output of the run that was stopped")
    with _described(folder, command) as record:
        yield record
    if (folder / WEIGHTS_NAME).exists():
        raise RunError(f"{what}: that run is finished; {finished}, or start a new run with another --output")
    check_writable(folder, what)


@contextmanager
def _described(folder: Path, command: str) -> Iterator[dict[str, Any]]:
    """Context with the record of a run.

    Raises:
        RunError: it is damaged, or of another command.
    """
    article = "an" if command[0] in "aeiou" else "a"
    what, remedy = f"--resume {folder}", f"name the --output of {article} `{command}` command"
    record = read_sealed(folder / SETTINGS_NAME, what=what, remedy=remedy)
    try:
        _ = {name: int(record["corpus"][name]) for name in CORPUS_KEYS}
        if not isinstance(record["run"], str):
            raise TypeError(f"run {record['run']!r}")
        yield record
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{what}: {folder / SETTINGS_NAME} describes no such run ({error}); {remedy}") from error


Found = Literal["nothing", "stopped", "finished"]
"""State of a folder that may hold a run."""


def find_run(output: Path, settings: RunSettings, command: str) -> Found:
    """State of the run in ``output``, provided that the same command line started it.

    Args:
        output: run folder.
        settings: settings of this command line. Where it leaves choices to the run, any choice matches.
        command: command that starts such runs.

    Raises:
        RunError: it holds a run with other settings.
    """
    if not os.path.lexists(output / SETTINGS_NAME):
        return "nothing"
    with _described(output, command) as record:
        begun = record["settings"]
        left_open = settings.left_open()
        given = {name: value for name, value in settings.to_dict().items() if left_open.get(name) != value}
        differing = sorted(name for name, value in given.items() if begun.get(name) != value)
    if differing:
        words = ", ".join(f"{name} {begun.get(name)!r} there, {given[name]!r} here" for name in differing[:3])
        raise RunError(
            f"--resume auto: the run in {output} was begun with other settings ({words}"
            f"{', ...' if len(differing) > 3 else ''}); name another --output, or go on with --resume {output}"
        )
    return "finished" if (output / WEIGHTS_NAME).exists() else "stopped"


def check_same_corpus(found: dict[str, int], figures: dict[str, int], folder: Path) -> None:
    """Raise :class:`RunError` unless the text of a resumed run has the recorded figures."""
    if found != figures:
        raise RunError(
            f"--resume {folder}: the text is not what the run began with (now {found}, then {figures}); restore the "
            "files, or start a new run with another --output"
        )


def train_to_the_end(
    run: OpenRun,
    trainer: RunTrainer,
    *,
    work: WorkDone,
    trackers: Trackers,
) -> int | None:
    """Train from the starting checkpoint, with progress bar, metrics and checkpoints.

    Args:
        run: the run.
        trainer: its trainer.
        work: amount of work of its steps.
        trackers: receivers of its figures besides the log.

    Returns:
        the signal that stopped it; None if it reached the end.

    Raises:
        RunError: it cannot continue; the message says what is kept.
    """
    from .callbacks import Bar, Interruption, Metrics

    work = work.without(run.skipped)
    bar = Bar(run.console)
    args = trainer.args
    rate = sum(from_all(matrix_product_rate(args.device, computing_dtype(trainer.settings.precision))))
    with _noting_failure(run, trainer):
        if trainer.is_world_process_zero():
            trainer.checkpoints.check_lease()
            run.say(*run.start.describe())
            if run.start.checkpoint is not None:
                run.say(f"going on after step {run.step} of {args.max_steps:,}")
            trainer.add_callback(
                Metrics(
                    run.folder,
                    run.step,
                    work=work,
                    device=args.device,
                    matrix_product_flops=rate,
                    receivers=[bar.log, trackers.log],
                )
            )
            trainer.add_callback(bar)
        checkpoint = run.start.checkpoint
        with (
            Interruption(
                trainer.accelerator, trainer.checkpoints.writer.has_failed, trainer.checkpoints.finish
            ) as interruption,
            bar,
        ):
            trainer.add_callback(interruption)
            with naming_ranks("training", trainer):
                trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        stopped_by = interruption.signal if trainer.state.global_step < args.max_steps else None
        if trainer.is_world_process_zero():
            if stopped_by is not None:
                trainer.checkpoints.check_lease()
                note_fault(run.folder, "stopped", step=trainer.state.global_step, signal=stopped_by)
            run.say(*filter(None, [cost_of_faults(run.folder).describe()]))
    return stopped_by


@contextmanager
def _noting_failure(run: OpenRun, trainer: RunTrainer) -> Iterator[None]:
    """Context that logs an error that ends the run, if this job still holds the folder and can write."""
    try:
        yield
    except RunError as error:
        if run.lease is not None and run.lease.is_held():
            with suppress(OSError):
                note_fault(run.folder, "failed", step=trainer.state.global_step, reason=str(error))
        raise


@contextmanager
def naming_ranks(doing: str, trainer: RunTrainer) -> Iterator[None]:
    """Context in which all processes end when one fails, naming its rank and what is kept of the run."""
    from dilated_attention_pytorch import parallel

    try:
        with parallel.naming_ranks(doing):
            yield
    except parallel.RankFailure as error:
        raise RunError(f"{error}; {trainer.checkpoints.how_to_resume()}") from error


_Outcome = TypeVar("_Outcome")


class RewindRequested(Exception):
    """Raised in all processes alike to resume from the newest checkpoint; the message gives the reason."""


def with_rewind(begin: Callable[[], _Outcome], resume: Callable[[], _Outcome], console: Console) -> _Outcome:
    """The result of ``begin``, or of ``resume`` after every :class:`RewindRequested`.

    ``resume`` does the same as ``--resume``, from reading the record to verifying the checkpoint; no state of the
    failed attempt is kept in memory.
    """
    attempt = begin
    while True:
        try:
            return attempt()
        except RewindRequested as error:
            reason = str(error)
        gc.collect()  # model and trainer form reference cycles
        if is_first_process():
            console.print(reason, highlight=False, markup=False, soft_wrap=True)
        attempt = resume
