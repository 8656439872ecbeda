"""What processes show each other in the store, whatever else somebody puts there."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

import pytest
import torch.distributed as dist

from dilated_attention_pytorch.parallel.monitor import Failure, InGroup, Monitor, State

PREFIX = "dilated_attention_pytorch"
GROUP = "group"
RANKS = (0, 1, 2)
HANG_SECONDS = 120.0
NEVER_SECONDS = 3600.0
"""Of silence: no rank of these tests is given up."""

_STATE = json.loads(json.dumps(asdict(State("life", 3, "", False, False, {GROUP: InGroup(2, "abc", "for rank 1")}))))

# Fifty values that no process of the package writes, or not for long.
POISON: list[bytes] = [
    b"", b" ", b"\x00", b"\xff", b"\xff\xfe\x00\x01", b"\xc3\x28", b"\xed\xa0\x80", b"\x80abc", b"null", b"true",
    b"0", b"-1", b"-9999999999999999999999", b"1000000000", b"9" * 30, b"9" * 5000, b"1e999", b"NaN", b"Infinity",
    b"-Infinity", b"3.5", b'"text"', b"[]", b"{}", b"[" * 100_000, b'{"a":' * 50_000, b"{", b'{"beat": 1', b"'a'",
    b'{"beat": "1"}', b'{"beat": 1}', b"x" * 1_000_000, b"\x00" * 1_000_000, b"left", b"None", b"0x10",
    b'{"groups": []}', b'{"groups": {"group": 3}}', b"+1", b'{"groups": null}', b'{"cause": 1, "silent": []}',
    b'{"cause": "", "silent": []}', b'{"cause": "x", "silent": [-1]}', b'{"cause": "x", "silent": ["1"]}',
    b'{"cause": "x", "silent": {}}', b'{"cause": "x", "silent": [], "more": 1}',
    json.dumps(_STATE | {"beat": 1 << 70}).encode(), json.dumps(_STATE | {"beat": -5}).encode(),
    json.dumps(_STATE | {"has_left": "yes"}).encode(), json.dumps(_STATE | {"reason": None, "x": 1}).encode(),
]  # fmt: skip


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


def test_there_are_fifty_poisoned_values() -> None:
    assert len(set(POISON)) == 50


def test_no_value_in_the_store_ends_a_monitor(store: dist.TCPStore, monitors: list[Monitor]) -> None:
    """Fifty values under every key that is read; afterwards all write, and hear of a failure in the same words."""
    check_in_order(monitors)
    assert monitors[0].calls(GROUP, RANKS) == {rank: {"said by": str(rank)} for rank in RANKS}
    keys = keys_of(store)
    assert len(keys) == len(RANKS) * len(("state", "call"))
    for number, poison in enumerate(POISON, start=1):
        for key in (*keys, f"{PREFIX}/failures/{number}"):
            store.set(key, poison)
        for monitor in monitors:
            monitor.look()
            monitor.calls(GROUP, RANKS)
            assert monitor.states(RANKS) is not None
    check_in_order(monitors)
    assert all(monitor._thread.is_alive() for monitor in monitors)
    assert [known.failure for monitor in monitors for known in monitor.failures] == []
    monitors[1].publish(Failure("rank 2 was unlucky", (2,)))
    wait_for(lambda: all(monitor.failures for monitor in monitors))
    found = [[known.failure for known in monitor.failures] for monitor in monitors]
    assert found == [[Failure("rank 2 was unlucky", (2,))]] * 3


def test_an_unreadable_value_is_reported_once(
    store: dist.TCPStore, monitors: list[Monitor], capfd: pytest.CaptureFixture[str]
) -> None:
    store.set(f"{PREFIX}/failures/1", b"\xff" * 100)
    wait_for(lambda: all(monitor._num_read == 1 for monitor in monitors))
    check_in_order(monitors)
    printed = capfd.readouterr().err
    for rank in RANKS:
        assert printed.count(f"rank {rank}: ignoring '{PREFIX}/failures/1' in the store") == 1
    assert "expected JSON, got b'\\xff\\xff" in printed
    assert "(100 bytes)" in printed


def test_values_that_are_deleted_are_written_again(store: dist.TCPStore, monitors: list[Monitor]) -> None:
    for key in keys_of(store):
        if "/state/" in key:
            store.delete_key(key)
    check_in_order(monitors)


def test_a_rank_whose_beat_stops_is_named_by_all_others(store: dist.TCPStore) -> None:
    """Although its main thread waits in no exchange, and nobody waits for it. One that leaves is not missed."""
    monitors = [join(store, rank, timeout=3.0) for rank in RANKS]
    for monitor in monitors:
        monitor.has_met(RANKS)
    monitors[2].stop()
    goes_on = threading.Event()
    poll = monitors[1]._poll
    monitors[1]._poll = lambda seconds: goes_on.wait() and poll(seconds)  # type: ignore[method-assign,assignment]
    wait_for(lambda: bool(monitors[0].failures))
    failure = monitors[0].failures[0].failure
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
