"""The exception for command failures that the user can fix, and parts of its messages."""

from __future__ import annotations


class RunError(Exception):
    """A command cannot run with this input or on this machine; the message says what to change."""


def first_line(error: Exception) -> str:
    """The first line of an error message, shortened to fit into a sentence."""
    return shortened(str(error).strip().partition("\n")[0], 160) or type(error).__name__


def shortened(text: str, length: int = 80) -> str:
    """A text of a file, for a sentence: at most ``length`` characters, unprintable ones escaped."""
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= length else f"{text[:length]}..."
