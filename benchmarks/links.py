"""Strategies over links of limited bandwidth, predicted and measured, with each rank in a network namespace."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dilated_attention_pytorch
from dilated_attention_pytorch import DilatedPattern, attend, parallel
from dilated_attention_pytorch.estimate.parallel import Strategy
from dilated_attention_pytorch.parallel.communicator import Communicator
from dilated_attention_pytorch.patterns.flops import BACKWARD_PRODUCTS, FORWARD_PRODUCTS

ROWS, HEADS, HEAD_DIM = 3072, 8, 64
GROUPS = ((384, 1), (3072, 4))
WORLDS = (2, 3, 4)
MEGABITS = (50, 200)
REPEATS = 3
PROBE_BYTES = 1 << 20
_QUEUED_BYTES = 1 << 16
"""Maximum number of bytes of a connection that its link queues."""
_STRATEGIES: tuple[Strategy, ...] = ("ring", "gather", "heads")


@contextlib.contextmanager
def namespaces(world: int, megabits: int) -> Iterator[list[str]]:
    """Create network namespaces on a bridge, each with a limited send rate; yields their names."""
    number = os.getpid() % 10000
    switch, hosts = f"dilated-{number}-switch", [f"dilated-{number}-{rank}" for rank in range(world)]
    try:
        _ip(f"netns add {switch}")
        _ip(f"-n {switch} link add bridge type bridge")
        _ip(f"-n {switch} link set bridge up")
        for rank, host in enumerate(hosts):
            _ip(f"netns add {host}")
            _ip(f"link add card netns {host} type veth peer port{rank} netns {switch}")
            _ip(f"-n {switch} link set port{rank} master bridge up")
            _ip(f"-n {host} address add 10.214.3.{rank + 1}/24 dev card")
            _ip(f"-n {host} link set card up")
            _ip(f"-n {host} link set lo up")
            # As in cluster networks, nothing is dropped and queues are short: acknowledgements and announcements would
            # wait behind them. Idle connections do not return to slow start.
            shape = f"tc qdisc add dev card root tbf rate {megabits}mbit burst 64kb limit 64mb"
            _ip(f"netns exec {host} {shape}")
            settings = ("tcp_slow_start_after_idle=0", f"tcp_wmem=4096 {_QUEUED_BYTES} {_QUEUED_BYTES}")
            _ip(f"netns exec {host} sysctl -q -w", *(f"net.ipv4.{setting}" for setting in settings))
        yield hosts
    finally:
        for name in (*hosts, switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(command: str, *words: str) -> None:
    done = subprocess.run(["ip", *command.split(), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"ip {command}: {done.stderr.strip()} (network namespaces take root and iproute2)")


def links() -> dict[str, Any]:
    """Planned (at measured rates) and measured seconds of every strategy, both passes, by link rate."""
    lines = []
    for world in WORLDS:
        for megabits in MEGABITS:
            with namespaces(world, megabits) as hosts, tempfile.TemporaryDirectory() as folder:
                path = str(Path(dilated_attention_pytorch.__file__).parents[1])
                env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "card"}
                ranks = [
                    subprocess.Popen(
                        [
                            "ip",
                            "netns",
                            "exec",
                            host,
                            sys.executable,
                            "-m",
                            "benchmarks.links",
                            str(rank),
                            str(world),
                            folder,
                        ],
                        env=env,
                    )
                    for rank, host in enumerate(hosts)
                ]
                try:
                    codes = [rank.wait(timeout=600) for rank in ranks]
                finally:
                    for rank in ranks:
                        rank.kill()
                if any(codes):
                    raise SystemExit(f"{world} ranks at {megabits} Mbit/s ended with {codes}")
                found = json.loads((Path(folder) / "found.json").read_text())
            probe, latency = statistics.median(found["probe"]), statistics.median(found["latency"])
            rate = PROBE_BYTES / max(probe - latency, 1e-9)
            cases = {"ranks": world, "megabits": megabits, "load": found["load"]}
            of_links = [
                {**cases, **compared(strategy, world, found["samples"][strategy], rate, latency)}
                for strategy in _STRATEGIES
            ]
            lines += of_links
            for line in of_links:
                print(
                    f"p={world} {megabits:>4} Mbit/s {line['strategy']:6} computation {line['compute']:.3f} s, "
                    f"predicted {line['predicted']:.3f} s, measured {line['measured']:.3f} s: "
                    f"{line['predicted'] / line['measured'] - 1:+.1%}",
                    flush=True,
                )
    errors = [abs(line["predicted"] / line["measured"] - 1) for line in lines]
    print(f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%}")
    return {
        "rows": ROWS,
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "groups": GROUPS,
        "repeats": REPEATS,
        "lines": lines,
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
    }


def _pattern() -> DilatedPattern:
    return DilatedPattern([w for w, _ in GROUPS], [r for _, r in GROUPS])


def _planned(strategy: Strategy, world: int, machine: parallel.Machine) -> parallel.Estimate:
    plan = parallel.plan_parallel(_pattern(), (1, ROWS, HEADS, HEAD_DIM), world, dtype=torch.float32, machine=machine)
    return next(one for one in plan.estimates if (one.strategy, one.layout) == (strategy, "contiguous"))


def compared(
    strategy: Strategy, world: int, samples: dict[str, list[float]], bytes_per_second: float, message_seconds: float
) -> dict[str, Any]:
    """Both passes of a strategy as planned at the measured rates of computation and of the link, and as measured."""
    compute, measured = (statistics.median(samples[way]) for way in ("compute", "together"))
    flops = max(_planned(strategy, world, parallel.Machine()).flops)
    machine = parallel.Machine(
        flops_per_second=(1 + BACKWARD_PRODUCTS / FORWARD_PRODUCTS) * flops / compute,
        bytes_per_second=bytes_per_second,
        message_seconds=message_seconds,
    )
    estimate = _planned(strategy, world, machine)
    return {
        "strategy": strategy,
        "compute": compute,
        "predicted": estimate.seconds,
        "measured": measured,
        "bytes": max(estimate.forward_bytes) + max(estimate.backward_bytes),
        "messages": estimate.messages + estimate.backward_messages,
        "bytes_per_second": bytes_per_second,
        "message_seconds": message_seconds,
        "samples": samples,
    }


class _Arrived:
    """Pending receives that complete at once, without a sender."""

    def __init__(self, receives: Mapping[int, Tensor]) -> None:
        # Uninitialised memory may hold denormal numbers, which take a processor a hundred times as long.
        for tensor in receives.values():
            tensor.fill_(1)

    def wait(self) -> None:
        """Return at once."""


def measure(rank: int, world: int, folder: Path) -> None:
    """On each rank: measure rates and runs alternately, so that other load affects both."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="tcp://10.214.3.1:29400", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, ROWS, HEADS, HEAD_DIM, generator=generator) for _ in range(4)]
    q, k, v, grad = (parallel.shard(x, mesh) for x in whole)
    q, k, v = inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())

    def passes(strategy: Strategy) -> float:
        out: list[Tensor] = []
        forward = _slowest(lambda: out.append(parallel.attend(q, k, v, _pattern(), mesh=mesh, strategy=strategy)))
        return forward + _slowest(lambda: torch.autograd.grad(out[0], inputs, grad))

    with torch.no_grad():
        expected = parallel.shard(attend(whole[0], whole[1], whole[2], _pattern()), mesh)
    for strategy in _STRATEGIES:
        passes(strategy)
        with torch.no_grad():
            out = parallel.attend(q, k, v, _pattern(), mesh=mesh, strategy=strategy)
        error = float((out - expected).abs().max())
        if error > 1e-4:
            raise SystemExit(f"not timed, because {strategy} is wrong by {error}")
    found: dict[str, Any] = {
        "samples": {strategy: {"compute": [], "together": []} for strategy in _STRATEGIES},
        "probe": [],
        "latency": [],
    }
    for _ in range(REPEATS):
        for strategy in _STRATEGIES:
            with mock.patch.object(
                Communicator, "_exchange", lambda _self, _sends, receives, _tag, _doing: _Arrived(receives)
            ):
                found["samples"][strategy]["compute"].append(passes(strategy))
            found["samples"][strategy]["together"].append(passes(strategy))
        found["probe"].append(_slowest(lambda: _shift(PROBE_BYTES, rank, world)))
        found["latency"].append(_slowest(lambda: _shift(4, rank, world)))
    found["load"] = os.getloadavg()[0]
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _shift(num_bytes: int, rank: int, world: int) -> None:
    """Each rank sends ``num_bytes`` to the next rank."""
    messages = torch.zeros(2, num_bytes // 4)
    works = dist.batch_isend_irecv(
        [
            # As the exchange does: a receiver's announcement does not wait behind the rows that it sends.
            dist.P2POp(dist.irecv, messages[1], (rank - 1) % world),
            dist.P2POp(dist.isend, messages[0], (rank + 1) % world),
        ]
    )
    for work in works:
        work.wait()


def _slowest(run: Callable[[], Any]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    run()
    taken = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One rank of python -m benchmarks.scale --only links.")
    parser.add_argument("rank", type=int)
    parser.add_argument("world", type=int, help="number of ranks")
    parser.add_argument("folder", type=Path, help="folder of the store and of the results")
    given = parser.parse_args()
    measure(given.rank, given.world, given.folder)
