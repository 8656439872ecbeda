"""Two hosts: network namespaces of this machine, with a link between them that the test makes slow, lossy or cuts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from host_ranks import MESHES
from support.processes import environment

PROGRAM = Path(__file__).with_name("host_ranks.py")
TOLERANCE = 1e-10
LATEST_SECONDS = 60.0
"""After the cut until a rank has ended. The timeout of the group (6 s), the states of the others (3 s) and the time
for all to hear of it (1.25 s) are 10 s: the rest is for slow machines."""
HANG_SECONDS = 600.0
NETEM = "netem delay 5ms 1ms loss 1%"
TBF = "tbf rate 20mbit burst 4kb latency 5ms"
"""Packets wait for their turn at the rate, and are lost where they would wait longer than the latency."""


@dataclass
class Host:
    """One namespace."""

    name: str
    link: str
    address: str

    def run(self, command: str) -> str:
        return _run(f"ip netns exec {self.name} {command}")

    def start(self, hosts: list[Host], folder: Path) -> subprocess.Popen[bytes]:
        """torchrun with two processes."""
        place = hosts.index(self)
        launch = [
            "ip", "netns", "exec", self.name, sys.executable, "-m", "torch.distributed.run",
            "--nnodes", str(len(hosts)), "--nproc-per-node", "2", "--node-rank", str(place), "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"{hosts[0].address}:29400", "--rdzv-id", "hosts",
            "--rdzv-conf", f"is_host={int(place == 0)}", "--local-addr", self.address, str(PROGRAM), str(folder),
        ]  # fmt: skip
        env = environment(GLOO_SOCKET_IFNAME=self.link)
        with (folder / f"{place}.err").open("w") as errors:
            return subprocess.Popen(launch, stderr=errors, env=env)


def _run(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")
    return done.stdout


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two namespaces and the link between them, removed with all that runs in them."""
    if not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("needs the commands ip and tc (iproute2)")
    number = os.getpid() % 60000
    made = [Host(f"dilated-{number}-{place}", f"da{number}x{place}", f"10.213.7.{place + 1}") for place in range(2)]
    try:
        try:
            for host in made:
                _run(f"ip netns add {host.name}")
            _run(f"ip link add {made[0].link} netns {made[0].name} type veth peer {made[1].link} netns {made[1].name}")
            for host in made:
                host.run(f"ip address add {host.address}/24 dev {host.link}")
                host.run(f"ip link set {host.link} up")
                host.run("ip link set lo up")
        except OSError as error:
            pytest.skip(f"needs network namespaces: {error}")
        yield made
    finally:
        for host in made:
            with contextlib.suppress(OSError):
                for pid in _run(f"ip netns pids {host.name}").split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(OSError):
                _run(f"ip netns delete {host.name}")


def impede(hosts: list[Host]) -> str:
    """Make the link slow and lossy, both ways; how."""
    for discipline in (NETEM, TBF):
        try:
            for host in hosts:
                host.run(f"tc qdisc add dev {host.link} root {discipline}")
        except OSError:
            continue  # the kernel does not have it
        return discipline
    pytest.skip("the kernel has neither netem nor tbf to impede a link with")


def test_two_hosts_compute_what_one_process_does_and_a_link_that_is_cut_ends_the_ranks_of_both(
    hosts: list[Host], tmp_path: Path, figure: Any
) -> None:
    discipline = impede(hosts)
    processes = [host.start(hosts, tmp_path) for host in hosts]
    files = [tmp_path / f"loop-{rank}.json" for rank in range(4)]
    try:
        _wait_for(lambda: all(file.exists() for file in files), HANG_SECONDS, processes, tmp_path)
        check_results([json.loads((tmp_path / f"compare-{rank}.json").read_text()) for rank in range(4)], figure)
        check_losses(hosts, discipline, figure)
        hosts[0].run(f"ip link set {hosts[0].link} down")
        cut = time.monotonic()
        _wait_for(lambda: all("message" in file.read_text() for file in files), LATEST_SECONDS, [], tmp_path)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    reports = [json.loads(file.read_text()) for file in files]
    for rank, report in enumerate(reports):
        seconds = report["at"] - cut
        assert seconds < LATEST_SECONDS, report
        figure(f"two hosts, link cut, rank {rank}", f"{seconds:.1f} s, {report['message']}")
    # The store is on the first host, whose ranks know who does not answer; the others only that it is out of reach.
    for report in reports[:2]:
        assert re.search("rank [23]|each of the ranks 2, 3", report["message"].split("): ", 1)[1]), report
    for report in reports[2:]:
        assert "(with rank " in report["message"], report
        assert "torchrun's agent on the first host, which holds the store" in report["message"], report


def check_results(found: list[dict[str, tuple[float, int, float]]], figure: Any) -> None:
    """Every rank has the rows of one process."""
    for name in MESHES:
        worst = max(rank[name][0] for rank in found)
        sent, seconds = sum(rank[name][1] for rank in found), max(rank[name][2] for rank in found)
        assert worst <= TOLERANCE, (name, worst)
        figure(f"two hosts, {name}", f"largest float64 error {worst:.1e}, {sent:,} bytes sent in {seconds:.1f} s")


def check_losses(hosts: list[Host], discipline: str, figure: Any) -> None:
    """The link has lost packets, or the test did not test what it is for."""
    lost = 0
    for host in hosts:
        statistics = host.run(f"tc -s qdisc show dev {host.link}")
        dropped = re.search(r"dropped (\d+)", statistics)
        sent_bytes = re.search(r"Sent (\d+) bytes (\d+) pkt", statistics)
        assert dropped is not None, statistics
        assert sent_bytes is not None, statistics
        lost += int(dropped[1])
        figure(f"two hosts, {host.address}", f"{discipline}: {sent_bytes[2]} packets sent, {dropped[1]} lost")
    assert lost > 0


def _wait_for(is_done: Any, seconds: float, running: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Until it is so; an error if one of the processes ends before."""
    deadline = time.monotonic() + seconds
    while not is_done():
        ended = [process.poll() for process in running if process.poll() is not None]
        errors = "".join(file.read_text() for file in folder.glob("*.err"))
        assert not ended, errors
        assert time.monotonic() < deadline, errors
        time.sleep(0.1)
