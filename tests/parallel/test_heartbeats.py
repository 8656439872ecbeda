"""Who is silent, by a clock that stands while this process itself gets no time."""

from __future__ import annotations

from dilated_attention_pytorch.parallel.heartbeats import Heartbeats


def beating(heartbeats: Heartbeats, ranks: tuple[int, ...], looks: int, seconds: float, start: int = 0) -> None:
    """Looks at which all of ``ranks`` have another beat."""
    for look in range(start, start + looks):
        heartbeats.look({rank: f"beat {look}".encode() for rank in ranks}, (), seconds)


def test_a_rank_is_silent_for_as_long_as_its_beat_is_the_same() -> None:
    heartbeats = Heartbeats(most_seconds=1.0)
    heartbeats.watch([1, 2])
    beating(heartbeats, (1, 2), 3, 0.5)
    for look in range(6):
        assert heartbeats.silent(0.5 * look + 0.25) == []
        heartbeats.look({1: b"beat 2", 2: f"later {look}".encode()}, (), 0.5)
        assert heartbeats.silent(0.5 * (look + 1)) == [1]
    heartbeats.look({1: b"beat 3", 2: b"last"}, (), 0.5)
    assert heartbeats.silent(0.5) == []


def test_a_beat_that_is_taken_away_is_none() -> None:
    heartbeats = Heartbeats(most_seconds=1.0)
    heartbeats.watch([1])
    beating(heartbeats, (1,), 2, 0.5)
    heartbeats.look({}, (), 0.5)
    heartbeats.look({}, (), 0.5)
    assert heartbeats.silent(1.0) == [1]


def test_a_process_that_was_itself_stopped_takes_nobody_for_silent() -> None:
    heartbeats = Heartbeats(most_seconds=1.0)
    heartbeats.watch([1])
    beating(heartbeats, (1,), 2, 0.5)
    heartbeats.look({1: b"beat 1"}, (), 3600.0)
    assert heartbeats.silent(1.5) == []
    assert heartbeats.silent(1.0) == [1]


def test_only_who_was_heard_is_missed() -> None:
    """The beat that is found first may be one of a process before this one."""
    heartbeats = Heartbeats(most_seconds=1.0)
    heartbeats.watch([1, 2, 3])
    for _ in range(10):
        heartbeats.look({1: b"of an earlier life", 2: b"of an earlier life"}, (), 1.0)
    assert heartbeats.silent(1.0) == []
    heartbeats.expect([1, 3, 7])
    heartbeats.look({1: b"of an earlier life", 2: b"of an earlier life"}, (), 1.0)
    assert heartbeats.silent(1.0) == [1, 3]


def test_who_has_left_is_not_missed() -> None:
    heartbeats = Heartbeats(most_seconds=1.0)
    heartbeats.watch([1])
    beating(heartbeats, (1,), 2, 0.5)
    for _ in range(10):
        heartbeats.look({1: b"beat 2"}, {1}, 1.0)
    assert heartbeats.silent(0.5) == []
