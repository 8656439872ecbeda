"""Run as a program: ranks that die, stop or disagree. One JSON line for every rank of every case.

    python failing.py FOLDER CASE...

Ranks are forked from one process that has imported everything, so that many cases run beside each other: nearly all of
the time they wait for a timeout. Under torchrun: ``torchrun ... failing.py --one CASE FOLDER``.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # by every rank otherwise, at its first call
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dilated_attention_pytorch import DilatedPattern, parallel
from dilated_attention_pytorch.parallel import communicator
from dilated_attention_pytorch.parallel.groups import wait_at_most
from dilated_attention_pytorch.parallel.monitor import InGroup
from dilated_attention_pytorch.plan import gather_rounds

TIMEOUT_SECONDS = 10.0
"""Of the process groups. What the ranks compute between two exchanges takes less on any machine."""
END_SECONDS = 300.0
"""After which a rank that has not ended is killed, and counted as hanging."""
HANG_SECONDS = 400.0
"""Within which all ranks of a case have to start."""
NEVER_SECONDS = 3600.0
"""A timeout that no test waits for."""
PATTERN = DilatedPattern([32, 128], [1, 4])


class Rank:
    """One rank of a case: its mesh, and calls on it."""

    def __init__(self, culprit: int, strategy: str, file: Path, timeout: float) -> None:
        self.number = dist.get_rank()
        self.is_culprit = self.number == culprit
        self.strategy = strategy
        self.report = functools.partial(_report, file)
        self._file = file
        self._is_ready = False
        self.mesh: DeviceMesh = init_device_mesh("cpu", (dist.get_world_size(),))
        # Making a process group ends on one rank while another still connects: none may die before all have met.
        dist.barrier()
        # What ``init_process_group(timeout=)`` says; within that time the ranks would have to start as well.
        wait_at_most(timeout)

    def get_ready(self) -> None:
        """Say that what takes long at the start is over: the next case can begin."""
        if not self._is_ready:
            self._is_ready = True
            _ready(self._file).touch()

    def call(self, rows: int = 16, *, is_backward: bool = True, **changes: Any) -> torch.Tensor:
        """A call of all ranks, and its backward."""
        dtype = changes.pop("dtype", torch.float32)
        q, k, v = (torch.randn(1, rows, changes.pop("heads", 4), 8, dtype=dtype, requires_grad=True) for _ in range(3))
        out = parallel.attend(
            q,
            k,
            v,
            changes.pop("pattern", PATTERN),
            mesh=self.mesh,
            **({"strategy": self.strategy, "is_causal": True} | changes),
        )
        if is_backward:
            out.square().sum().backward()
        self.get_ready()
        return out

    def fault(self, act: Callable[[], Any]) -> Any:
        """What the culprit does, now."""
        self.report(fault=time.monotonic(), pid=os.getpid())
        return act()

    def wait_until_others_wait(self) -> None:
        """Until all other ranks of the mesh, of one axis, wait for this one."""
        monitor = communicator._connections().monitor
        group = self.mesh.get_group()
        others = [rank for rank in dist.get_process_group_ranks(group) if rank != self.number]
        number = communicator.communicator_of(self.mesh)._num_calls + 1
        while True:
            states = monitor.states(others) or {}
            found = [state.groups.get(group.group_name, InGroup()) for state in states.values()]
            if [one.number for one in found if one.waits] == [number] * len(others):
                return
            time.sleep(0.1)

    def fault_in_exchange(self, number: int, act: Callable[[], Any]) -> None:
        """The culprit does it in its ``number``-th exchange from now."""
        if self.is_culprit:
            exchange, done = communicator.Communicator._exchange, [0]

            def counted(*args: Any) -> communicator.Pending:
                done[0] += 1
                if done[0] == number:
                    self.fault(act)
                return exchange(*args)

            communicator.Communicator._exchange = counted  # type: ignore[method-assign]


def _die() -> None:
    os._exit(17)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _dies(rank: Rank) -> None:
    rank.call()
    if rank.is_culprit:
        rank.fault(_die)
    rank.call()


def _dies_before_its_first_call(rank: Rank) -> None:
    rank.get_ready()
    if rank.is_culprit:
        rank.fault(_die)
    rank.call()


def _is_killed_in_backward(rank: Rank) -> None:
    rank.call()
    out = rank.call(is_backward=False)
    rank.fault_in_exchange(2, _kill)
    out.sum().backward()


def _stops(rank: Rank) -> None:
    """Somewhere in a loop of calls."""
    rank.call()
    rank.fault_in_exchange(50, _stop)
    while True:
        rank.call()


def _on_two_axes(rank: Rank) -> None:
    rank.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "heads"))


def _stops_in(rank: Rank, *, is_backward: bool, num_axes: int = 1) -> None:
    """In one of its two passes. On two axes of two, a rank has nothing to do with the one that is diagonal to it."""
    if num_axes == 2:
        _on_two_axes(rank)
    rank.call()
    if is_backward:
        out = rank.call(is_backward=False)
        rank.fault_in_exchange(2, _stop)
        out.sum().backward()
    else:
        rank.fault_in_exchange(1, _stop)
        rank.call()


def _stops_unseen_by_the_transport(rank: Rank) -> None:
    """The groups have no timeout to speak of: what is noticed, the thread notices."""
    _on_two_axes(rank)
    rank.call()
    communicator._connections().monitor.timeout = TIMEOUT_SECONDS
    rank.fault_in_exchange(5, _stop)
    while True:
        rank.call()


def _stops_in_a_sub_group(rank: Rank) -> None:
    """Two sequences, each over two ranks; those of the other sequence wait in a collective of the program's own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    rank.mesh = mesh["context"]
    rank.call()
    rank.fault_in_exchange(5, _stop)
    while True:
        rank.call()
        dist.all_reduce(torch.ones(3), group=mesh.get_group("data"))


def _tells_another_to_end(rank: Rank) -> None:
    """While that one waits for it."""
    rank.call()
    store = dist.distributed_c10d._get_default_store()
    store.set(f"pid of {rank.number}", str(os.getpid()))
    if rank.is_culprit:
        rank.wait_until_others_wait()
        rank.fault(lambda: os.kill(int(store.get("pid of 2")), signal.SIGTERM))
    rank.call()


def _dies_while_others_wait(rank: Rank) -> None:
    rank.call()
    if rank.is_culprit:
        rank.wait_until_others_wait()
        rank.fault(_die)
    rank.call()


def _refuses(rank: Rank) -> None:
    rank.call()
    if rank.is_culprit:
        rank.fault(lambda: rank.call(rows=15, sequence_length=48))
    rank.call(sequence_length=48)


def _repeats_an_old_call(rank: Rank) -> None:
    rank.call()
    rank.call(rows=17)
    if rank.is_culprit:
        rank.fault(lambda: rank.call(rows=17))
    rank.call(is_causal=False)


def _skips_backward(rank: Rank) -> None:
    """And goes on to the next call."""
    rank.call()
    if rank.is_culprit:
        rank.fault(lambda: rank.call(is_backward=False))
    rank.call()
    rank.call()


def _skips_backward_and_ends(rank: Rank) -> None:
    rank.call()
    rank.call(is_backward=not rank.is_culprit)
    if rank.is_culprit:
        rank.fault(lambda: None)


def _computes_for_long(rank: Rank) -> None:
    rank.call()
    if rank.is_culprit:
        start = time.monotonic()
        rank.fault(lambda: None)
        while time.monotonic() < start + TIMEOUT_SECONDS + 8.0:
            sum(range(10**6))  # without a pause for the other threads
            time.sleep(0.2)
    rank.call()


def _computes_for_long_on_two_axes(rank: Rank) -> None:
    """Rank 0 waits for ranks that wait for rank 3, and are not to blame."""
    _on_two_axes(rank)
    _computes_for_long(rank)


def _all_refused_before(rank: Rank) -> None:
    """A wrong call on all ranks, caught: not what is said of a rank that dies later."""
    for _ in range(2):
        try:
            rank.call(rows=15, sequence_length=99)
        except ValueError:
            rank.call()
    _dies(rank)


def _dies_on_two_axes(rank: Rank) -> None:
    """Rank 0 has nothing to do with rank 3, which dies."""
    _on_two_axes(rank)
    _dies(rank)


def _dies_in_a_sub_group(rank: Rank) -> None:
    """Two sequences, each over two ranks; the gradients of both are added up."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    rank.mesh = mesh["context"]
    rank.call()
    rank.fault_in_exchange(5, _die)
    while True:
        rank.call()
        dist.all_reduce(torch.ones(3), group=mesh.get_group("data"))


DISAGREEMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "number of rows": ({"rows": 16}, {"rows": 17}),
    "number of heads": ({"heads": 4}, {"heads": 8}),
    "pattern": ({}, {"pattern": DilatedPattern([32, 128], [1, 2])}),
    "dtype": ({}, {"dtype": torch.float64}),
    "is_causal": ({}, {"is_causal": False}),
    "strategy": ({"strategy": "ring"}, {"strategy": "gather"}),
    "layout": ({"layout": "contiguous"}, {"layout": "zigzag"}),
    "sequence_length": ({"sequence_length": 48}, {"rows": 16, "sequence_length": 47}),
    "dropout_p": ({"dropout_p": 0.0}, {"dropout_p": 0.5}),
    "calls made": ({"rows": 11}, {"rows": 11, "calls": 2}),
}


def _disagrees(rank: Rank) -> None:
    """Every way, one after the other: the group works on after each."""
    for what, (ours, theirs) in DISAGREEMENTS.items():
        rank.call(rows=9)
        start = time.monotonic()
        changes = dict(theirs if rank.is_culprit else ours)
        for _ in range(changes.pop("calls", 1)):
            # Sends nothing, so nobody notices before the next call that is new.
            rank.call(rows=9, pattern=DilatedPattern([9], [1]), is_backward=False)
        try:
            rank.call(**({"rows": 16} | changes))
        except (parallel.RankFailure, ValueError) as error:
            rank.report(what=what, message=str(error), seconds=time.monotonic() - start, error=type(error).__name__)
        else:
            rank.report(what=what, message="none", seconds=0.0, error="none")


def _ends_well(rank: Rank) -> None:
    rank.call()
    dist.barrier()
    dist.destroy_process_group()


def _ends_without_a_word(rank: Rank) -> None:
    rank.call()


def _passing_on(play: Callable[[Rank], None]) -> Callable[[Rank], None]:
    """Rows are passed on among as few ranks as there are here."""

    def played(rank: Rank) -> None:
        gather_rounds.FEWEST_MEMBERS = 4
        play(rank)

    return played


class Case(NamedTuple):
    """Ranks of which one fails."""

    world: int
    culprit: int
    strategy: str
    play: Callable[[Rank], None]
    said: str = ""
    """What every other rank says."""
    is_at_once: bool = False
    """The others hear of it at once: their groups have no timeout to speak of."""
    is_slow: bool = False
    """It is in every run under another strategy, or on fewer axes."""


NO_ANSWER = "rank {culprit} does not answer: the process was killed or stopped, or its host cannot be reached"
REFUSED = r"rank {culprit} refused the call: ValueError: query must have this rank's 16 of the 48 rows .* got 15;"
LEFT_OUT = "rank 1 has call number 3, rank 0 has 2. A rank left out a call or a backward pass, or made one more"
STORE = r"rank 0 \(or a launcher\), which holds the store at which the ranks met, does not answer"
BUSY = "rank {culprit} is alive, but takes no part: it computes for longer than .*made there: 1"
CASES = {
    "dies, ring": Case(4, 1, "ring", _dies, NO_ANSWER, is_at_once=True),
    "dies, gather": Case(3, 1, "gather", _dies, NO_ANSWER, is_at_once=True, is_slow=True),
    "dies, heads": Case(3, 1, "heads", _dies, NO_ANSWER, is_at_once=True, is_slow=True),
    "dies before its first call": Case(
        3,
        2,
        "ring",
        _dies_before_its_first_call,
        f"{NO_ANSWER}.*had not made a call on this group yet",
        is_at_once=True,
    ),
    "is killed in backward, ring": Case(3, 1, "ring", _is_killed_in_backward, NO_ANSWER, is_at_once=True, is_slow=True),
    "is killed in backward, gather": Case(
        3, 1, "gather", _is_killed_in_backward, NO_ANSWER, is_at_once=True, is_slow=True
    ),
    "dies, rows passed on": Case(5, 1, "gather", _passing_on(_dies), NO_ANSWER, is_at_once=True),
    "is killed in backward, rows passed on": Case(
        5, 2, "gather", _passing_on(_is_killed_in_backward), NO_ANSWER, is_at_once=True
    ),
    "is killed in backward, heads": Case(3, 1, "heads", _is_killed_in_backward, NO_ANSWER, is_at_once=True),
    "stops, ring": Case(4, 1, "ring", _stops, NO_ANSWER, is_slow=True),
    "stops, gather": Case(3, 1, "gather", _stops, NO_ANSWER),
    "stops, heads": Case(3, 1, "heads", _stops, NO_ANSWER, is_slow=True),
    "stops, two axes, forward": Case(
        4, 3, "ring", functools.partial(_stops_in, is_backward=False, num_axes=2), NO_ANSWER
    ),
    "stops, two axes, backward": Case(
        4, 2, "gather", functools.partial(_stops_in, is_backward=True, num_axes=2), NO_ANSWER, is_slow=True
    ),
    "stops, unseen by the transport": Case(
        4, 3, "ring", _stops_unseen_by_the_transport, f"{NO_ANSWER}.*no sign of life for 10 s"
    ),
    "stops, sub-group": Case(4, 3, "ring", _stops_in_a_sub_group),
    "tells another to end": Case(3, 1, "ring", _tells_another_to_end),
    "dies while others wait": Case(3, 1, "heads", _dies_while_others_wait, NO_ANSWER, is_at_once=True),
    "holds the store and dies": Case(3, 0, "ring", _dies, STORE, is_at_once=True),
    "holds the store and stops": Case(3, 0, "ring", _stops, STORE),
    "refuses, ring": Case(3, 1, "ring", _refuses, REFUSED, is_at_once=True, is_slow=True),
    "refuses, gather": Case(3, 1, "gather", _refuses, REFUSED, is_at_once=True),
    "refuses, heads": Case(3, 1, "heads", _refuses, REFUSED, is_at_once=True, is_slow=True),
    "holds the store and refuses": Case(3, 0, "ring", _refuses, REFUSED, is_at_once=True),
    "repeats an old call": Case(3, 1, "ring", _repeats_an_old_call, "rank 1 has is_causal True, rank 0 has False"),
    "skips backward, ring": Case(3, 1, "ring", _skips_backward, LEFT_OUT),
    "skips backward, gather": Case(3, 1, "gather", _skips_backward, LEFT_OUT, is_slow=True),
    "skips backward, heads": Case(3, 1, "heads", _skips_backward, LEFT_OUT, is_slow=True),
    "skips backward and ends": Case(
        3, 1, "ring", _skips_backward_and_ends, "rank 1 ended while others waited", is_at_once=True
    ),
    "computes for long": Case(3, 1, "ring", _computes_for_long, BUSY),
    "computes for long, two axes": Case(4, 3, "ring", _computes_for_long_on_two_axes, BUSY, is_slow=True),
    "dies, all refused before": Case(3, 1, "ring", _all_refused_before, NO_ANSWER, is_at_once=True),
    "dies, two axes": Case(4, 3, "ring", _dies_on_two_axes, NO_ANSWER),
    "dies, sub-group": Case(4, 3, "ring", _dies_in_a_sub_group, is_slow=True),
    "disagrees": Case(3, 1, "ring", _disagrees),
    "ends well": Case(2, -1, "ring", _ends_well),
    "ends without a word": Case(2, -1, "ring", _ends_without_a_word),
}

TRIALS = {
    f"stops in {pass_}, {strategy}, {num_axes} axis, rank {culprit} of {world}": Case(
        world, culprit, strategy, functools.partial(_stops_in, is_backward=pass_ == "backward", num_axes=num_axes)
    )
    for strategy, num_axes, world, culprits in (
        ("ring", 1, 3, (1, 2)),
        ("gather", 1, 3, (1, 2)),
        ("heads", 1, 3, (1, 2)),
        ("ring", 2, 4, (1, 3)),
        ("gather", 2, 4, (2, 3)),
    )
    for culprit in culprits
    for pass_ in ("forward", "backward")
}
"""Twenty, for ``stop_trials.py``. Rank 0 holds the store; that it stops is one of the cases."""
CASES |= TRIALS


def run_rank(name: str, file: Path) -> None:
    """This process's part of a case; the variables of its environment say which."""
    case = CASES[name]
    torch.set_num_threads(1)
    is_unseen = case.play is _stops_unseen_by_the_transport
    timeout = NEVER_SECONDS if is_unseen or case.is_at_once else TIMEOUT_SECONDS
    try:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            dist.init_process_group("gloo", timeout=timedelta(seconds=HANG_SECONDS))
        else:
            store, rank, world = _store(file)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=HANG_SECONDS)
            )
        case.play(Rank(case.culprit, case.strategy, file, timeout))
    except Exception as error:
        transport = str(error.__cause__ or "")
        _report(file, error=type(error).__name__, message=str(error), transport=transport, at=time.monotonic())
        raise


def _store(file: Path) -> tuple[dist.Store, int, int]:
    """The store, which rank 0 holds, as with ``env://`` but on a free port; this rank, and the number of ranks."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    told = file.with_name(f"{file.stem.split('-')[0]}.port")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        told.with_suffix(".new").write_text(str(store.port))
        told.with_suffix(".new").rename(told)
    else:
        while not told.exists():
            time.sleep(0.02)
        store = dist.TCPStore("127.0.0.1", int(told.read_text()), world, is_master=False, wait_for_workers=False)
    return store, rank, world


def _report(file: Path, **said: Any) -> None:
    """One line of what a rank says."""
    with file.open("a") as out:
        out.write(json.dumps(said) + "\n")


def _ready(file: Path) -> Path:
    """The file whose existence says that a rank is ready."""
    return file.with_suffix(".ready")


class Running:
    """Ranks that have been started, and what became of them."""

    def __init__(self) -> None:
        self.ranks: dict[int, tuple[int, Path]] = {}
        """Those that have not ended: case and file, by the number of the process."""
        self.codes: dict[Path, int] = {}
        """How the others ended."""
        self._stopped: set[int] = set()

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Until that is so, or nothing has come of it for so long that a rank hangs."""
        deadline = time.monotonic() + END_SECONDS
        while not is_over() and time.monotonic() < deadline:
            self._look()
            time.sleep(0.02)

    def kill(self) -> None:
        """End those that have not ended."""
        for pid in self.ranks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _look(self) -> None:
        for pid, (_, file) in list(self.ranks.items()):
            found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if found and os.WIFSTOPPED(status):
                self._stopped.add(pid)
            elif found:
                del self.ranks[pid]
                self.codes[file] = os.waitstatus_to_exitcode(status)
        for pid in self._stopped & self.ranks.keys():
            # It goes on when the others have ended.
            case = self.ranks[pid][0]
            if all(other in self._stopped or place != case for other, (place, _) in self.ranks.items()):
                os.kill(pid, signal.SIGCONT)
                self._stopped.remove(pid)


def run_cases(folder: Path, cases: list[str]) -> None:
    """All at the same time. Writes into results.json for every rank its exit status, what it reported and printed."""
    parent, running = os.getpid(), Running()
    gc.freeze()  # the forked processes need not copy what none of them changes
    try:
        for place, case in enumerate(cases):
            world = CASES[case].world
            files = [folder / f"{place}-{rank}.jsonl" for rank in range(world)]
            for rank, file in enumerate(files):
                pid = os.fork()
                if pid == 0:
                    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
                    os.dup2(os.open(file.with_suffix(".err"), os.O_WRONLY | os.O_CREAT), 2)
                    run_rank(case, file)
                    return
                running.ranks[pid] = (place, file)
            # One case after the other: if all started at once, ranks would not find each other before the timeout.
            running.wait(lambda files=files: all(_ready(file).exists() or file in running.codes for file in files))
        gc.unfreeze()
        running.wait(lambda: not running.ranks)
    finally:
        if os.getpid() == parent:
            running.kill()
    results = []
    for place, case in enumerate(cases):
        ranks = []
        for rank in range(CASES[case].world):
            file = folder / f"{place}-{rank}.jsonl"
            result: dict[str, Any] = {"code": running.codes[file]} if file in running.codes else {}
            result["reports"] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
            result["stderr"] = file.with_suffix(".err").read_text()
            ranks.append(result)
        results.append(ranks)
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        run_rank(sys.argv[2], Path(sys.argv[3]) / f"{os.environ['RANK']}.jsonl")
    else:
        run_cases(Path(sys.argv[1]), sys.argv[2:])
