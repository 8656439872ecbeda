"""The settings of an output folder, in a file that later commands compare with their own."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.output import check_free_folder, check_makeable


def settings_of(folder: Path, name: str, *, command: str) -> dict[str, Any] | None:
    """What the settings file ``name`` of a folder says; None for a free folder.

    Raises:
        RunError: the folder is neither free nor that of an earlier command, or the file is damaged.
    """
    file = folder / name
    if not file.is_file():
        try:
            # Commands that begin at the same time may have written settings under way, and locks.
            going_on = f", or the one of an earlier `{command}` command"
            check_free_folder(folder, going_on=going_on, beside=f"*{name}.*")
            return None
        except RunError:
            if not file.is_file():  # else another command has begun the folder meanwhile
                raise
    check_makeable(folder)
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{file} is damaged ({error}); pass another --output, or remove the folder") from error
    return before if isinstance(before, dict) else {}


def check_same(
    folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], *, what: str, but: Collection[str] = ()
) -> None:
    """Raise :class:`RunError` if settings differ from those of the folder, of which ``what`` says what it holds."""
    differ = [name for name in {**now, **before} if name not in but and before.get(name) != now.get(name)]
    if differ:
        was = ", ".join(f"{name} {str(before.get(name))[:16]}, now {str(now.get(name))[:16]}" for name in differ)
        raise RunError(f"--output {folder} holds {what} ({was}); pass another --output, or the same again")
