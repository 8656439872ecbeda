"""Messages between processes in the store, with validation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

_MOST_BYTES = 1 << 24
_MOST_NUMBER = 1 << 62
_SHOWN = 40


class UnreadableNoteError(ValueError):
    """A value in the store that this package did not write."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A process's report of its state."""

    question: int = 0
    """Number of the latest question received."""
    number: int = 0
    """Number of calls made on the asking rank's group."""
    call: str = ""
    """Digest of the latest call."""
    waits: str = ""
    """Description of its wait in that group; empty if it does not wait there."""
    elsewhere: str = ""
    """Description of its wait in another group."""
    words: str = ""
    """Why it makes no further calls."""
    is_told: bool = False
    """Whether it received SIGTERM and is looking for the cause."""
    has_left: bool = False
    """Whether the process or its process group has ended."""
    life: str = ""
    """Id of the reporting roll call; a process that re-initialises its process group gets a new one."""

    def to_note(self) -> str:
        """Serialise for the store."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Failure:
    """A published diagnosis."""

    cause: str
    silent: tuple[int, ...] = ()
    """Ranks without a sign of life for the timeout; every wait for them fails."""

    def to_note(self) -> str:
        """Serialise for the store."""
        return json.dumps({"cause": self.cause, "silent": self.silent})


def read_answer(note: bytes) -> Answer:
    """Parse the output of :meth:`Answer.to_note`.

    Raises:
        UnreadableNoteError: the value has another format; the other functions of this module raise it too.
    """
    values = _read_object(note)
    kinds = {entry.name: type(entry.default) for entry in fields(Answer)}
    is_answer = {name: type(value) for name, value in values.items()} == kinds
    if not is_answer or any(type(value) is int and not 0 <= value < _MOST_NUMBER for value in values.values()):
        raise UnreadableNoteError(f"expected an answer to a roll call, got {_shown(note)}")
    return Answer(**values)


def read_failure(note: bytes) -> Failure:
    """Parse the output of :meth:`Failure.to_note`."""
    values = _read_object(note)
    cause, silent = values.get("cause"), values.get("silent")
    if not isinstance(cause, str) or not cause or not isinstance(silent, list) or len(values) != 2:
        raise UnreadableNoteError(f"expected the failure of a rank, got {_shown(note)}")
    if any(type(rank) is not int or rank < 0 for rank in silent):
        raise UnreadableNoteError(f"expected numbers of ranks, got {_shown(note)}")
    return Failure(cause, tuple(silent))


def read_call(note: bytes) -> dict[str, str]:
    """Parse a call's arguments by name."""
    values = _read_object(note)
    if any(not isinstance(value, str) for value in values.values()):
        raise UnreadableNoteError(f"expected the arguments of a call, got {_shown(note)}")
    return values


def read_number(note: bytes) -> int:
    """Parse the number of a question."""
    number = int(note) if note.isascii() and note.isdigit() and len(note) < 20 else _MOST_NUMBER
    if number >= _MOST_NUMBER:
        raise UnreadableNoteError(f"expected the number of a question, got {_shown(note)}")
    return number


def call_to_note(call: Mapping[str, str]) -> str:
    """Serialise for the store."""
    return json.dumps(dict(call))


def _read_object(note: bytes) -> dict[str, Any]:
    if len(note) > _MOST_BYTES:
        raise UnreadableNoteError(f"expected a note of at most {_MOST_BYTES:,} bytes, got {_shown(note)}")
    try:
        values = json.loads(note.decode())
    except (ValueError, RecursionError) as error:
        raise UnreadableNoteError(f"expected JSON, got {_shown(note)}") from error
    if not isinstance(values, dict):
        raise UnreadableNoteError(f"expected an object of JSON, got {_shown(note)}")
    return values


def _shown(note: bytes) -> str:
    return f"{note[:_SHOWN]!r}{'' if len(note) <= _SHOWN else f' ... ({len(note):,} bytes)'}"
