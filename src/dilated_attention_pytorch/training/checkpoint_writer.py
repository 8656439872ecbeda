"""Checkpoints that are written beside the computation, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import TypeVar

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

_NAME = "dilated-attention-checkpoint"
_State = TypeVar("_State")


class CheckpointWriter:
    """Copies states and writes them, in a thread or at once.

    ``torch.distributed.checkpoint.async_save`` would do both, in a format of its own whose index is a pickle: loading
    it would run what is in it, and no other program would read the weights. Its stager makes the copies.

    Args:
        is_beside: whether to copy and to write in a thread; else nothing is copied.
    """

    def __init__(self, is_beside: bool) -> None:
        self._threads = ThreadPoolExecutor(1, _NAME, self._note_thread) if is_beside else None
        self._thread: int | None = None
        self._writing: Future[None] | None = None
        on_gpu = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False,
                use_non_blocking_copy=on_gpu,
            )
        )  # fmt: skip

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # However training ends: the run folder is this job's until the thread is done with it.
        if self._threads is not None:
            self._threads.shutdown()

    def kept(self, state: _State) -> _State:
        """``state`` as it is now, for what is written later."""
        if self._threads is None:
            return state
        copy: _State = self._stager.stage(state)  # type: ignore[arg-type,assignment]
        return copy

    def start(self, write: Callable[[], None]) -> None:
        """Call ``write``, beside what follows. :meth:`finish` comes before the next one."""
        assert self._writing is None
        if self._threads is None:
            write()
        else:
            self._writing = self._threads.submit(write)

    def finish(self) -> None:
        """Wait for what was started last, and raise what it raised."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def wait(self) -> None:
        """Wait for what was started last, whatever comes of it; the thread that does it does not wait for itself."""
        if self._writing is not None and threading.get_ident() != self._thread:
            wait([self._writing])

    def _note_thread(self) -> None:
        self._thread = threading.get_ident()

    def has_failed(self) -> bool:
        """Whether what was started last has ended with an error, which :meth:`finish` raises."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None
