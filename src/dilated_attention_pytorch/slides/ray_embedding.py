"""Embedding by workers of a Ray cluster, which share the inputs as commands over one output folder do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from ray.util.queue import Queue

from dilated_attention_pytorch.errors import RunError

from .claims import part_of
from .ray_cluster import workers_of_cluster
from .settings import EmbedSettings
from .worker import Done, Inputs, Worker


def embed_on_ray(
    checkpoint: Path,
    output: Path,
    settings: EmbedSettings,
    driver: Worker,
    say: Callable[[str], None],
    inputs: Inputs,
    done: Callable[[Done], None],
) -> None:
    """Embed by the cluster that is connected.

    Args:
        checkpoint, output, settings: as for :class:`.worker.Worker`; all machines see the files.
        driver: a worker of this process, which computes nothing.
        say: called with a message.
        inputs: names and files. Each worker begins with a part of its own.
        done: called for every input that has an embedding now, or cannot have one; the latter several times.

    Raises:
        RunError: the cluster has not the GPUs or cores that the settings ask for, or a worker cannot start.
    """
    free = {name: tuple(path.absolute() for path in paths) for name, paths in inputs if driver.claims.is_free(name)}
    for name, paths in [*free.items()]:
        try:
            if driver.has(name, paths):  # of another command, or of a worker that died before it said so
                done(Done(name))
                del free[name]
        except RunError:
            pass  # a worker says it
    if not free:
        return
    workers = workers_of_cluster(settings.device, settings.threads)
    of_worker = dataclasses.replace(
        settings, engine="local", ray_address=None, part=None, device=workers.device, threads=workers.threads
    )
    number = min(workers.number, len(free))
    what = "slides" if settings.patients is None else "patients"
    say(f"{number:,} workers of the Ray cluster share {len(free):,} {what}")
    results = Queue(actor_options={"num_cpus": 0})

    def receive() -> None:
        while not results.empty():
            done(results.get())

    parts = [part_of(free, part, number) | free for part in range(1, number + 1)]
    files = (checkpoint.absolute(), output.absolute())
    workers.work(_embed, [(*files, of_worker, [*part.items()], results) for part in parts], receive)
    receive()


def _embed(checkpoint: Path, output: Path, settings: EmbedSettings, inputs: Inputs, results: Queue) -> None:
    worker = Worker(checkpoint, output, settings)

    def finish(result: Done) -> None:
        if result.tiles or result.failed:  # else another worker has embedded it
            results.put(result)

    try:
        worker.work(inputs, finish)
    finally:
        worker.claims.release_all()
