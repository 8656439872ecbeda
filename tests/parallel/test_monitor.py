"""What processes show each other in the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from dilated_attention_pytorch.parallel.monitor import Failure, InGroup, Monitor, State

PREFIX = "dilated_attention_pytorch"
GROUP = "group"
RANKS = (0, 1, 2)
HANG_SECONDS = 120.0
NEVER_SECONDS = 3600.0
"""Of silence: no rank of these tests is given up."""


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, 1, is_master=True)


@pytest.fixture
def monitors(store: dist.TCPStore) -> Iterator[list[Monitor]]:
    """Three processes, as far as the store can tell."""
    made = [join(store, rank) for rank in RANKS]
    yield made
    for monitor in made:
        monitor.stop()


def join(store: dist.TCPStore, rank: int, timeout: float = NEVER_SECONDS) -> Monitor:
    monitor = Monitor(store, rank, len(RANKS), timeout, lambda: False, lambda: None)
    monitor.show(GROUP, RANKS, lambda: (InGroup(10 + rank, "digest", f"rank {rank} waits"), {"said by": str(rank)}))
    return monitor


def wait_for(is_so: Callable[[], bool]) -> None:
    """A guard against hanging alone."""
    deadline = time.monotonic() + HANG_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def check_in_order(monitors: list[Monitor]) -> None:
    """Every process reads what every other one writes after this."""
    for monitor in monitors:
        others = [rank for rank in RANKS if rank != monitor.rank]
        before = monitor.states(others) or {}

        def have_written(
            monitor: Monitor = monitor, before: dict[int, State] = before, others: list[int] = others
        ) -> bool:
            states = monitor.states(others)
            assert states is not None
            return all(rank in states and states[rank] != before.get(rank) for rank in others)

        wait_for(have_written)
        states = monitor.states(others) or {}
        for rank in others:
            expected = State(
                states[rank].life,
                states[rank].beat,
                groups={GROUP: InGroup(10 + rank, "digest", f"rank {rank} waits")},
            )
            assert states[rank] == expected


def keys_of(store: dist.TCPStore) -> list[str]:
    return [key.removeprefix("/") for key in store.list_keys() if PREFIX in key]


def test_all_processes_read_the_states_calls_and_failures_of_all(store: dist.TCPStore, monitors: list[Monitor]) -> None:
    check_in_order(monitors)
    assert monitors[0].calls(GROUP, RANKS) == {rank: {"said by": str(rank)} for rank in RANKS}
    assert len(keys_of(store)) == len(RANKS) * len(("state", "call"))
    published = [Failure("rank 2 was unlucky", (2,)), Failure("two\nlines")]
    for monitor, failure in zip(monitors, published, strict=False):
        monitor.publish(failure)
    wait_for(lambda: all(len(monitor.failures) == 2 for monitor in monitors))
    assert [monitor.failures for monitor in monitors] == [published] * 3


def test_values_that_are_deleted_are_written_again(store: dist.TCPStore, monitors: list[Monitor]) -> None:
    for key in keys_of(store):
        if "/state/" in key:
            store.delete_key(key)
    check_in_order(monitors)


def test_a_rank_whose_beat_stops_is_named_by_all_others(store: dist.TCPStore) -> None:
    """Although its main thread waits in no exchange, and nobody waits for it. One that leaves is not missed."""
    monitors = [join(store, rank, timeout=3.0) for rank in RANKS]
    for monitor in monitors:
        monitor.expect(RANKS)
    monitors[2].stop()
    goes_on = threading.Event()
    poll = monitors[1]._poll
    monitors[1]._poll = lambda seconds: goes_on.wait() and poll(seconds)  # type: ignore[method-assign,assignment]
    wait_for(lambda: bool(monitors[0].failures))
    failure = monitors[0].failures[0]
    goes_on.set()
    assert failure.silent == (1,)
    assert failure.cause.startswith("rank 1 does not answer: the process was killed or stopped")
    assert failure.cause.endswith("(no sign of life for 3 s)")
    wait_for(lambda: bool(monitors[1].failures))  # and hears of it when it goes on
    for monitor in monitors[:2]:
        monitor.stop()


def test_a_rank_that_left_an_earlier_process_group_has_not_left_the_next_one(store: dist.TCPStore) -> None:
    """Two process groups one after the other on one store; in the second, rank 1 comes late and leaves."""
    for monitor in [join(store, rank) for rank in RANKS]:
        monitor.stop()
    first, third = join(store, 0), join(store, 2)
    assert set(first.states([1, 2]) or {}) == {2}
    second = join(store, 1)
    wait_for(lambda: 1 in (first.states([1]) or {}))
    assert not (first.states([1]) or {})[1].has_left
    second.stop()
    assert (first.states([1]) or {})[1].has_left
    for monitor in (first, third):
        monitor.stop()
