"""Embedding as a Ray Data pipeline: read and check in tasks, compute and write in workers that Ray replaces."""

from __future__ import annotations

import dataclasses
import logging
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import ray
from ray.data import ActorPoolStrategy, DataContext, TaskPoolStrategy, from_items

from dilated_attention_pytorch.errors import RunError, first_line
from dilated_attention_pytorch.training.run_settings import DeviceChoice

from .claims import Claims
from .encoder import SlideEncoderConfig
from .files import UnreadableFileError
from .reading import TileSequence, read_sequence
from .settings import EmbedSettings
from .titan import TitanConfig
from .worker import BATCH_TILES, Done, Inputs, Worker

_CONNECT_SECONDS = 10.0


@contextmanager
def cluster(address: str | None) -> Iterator[None]:
    """A connection to the Ray cluster at ``address``, or to one on this machine that ends with the context.

    Raises:
        RunError: no cluster answers at the address.
    """
    try:
        if address is not None:
            _check_listener(address)
        ray.init(
            address or "local",
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        if address is None:
            raise RunError(f"--engine ray: Ray cannot start on this machine ({first_line(error)})") from error
        raise RunError(
            f"--ray-address {address}: no Ray cluster can be used there ({first_line(error)}); start one by `ray start "
            "--head`, set RAY_AUTH_MODE=token if it has a token, or leave the flag out for one on this machine"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_listener(address: str) -> None:
    """Raise ``OSError`` if ``address`` is HOST:PORT and no program listens there; Ray itself tries for five minutes."""
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        # Ray listens under the address by which other machines know this one.
        host = ray.util.get_node_ip_address() if host in ("localhost", "127.0.0.1") else host.strip("[]")
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()


class Workers(NamedTuple):
    """What the workers of a cluster are."""

    number: int
    threads: int
    device: DeviceChoice

    @property
    def resources(self) -> dict[str, int]:
        """What Ray reserves for each."""
        return {"num_cpus": self.threads, "num_gpus": int(self.device == "cuda")}


def workers_of_cluster(device: DeviceChoice, threads: int) -> Workers:
    """A worker for each GPU of the cluster that is connected, or for every ``threads`` cores.

    Raises:
        RunError: the cluster has not the GPUs or cores that are asked for.
    """
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = 0 if device == "cpu" else sum(int(machine.get("GPU", 0)) for machine in machines)
    if device == "cuda" and not gpus:
        raise RunError("--device cuda: the Ray cluster has no GPU; pass --device cpu, or add a machine with one")
    cores = [int(machine.get("CPU", 0)) for machine in machines]
    threads = threads or (1 if gpus else min(filter(None, cores), default=1))
    number = gpus or sum(of_machine // threads for of_machine in cores)
    if not number:
        raise RunError(f"--threads must be at most {max(cores)}, the cores of a machine of the Ray cluster")
    return Workers(number, threads, "cuda" if gpus else "cpu")


class RayEngine:
    """Workers of the Ray cluster that is connected.

    Args:
        files: checkpoint and output folder, which all machines of the cluster see.
        settings: as for :class:`Worker`.
        config: of the encoder.
        tiles: number of tiles of each input, by name.

    Raises:
        RunError: the cluster has not the GPUs or cores that the settings ask for.
    """

    def __init__(
        self,
        files: tuple[Path, Path],
        settings: EmbedSettings,
        config: SlideEncoderConfig | TitanConfig,
        tiles: Mapping[str, int],
    ) -> None:
        self._workers = workers_of_cluster(settings.device, settings.threads)
        settings = dataclasses.replace(settings, device=self._workers.device, threads=self._workers.threads)
        self._arguments = (*(file.absolute() for file in files), settings)
        self._read = partial(_read, config=config, settings=settings)
        self._tiles, self._claims = tiles, Claims(files[1])
        self._of_batch = settings.batch_tiles or (BATCH_TILES if self._workers.device == "cuda" else 1)

    def work(
        self,
        inputs: Inputs,
        done: Callable[[Done], None],
        *,
        say: Callable[[str], None],
        computing: Callable[[float], None],
    ) -> None:
        """As :meth:`Worker.work`; ``computing`` is not called, as other processes compute.

        Raises:
            RunError: the workers cannot start.
        """
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        DataContext.get_current().enable_progress_bars = False
        batches = [*self._batches([(name, paths) for name, paths in inputs if self._claims.is_free(name)])]
        if not batches:
            return
        workers = min(self._workers.number, len(batches))
        say(f"{workers:,} workers of the Ray cluster embed {len(batches):,} batches")
        rows = (
            from_items(batches, override_num_blocks=len(batches))
            .flat_map(self._read, num_cpus=0, compute=TaskPoolStrategy(size=workers))
            .map_batches(
                _RayWorker,
                batch_size=None,
                fn_constructor_args=self._arguments,
                compute=ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=2),  # the next one waits
                num_cpus=self._workers.threads,
                num_gpus=int(self._workers.device == "cuda"),
            )
            .iter_rows()
        )
        try:
            for row in rows:
                if not row.pop("is_held"):
                    done(Done(**row))
        except ray.exceptions.ActorDiedError as error:
            reason = str(error).strip().splitlines()[-1].removeprefix(f"{RunError.__module__}.RunError: ")
            raise RunError(f"a worker of the Ray cluster cannot start: {reason}") from error

    def _batches(self, inputs: Inputs) -> Iterator[dict[str, Any]]:
        """Inputs in order, batched up to the tile limit; a larger one comes alone."""
        batch: list[tuple[str, list[Path]]] = []
        tiles = 0
        for name, paths in inputs:
            tiles += self._tiles[name]
            if batch and tiles > self._of_batch:
                yield {"inputs": _packed(batch)}
                batch, tiles = [], self._tiles[name]
            batch.append((name, [path.absolute() for path in paths]))
        if batch:
            yield {"inputs": _packed(batch)}


def _packed(value: object) -> Any:
    """A value as a column of Arrow can hold it."""
    return numpy.frombuffer(pickle.dumps(value), dtype=numpy.uint8)


def _read(
    row: Mapping[str, Any], config: SlideEncoderConfig | TitanConfig, settings: EmbedSettings
) -> list[dict[str, Any]]:
    """The tiles of each input of a batch, or the file that cannot be read and why."""
    rows = []
    for name, paths in pickle.loads(row["inputs"].tobytes()):
        found: TileSequence | tuple[Path, str]
        try:
            found = read_sequence(name, paths, config, settings)
        except UnreadableFileError as error:
            found = error.path, str(error)
        rows.append({"read": _packed((name, paths, found))})
    return rows


class _RayWorker:
    """A worker in a process of Ray."""

    def __init__(self, checkpoint: Path, output: Path, settings: EmbedSettings) -> None:
        self.worker = Worker(checkpoint, output, settings)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        rows = [pickle.loads(row.tobytes()) for row in batch["read"]]
        of_name = {name: found for name, _, found in rows}

        def read(name: str, paths: Sequence[Path]) -> TileSequence:
            found = of_name[name]
            if isinstance(found, TileSequence):
                return found
            raise UnreadableFileError(*found)

        done = {name: Done(name) for name in of_name}
        held = set(of_name)

        def finish(result: Done) -> None:
            done[result.name] = result
            held.remove(result.name)

        self.worker.work([(name, paths) for name, paths, _ in rows], finish, read=read)
        columns = {name: [getattr(result, name) for result in done.values()] for name in Done._fields}
        return {**columns, "is_held": [name in held for name in done]}
