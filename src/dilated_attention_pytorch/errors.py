"""The exception for command failures that the user can fix."""

from __future__ import annotations


class RunError(Exception):
    """A command cannot run with this input or on this machine; the message says what to change."""
