"""Every architecture judged, each in a process of its own that may fail without stopping the others."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from .judge import judge
from .kinds import Kind
from .verdict import NOT_APPLICABLE, Verdict

SECONDS = 600.0
"""After these a model is given up, or after fewer of the processor's time."""
PROCESSOR_SECONDS = 30
MEMORY = 8 << 30
"""Bytes of address space that a model may take."""


def sweep(
    kinds: Sequence[Kind], recipes: Mapping[Kind, list[Any]], workers: int, report: Callable[[Verdict, float], None]
) -> None:
    """Judge every kind; ``report`` is told of each verdict as it comes. Recipes are tried first."""
    context = multiprocessing.get_context("fork")  # transformers is imported once, before
    gc.collect()
    gc.freeze()  # or every child copies what it collects
    waiting = list(kinds)[::-1]
    running: dict[Connection, tuple[Kind, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            kind = waiting.pop()
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_judge_alone, args=(kind, recipes.get(kind), there), daemon=True)
            process.start()
            there.close()
            running[here] = (kind, process, time.monotonic())
        ready = wait(list(running), timeout=1.0)
        for here in list(running):
            kind, process, begun = running[here]
            taken = time.monotonic() - begun
            if here in ready:
                verdict = _received(here, kind)
            elif taken > SECONDS:
                verdict = _unjudged(kind, f"took longer than {SECONDS:.0f} s")
                process.kill()
            else:
                continue
            process.join()
            here.close()
            del running[here]
            report(verdict, taken)


def _unjudged(kind: Kind, reason: str) -> Verdict:
    return Verdict(kind.model_type, kind.class_name, kind.is_decoder, NOT_APPLICABLE, reason=f"not judged: {reason}")


def _received(here: Connection, kind: Kind) -> Verdict:
    try:
        return Verdict(**json.loads(here.recv()))
    except EOFError:
        return _unjudged(
            kind, f"its process ended, after more than {PROCESSOR_SECONDS} s of the processor or {MEMORY >> 30} GiB"
        )


def _judge_alone(kind: Kind, recipe: list[Any] | None, there: Connection) -> None:
    import contextlib
    import dataclasses

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        try:
            verdict = judge(kind, recipe)
        except Exception as error:  # noqa: BLE001 - a fault of the judge's own is a row that says so
            verdict = _unjudged(kind, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    there.send(json.dumps(dataclasses.asdict(verdict)))
    there.close()
