"""Asynchronous checkpoint writing, one checkpoint at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import TypeVar

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.torch_version import TorchVersion

_NAME = "dilated-attention-checkpoint"
_State = TypeVar("_State")
_IS_CLOSED_BY_A_COPY = TorchVersion(torch.__version__) < TorchVersion("2.13")
"""PyTorch 2.11 closes a stager after its first copy, 2.13 keeps it with its memory."""


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
        is_beside: copy state and write in a thread; False writes synchronously without copies.
    """

    def __init__(self, is_beside: bool) -> None:
        self._threads = ThreadPoolExecutor(1, _NAME, self._note_thread) if is_beside else None
        self._thread: int | None = None
        self._writing: Future[None] | None = None
        self._stager = _new_stager()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Wait in any case: the run folder belongs to this job until the thread has finished.
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
