"""What processes leave for each other in the store. A value that is nothing of the kind is refused in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

_MOST_BYTES = 1 << 24
_MOST_NUMBER = 1 << 62
_SHOWN = 40


class UnreadableNoteError(ValueError):
    """A value in the store that no process of this package wrote there; the text says what it is."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Where a process is, in its own words."""

    question: int = 0
    """The latest question that it has heard."""
    number: int = 0
    """Calls that it has made on the group of the one who asks."""
    call: str = ""
    """A digest of the last one."""
    waits: str = ""
    """What it waits for in that group; empty if it waits for no rank of it."""
    elsewhere: str = ""
    """What it waits for in another group."""
    words: str = ""
    """Why it makes no call any more."""
    is_told: bool = False
    """A signal tells it to end, and it looks for the cause."""
    has_left: bool = False
    """Its process or its process group came to an end."""
    life: str = ""
    """Of the roll call that says it: a process that makes its process group again gets another one."""

    def to_note(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Failure:
    """What a process found out, for all to know."""

    cause: str
    silent: tuple[int, ...] = ()
    """Ranks that gave no sign of life for the timeout: whoever waits, for whomever, waits in vain."""

    def to_note(self) -> str:
        """For the store."""
        return json.dumps({"cause": self.cause, "silent": self.silent})


def read_answer(note: bytes) -> Answer:
    """What :meth:`Answer.to_note` wrote.

    Raises:
        UnreadableNoteError: it is nothing of the kind. So do the other functions here.
    """
    values = _read_object(note)
    kinds = {entry.name: type(entry.default) for entry in fields(Answer)}
    is_answer = {name: type(value) for name, value in values.items()} == kinds
    if not is_answer or any(type(value) is int and not 0 <= value < _MOST_NUMBER for value in values.values()):
        raise UnreadableNoteError(f"expected an answer to a roll call, got {_shown(note)}")
    return Answer(**values)


def read_failure(note: bytes) -> Failure:
    """What :meth:`Failure.to_note` wrote."""
    values = _read_object(note)
    cause, silent = values.get("cause"), values.get("silent")
    if not isinstance(cause, str) or not cause or not isinstance(silent, list) or len(values) != 2:
        raise UnreadableNoteError(f"expected the failure of a rank, got {_shown(note)}")
    if any(type(rank) is not int or rank < 0 for rank in silent):
        raise UnreadableNoteError(f"expected numbers of ranks, got {_shown(note)}")
    return Failure(cause, tuple(silent))


def read_call(note: bytes) -> dict[str, str]:
    """A call in words: its arguments by name."""
    values = _read_object(note)
    if any(not isinstance(value, str) for value in values.values()):
        raise UnreadableNoteError(f"expected the arguments of a call, got {_shown(note)}")
    return values


def read_number(note: bytes) -> int:
    """The number of a question."""
    number = int(note) if note.isascii() and note.isdigit() and len(note) < 20 else _MOST_NUMBER
    if number >= _MOST_NUMBER:
        raise UnreadableNoteError(f"expected the number of a question, got {_shown(note)}")
    return number


def call_to_note(call: Mapping[str, str]) -> str:
    """For the store."""
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
