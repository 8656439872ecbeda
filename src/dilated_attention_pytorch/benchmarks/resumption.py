"""Resumption of a benchmark run: which rows are kept, and whether they belong to the same run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.errors import RunError

from .measure import OUT_OF_TIME
from .results import FORMAT, Row
from .settings import BenchSettings

_SAME_MACHINE = ("processor", "cores", "threads", "cuda_devices", "versions")
_MAY_DIFFER = ("resume", "time_limit", "output", "compare", "compare_any_machine")


def rows_to_keep(file: Path, machine: Mapping[str, Any], settings: BenchSettings) -> tuple[list[Row], float]:
    """The final rows of an earlier part of this run, and its duration in seconds.

    Rows cut off by the time limit are not final; failed, wrong and skipped rows are.

    Raises:
        RunError: there is no such run, or its settings or machine differ.
    """
    remedy = "name its --output and settings, or start a new run without --resume"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"--resume: {file} cannot be read ({error}); {remedy}") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise RunError(f"--resume: {file} is not written by this version of the benchmark ({FORMAT!r}); {remedy}")
    now = json.loads(json.dumps(settings.to_dict()))
    for name, value in now.items():
        if name not in _MAY_DIFFER and values["settings"].get(name) != value:
            raise RunError(
                f"--resume: the run in {file.parent} has {name}={values['settings'].get(name)!r}, this one {value!r}; "
                f"{remedy}"
            )
    for name in _SAME_MACHINE:
        if values["machine"].get(name) != json.loads(json.dumps(machine[name])):
            raise RunError(
                f"--resume: the run in {file.parent} is of another machine or installation ({name} "
                f"{values['machine'].get(name)!r}, here {machine[name]!r}); start a new run without --resume"
            )
    rows = [Row.from_dict(row) for row in values["rows"] if row["reason"] != OUT_OF_TIME]
    return rows, float(values["seconds"])
