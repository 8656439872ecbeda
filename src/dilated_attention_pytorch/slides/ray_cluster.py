"""Workers of a Ray cluster: each does what a command over the same output folder does."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import ray

from dilated_attention_pytorch.errors import RunError, first_line
from dilated_attention_pytorch.training.run_settings import Device

_CONNECT_SECONDS = 10.0
_POLL_SECONDS = 1.0
_RETRIES = 3
"""How often Ray starts a worker again that was killed; it goes on with what is missing."""


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
    device: Device

    def work(
        self,
        function: Callable[..., None],
        arguments: Sequence[Sequence[Any]],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Call ``function`` with each of the arguments in a worker of its own, and wait for all.

        Args:
            function: a function of a module; it is called again if its process is killed.
            arguments: of each call.
            meanwhile: called every second, and at the end.

        Raises:
            RunError: a call raised one, or a worker was killed too often.
        """
        options = {"num_cpus": self.threads, "num_gpus": int(self.device == "cuda"), "max_retries": _RETRIES}
        task: Any = ray.remote(function).options(**options)
        left = [task.remote(*of_call) for of_call in arguments]
        try:
            while left:
                ended, left = ray.wait(left, timeout=_POLL_SECONDS)
                meanwhile()
                ray.get(ended)
        except RunError as error:  # of a task: Ray adds its traceback
            raise RunError(f"a worker of the Ray cluster: {getattr(error, 'cause', error)}") from error
        except ray.exceptions.RayError as error:
            raise RunError(
                f"a worker of the Ray cluster ended ({first_line(error)}); the same command goes on with what is "
                "missing"
            ) from error


def workers_of_cluster(device: Device, threads: int) -> Workers:
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
