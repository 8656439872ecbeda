"""The one error of a command that its user can mend."""

from __future__ import annotations


class RunError(Exception):
    """What the user gave or the machine has does not allow this; the message is a sentence that says what to do."""
