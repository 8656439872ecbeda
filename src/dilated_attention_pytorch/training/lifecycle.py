"""The life cycle of training runs: hold the folder, resume from a checkpoint, train to the end, or rewind."""

from __future__ import annotations

import gc
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.machine import machine
from dilated_attention_pytorch.output import make_output, write_text
from dilated_attention_pytorch.progress import spinner

from . import preflight
from .autocast import computing_dtype
from .checkpoint import SETTINGS_NAME, WEIGHTS_NAME, Start, checkpoint_step, choose_start, save_finished, staging_folder
from .configuration import CONFIGURATION_NAME, configuration_text
from .faults import Interrupted, cost_of_faults, interrupted, note_fault, steps_of
from .lease import Lease, check_exists
from .manifest import sealed
from .measures import WorkDone, matrix_product_rate
from .process_group import all_or_none, from_all, from_first, in_first, num_processes, process_rank, say_once

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel

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
    record: dict[str, Any] = field(default_factory=dict)
    """What the folder says about the run, in the process that writes it: see :mod:`.record`."""
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

    def check(self) -> None:
        """Raise :class:`RunError` if the folder is gone, or another job has taken it; call it before each change."""
        check_exists(self.folder)
        if self.lease is not None:
            self.lease.check()

    def write_record(self, command: str, settings: RunSettings, device: str, **values: Any) -> None:
        """Write what identifies the run, for :mod:`.record`, and its settings as a configuration file.

        The record holds ``values``, the id of the run, its settings with the chosen device, and the machine.
        """
        chosen = {**settings.to_dict(), "device": device}
        self.add_to_record(**values, run=self.run_id, settings=chosen, machine=machine())
        write_text(self.folder / CONFIGURATION_NAME, configuration_text(chosen, command))

    def add_to_record(self, **values: Any) -> None:
        """Write ``values`` to the record, in addition to what it holds or instead of it."""
        self.check()
        self.record.update(values)
        write_text(self.folder / SETTINGS_NAME, sealed(self.record))

    def save_finished(self, model: PreTrainedModel, step: int) -> None:
        """Save the trained model to the folder; see :func:`.checkpoint.save_finished`."""
        self.check()
        with spinner("writing the trained model", self.console):
            save_finished(model, self.folder, run_id=self.run_id, step=step, staging=self.staging, check=self.check)

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
    run_id, start = from_first(lambda: secrets.token_hex(8)), Start(checkpoint=None, rejected={})
    with _held(output, console, is_new=True) as (lease, staging):
        yield OpenRun(folder=output, run_id=run_id, start=start, lease=lease, staging=staging, console=console)


@contextmanager
def open_for_resume(
    folder: Path,
    console: Console,
    *,
    record: dict[str, Any],
    check: Callable[[Path], None],
    may_begin: bool = False,
) -> Iterator[OpenRun]:
    """Hold the folder of a stopped run within the context, to resume it. A collective of all processes.

    Args:
        folder: run folder.
        console: console for messages.
        record: the record of the run (:func:`.record.read_record`).
        check: raises :class:`RunError` for an intact checkpoint of another run.
        may_begin: whether the run may start without a checkpoint.

    Raises:
        RunError: another job holds it, or no checkpoint is intact.
    """
    what, run_id = f"--resume {folder}", record["run"]
    before = in_first(lambda: interrupted(folder))
    with _held(folder, console) as (lease, staging):

        def choose() -> Start:
            start = choose_start(folder, run_id, num_processes(), check)
            if start.checkpoint is None and (folder / WEIGHTS_NAME).exists():
                raise RunError(
                    f"{what}: no checkpoint to go on from is left of that finished run; begin another run with its "
                    f"weights: --init-from {folder} --output ANOTHER"
                )
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
            record=record,
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


def train_to_the_end(trainer: RunTrainer, *, work: WorkDone, trackers: Trackers) -> int | None:
    """Train from the starting checkpoint, with progress bar, metrics and checkpoints.

    Args:
        trainer: trainer of the run.
        work: amount of work of its steps.
        trackers: receivers of its figures besides the log.

    Returns:
        the signal that stopped it; None if it reached the end.

    Raises:
        RunError: it cannot continue; the message says what is kept.
    """
    from .callbacks import Bar, Interruption, Metrics

    run, args = trainer.run, trainer.args
    work = work.without(run.skipped)
    bar = Bar(run.console)
    rate = sum(from_all(matrix_product_rate(args.device, computing_dtype(trainer.settings.precision))))
    with _noting_failure(trainer):
        if trainer.is_world_process_zero():
            run.check()
            run.say(*run.start.describe())
            if run.start.checkpoint is not None:
                run.say(f"going on after step {run.step} of {args.max_steps:,}")
            trainer.add_callback(
                Metrics(
                    run.folder,
                    run.step,
                    steps=args.max_steps,
                    work=work,
                    device=args.device,
                    matrix_product_flops=rate,
                    receivers=[bar.log, trackers.log],
                )
            )
            trainer.add_callback(bar)
        checkpoint = run.start.checkpoint
        with Interruption(trainer.accelerator, trainer.checkpoints) as interruption, closing(bar):
            trainer.add_callback(interruption)
            with naming_ranks("training", trainer):
                trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        stopped_by = interruption.signal if trainer.state.global_step < args.max_steps else None
        if trainer.is_world_process_zero():
            if stopped_by is not None:
                run.check()
                note_fault(run.folder, "stopped", step=trainer.state.global_step, signal=stopped_by)
            run.say(*filter(None, [cost_of_faults(run.folder).describe()]))
    return stopped_by


@contextmanager
def _noting_failure(trainer: RunTrainer) -> Iterator[None]:
    """Context that logs an error that ends the run, if this job still holds the folder and can write."""
    run = trainer.run
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
        say_once(console, reason)
        attempt = resume
