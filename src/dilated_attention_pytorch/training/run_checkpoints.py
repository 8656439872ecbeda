"""The checkpoints of a run: written during the steps, complete or absent, by the job that holds the run folder."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.torch_version import TorchVersion
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.estimate.memory import largest_file

from .checkpoint import checkpoint_step, checkpoints, clear, latest_checkpoint, publish, remove_leftovers
from .extension_settings import ExtensionSettings
from .faults import note_resumed
from .lifecycle import OpenRun
from .preflight import checkpoint_space, file_limit
from .process_group import from_first
from .settings import TrainSettings

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_MAKE_ROOM = "make room and allow writing"
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_NAME = "dilated-attention-checkpoint"
_IS_CLOSED_BY_A_COPY = TorchVersion(torch.__version__) < TorchVersion("2.13")
"""PyTorch 2.11 closes a stager after its first copy, 2.13 keeps it with its memory."""
_State = TypeVar("_State")


def _new_stager() -> DefaultStager:
    on_gpu = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu
        )
    )


class CheckpointWriter:
    """Copies state and writes it in the background, or writes it synchronously.

    ``torch.distributed.checkpoint.async_save`` does both too, but in its own format with a pickled index: loading
    it could execute code, and other programs could not read the weights. Only its stager is used for the copies.

    Args:
        in_background: copy state and write in a thread; False writes synchronously without copies.
    """

    def __init__(self, in_background: bool) -> None:
        self._threads = ThreadPoolExecutor(1, _NAME, self._note_thread) if in_background else None
        self._thread: int | None = None
        self._writing: Future[None] | None = None
        self._stager = _new_stager()

    def close(self) -> None:
        """Wait for the thread: the run folder belongs to this job until it has finished."""
        if self._threads is not None:
            self._threads.shutdown()

    def kept(self, state: _State) -> _State:
        """``state`` as of now, for a later write."""
        if self._threads is None:
            return state
        stager = _new_stager() if _IS_CLOSED_BY_A_COPY else self._stager
        copy: _State = stager.stage(state)  # type: ignore[arg-type,assignment]
        return copy

    def start(self, write: Callable[[], None]) -> None:
        """Run ``write`` in the background. Call :meth:`finish` before the next one."""
        assert self._writing is None
        if self._threads is None:
            write()
        else:
            self._writing = self._threads.submit(write)

    def finish(self) -> None:
        """Wait for the last write and raise its error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def wait(self) -> None:
        """Wait for the last write and ignore its error; returns at once in the writing thread itself."""
        if self._writing is not None and threading.get_ident() != self._thread:
            wait([self._writing])

    def _note_thread(self) -> None:
        self._thread = threading.get_ident()

    def has_failed(self) -> bool:
        """Whether the last write failed; :meth:`finish` raises its error."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None


class RunCheckpoints(TrainerCallback):
    """Writes the checkpoints of a run to its staging area, renames each when complete, and then removes old ones.

    Args:
        run: the run. Damaged checkpoints are removed when the next one is complete.
        settings: settings of the run.
        args: transformers' arguments of this process.
        num_weights: number of the model's weights, for the sizes of files.
    """

    def __init__(
        self, run: OpenRun, settings: TrainSettings | ExtensionSettings, args: TrainingArguments, num_weights: int
    ) -> None:
        self.run, self.settings, self.args = run, settings, args
        self.output = run.folder
        """The folder in which transformers writes now."""
        self.writer = CheckpointWriter(settings.async_checkpoints)
        self._rejected: Collection[str] = run.start.rejected.keys()
        self._num_weights = num_weights
        self._to_write: list[Callable[[], None]] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove what killed jobs left, and log the resumption."""
        if not args.should_save:
            return
        run, start, keep = self.run, self.run.start.checkpoint, self.settings.keep_checkpoints
        remove_leftovers(run.folder, start=start, keep=keep, rejected=self._rejected, check=run.check)
        if run.before is not None:
            note_resumed(run.folder, run.before, start, step=run.step, processes=args.world_size)

    def finish(self) -> None:
        """Wait, in every process, for the checkpoint being written.

        Raises:
            RunError: it could not be written.
        """
        from_first(self.writer.finish)

    def write_later(self, write: Callable[[_State], None], state: _State) -> None:
        """Have ``write`` called with a copy of ``state`` as it is now, after :meth:`staging`."""
        self._to_write.append(partial(write, self.writer.kept(state)))

    @contextmanager
    def staging(self, what: str) -> Iterator[None]:
        """Context in which the small files of ``what`` are written, and the large ones copied (:meth:`write_later`)."""
        self.finish()
        self.output = self.run.staging
        try:
            with self.writing(what):
                from_first(self.run.check)
                if self.args.should_save:
                    clear(self.run.staging)
                yield
        finally:
            self.output = self.run.folder
        if self.args.should_save:
            self.writer.start(partial(self._complete, what, self._to_write))
        self._to_write = []

    def _complete(self, what: str, to_write: list[Callable[[], None]]) -> None:
        with self.writing(what):
            for write in to_write:
                write()
            complete = latest_checkpoint(self.run.staging)
            assert complete is not None
            self.run.check()
            publish(
                complete,
                self.run.folder,
                run_id=self.run.run_id,
                processes=self.args.world_size,
                keep=self.settings.keep_checkpoints,
                rejected=self._rejected,
                check=self.run.check,
            )
        self._rejected = ()

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Context that raises :class:`RunError` if the disk refuses ``what``, and removes what was written of it."""
        try:
            yield
        except (OSError, RuntimeError, SafetensorError, RunError) as error:
            if self.args.should_save:
                clear(self.run.staging)
            if isinstance(error, RunError):
                raise
            self.raise_disk_error(error, f"while {what} was written to {self.run.folder}")
            raise

    def raise_disk_error(self, error: Exception, when: str) -> None:
        """Raise :class:`RunError` with a remedy if the disk is the reason of ``error``."""
        self.run.check()
        reason, remedy = self._disk_trouble(error)
        if reason:
            raise RunError(f"{reason} {when}; {remedy}, {self.how_to_resume()}") from error

    def how_to_resume(self) -> str:
        """Message after a stop: what is kept of the run, and how to resume it."""
        self.writer.wait()
        kept = next((path for path in checkpoints(self.run.folder) if path.name not in self._rejected), None)
        if kept is None:
            return "no checkpoint was complete yet"
        return f"the checkpoint of step {checkpoint_step(kept)} is kept: resume from it with --resume {self.run.folder}"

    def _disk_trouble(self, error: Exception) -> tuple[str, str]:
        """Why the disk refused, "" if it did not, and a remedy. Torch and safetensors pass on no error number."""
        number = error.errno if isinstance(error, OSError) else None
        if number in _DISK_FULL:
            return "the disk is full", _MAKE_ROOM
        if number in _READ_ONLY:
            return "the run folder became read-only", _MAKE_ROOM
        optimizer, weights = self.settings.optimizer, self._num_weights
        if number == errno.EFBIG or (number is None and file_limit() < largest_file(optimizer, weights)):
            return "the limit on the size of a file is reached (ulimit -f)", "raise it"
        is_short = shutil.disk_usage(self.run.folder).free < checkpoint_space(optimizer, weights)
        return ("the disk is full" if is_short and not isinstance(error, OSError) else "", _MAKE_ROOM)
