"""What processes leave for each other in the store, whatever else somebody puts there."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from dilated_attention_pytorch.parallel.note import Answer, Failure
from dilated_attention_pytorch.parallel.roll_call import RollCall

PREFIX = "dilated_attention_pytorch"
GROUP = "group"
RANKS = (0, 1, 2)
HANG_SECONDS = 120.0
NEVER_SECONDS = 3600.0
"""Of silence: no rank of these tests is given up."""

_ANSWER = json.loads(Answer(question=3, number=2, call="abc", waits="for rank 1").to_note())

# Fifty values that no process of the package writes, or not for long.
POISON: list[bytes] = [
    b"", b" ", b"\x00", b"\xff", b"\xff\xfe\x00\x01", b"\xc3\x28", b"\xed\xa0\x80", b"\x80abc", b"null", b"true",
    b"0", b"-1", b"-9999999999999999999999", b"1000000000", b"9" * 30, b"9" * 5000, b"1e999", b"NaN", b"Infinity",
    b"-Infinity", b"3.5", b'"text"', b"[]", b"{}", b"[" * 100_000, b'{"a":' * 50_000, b"{", b'{"question": 1', b"'a'",
    b'{"question": "1"}', b'{"question": 1}', b"x" * 1_000_000, b"\x00" * 1_000_000, b"left", b"None", b"0x10",
    "\uff17".encode(), b"1_000", b"+1", b"1\n", b'{"cause": 1, "silent": []}', b'{"cause": "", "silent": []}',
    b'{"cause": "x", "silent": [-1]}', b'{"cause": "x", "silent": ["1"]}', b'{"cause": "x", "silent": {}}',
    b'{"cause": "x", "silent": [], "more": 1}',
    json.dumps(_ANSWER | {"question": 10**9}).encode(), json.dumps(_ANSWER | {"number": -5}).encode(),
    json.dumps(_ANSWER | {"has_left": "yes"}).encode(), json.dumps(_ANSWER | {"waits": None, "x": 1}).encode(),
]  # fmt: skip


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, 1, is_master=True)


@pytest.fixture
def rolls(store: dist.TCPStore) -> Iterator[list[RollCall]]:
    """Three processes, as far as the store can tell."""
    made = [join(store, rank) for rank in RANKS]
    yield made
    for roll in made:
        roll.stop()


def join(store: dist.TCPStore, rank: int, timeout: float = NEVER_SECONDS) -> RollCall:
    roll = RollCall(store, rank, timeout, lambda: False)
    roll.answer(GROUP, RANKS, lambda: (Answer(number=10 + rank, waits=f"rank {rank} waits"), {"said by": str(rank)}))
    return roll


def wait_for(is_so: Callable[[], bool]) -> None:
    """A guard against hanging alone."""
    deadline = time.monotonic() + HANG_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def check_in_order(rolls: list[RollCall]) -> None:
    """Every process asks, and every other one answers for itself."""
    for roll in rolls:
        others = [rank for rank in RANKS if rank != roll.rank]
        question = roll.question()
        assert question is not None

        def have_answered(roll: RollCall = roll, question: int = question, others: list[int] = others) -> bool:
            answers = roll.answers(GROUP, others)
            assert answers is not None
            return all(rank in answers and answers[rank].question >= question for rank in others)

        wait_for(have_answered)
        answers = roll.answers(GROUP, others)
        assert answers is not None
        for rank in others:
            expected = (10 + rank, f"rank {rank} waits", "", False, False)
            answer = answers[rank]
            assert (answer.number, answer.waits, answer.words, answer.is_told, answer.has_left) == expected
        assert roll.calls(GROUP, others) == {rank: {"said by": str(rank)} for rank in others}


def keys_of(store: dist.TCPStore) -> list[str]:
    return [key.removeprefix("/") for key in store.list_keys() if PREFIX in key]


def test_there_are_fifty_poisoned_values() -> None:
    assert len(set(POISON)) == 50


def test_no_value_in_the_store_ends_a_roll_call(store: dist.TCPStore, rolls: list[RollCall]) -> None:
    """Fifty values under every key that is read; afterwards all answer, and hear of a failure in the same words."""
    check_in_order(rolls)
    keys = keys_of(store)
    assert len(keys) == 1 + len(RANKS) * len(("answer", "beat", "call"))
    for number, poison in enumerate(POISON, start=1):
        for key in (*keys, f"{PREFIX}/failures/{number}"):
            store.set(key, poison)
        for roll in rolls:
            roll.look()
            roll.calls(GROUP, RANKS)
            assert roll.answers(GROUP, RANKS) is not None
            assert roll.can_answer
    check_in_order(rolls)
    assert all(roll._thread.is_alive() for roll in rolls)
    assert [heard.failure for roll in rolls for heard in roll.failures] == []
    rolls[1].publish(Failure("rank 2 was unlucky", (2,)))
    wait_for(lambda: all(roll.failures for roll in rolls))
    assert [[heard.failure for heard in roll.failures] for roll in rolls] == [[Failure("rank 2 was unlucky", (2,))]] * 3


def test_what_cannot_be_read_is_said_once(
    store: dist.TCPStore, rolls: list[RollCall], capfd: pytest.CaptureFixture[str]
) -> None:
    store.set(f"{PREFIX}/failures/1", b"\xff" * 100)
    wait_for(lambda: all(roll._num_failures == 1 for roll in rolls))
    check_in_order(rolls)
    said = capfd.readouterr().err
    for rank in RANKS:
        assert said.count(f"rank {rank}: passing over '{PREFIX}/failures/1' in the store") == 1
    assert "expected JSON, got b'\\xff\\xff" in said
    assert "(100 bytes)" in said


def test_questions_whose_number_was_written_over_are_asked_again_above_it(
    store: dist.TCPStore, rolls: list[RollCall]
) -> None:
    for poison in ("1000000000", "0", "-7", "text"):
        before = rolls[0].question()
        wait_for(lambda before=before: all(roll._heard >= before for roll in rolls))
        store.set(f"{PREFIX}/questions", poison)
        after = rolls[1].question()
        assert before is not None
        assert after is not None
        assert after > before
        check_in_order(rolls)


def test_an_answer_to_a_question_that_nobody_asked_is_none(store: dist.TCPStore, rolls: list[RollCall]) -> None:
    """As of a rank that is gone: it would be taken for one that still answers."""
    forged = Answer(question=10**9, number=11, waits="rank 7 waits").to_note()
    store.set(f"{PREFIX}/answer/{GROUP}/7", forged)
    assert rolls[0].answers(GROUP, [7]) == {}


def test_values_that_are_taken_away_are_missed_and_no_more(store: dist.TCPStore, rolls: list[RollCall]) -> None:
    for key in keys_of(store):
        store.delete_key(key)
    check_in_order(rolls)


def test_a_rank_whose_beat_stops_is_named_by_all_others(store: dist.TCPStore) -> None:
    """Although its main thread waits in no exchange, and nobody waits for it. One that leaves is not missed."""
    rolls = [join(store, rank, timeout=3.0) for rank in RANKS]
    for roll in rolls:
        roll.meet(RANKS)
    rolls[2].stop()
    goes_on = threading.Event()
    rolls[1]._requests.put(lambda: goes_on.wait() and None)  # its thread gives no sign of life any more
    wait_for(lambda: bool(rolls[0].failures))
    failure = rolls[0].failures[0].failure
    goes_on.set()
    assert failure.silent == (1,)
    assert failure.cause.startswith("rank 1 does not answer: the process was killed or stopped")
    assert failure.cause.endswith("(no sign of life for 3 s)")
    wait_for(lambda: bool(rolls[1].failures))  # and hears of it when it goes on
    for roll in rolls[:2]:
        roll.stop()


def test_who_left_an_earlier_process_group_has_not_left_the_one_made_again(store: dist.TCPStore) -> None:
    """Two process groups one after the other on one store; in the second, rank 1 comes late and leaves."""
    for roll in [join(store, rank) for rank in RANKS]:
        roll.stop()
    first, third = join(store, 0), join(store, 2)
    assert set(first.answers(GROUP, [1, 2]) or {}) == {2}
    second = join(store, 1)
    wait_for(lambda: 1 in (first.answers(GROUP, [1]) or {}))
    assert not (first.answers(GROUP, [1]) or {})[1].has_left
    second.stop()
    assert (first.answers(GROUP, [1]) or {})[1].has_left
    for roll in (first, third):
        roll.stop()
