"""The table of patients: which slides belong to whom."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dilated_attention_pytorch.errors import RunError, shortened

from .table import read_rows

_COLUMNS = ("slide", "patient")


def read_patients(table: Path, slides: Mapping[str, Path]) -> dict[str, tuple[Path, ...]]:
    """The files of each patient, in the order of a table with the columns `slide` and `patient`.

    Args:
        table: see :func:`.table.read_rows`; other columns are not read. A slide is named as in ``slides``.
        slides: the files by slide.

    Raises:
        RunError: the table is not one, or it and the files are not of the same slides.
    """
    try:
        rows = read_rows(table, _COLUMNS, filled=_COLUMNS, unique="slide")
    except ValueError as error:
        raise RunError(f"--patients {error}") from error
    found: dict[str, list[Path]] = {}
    missing = [row for row in rows if row.cells["slide"] not in slides]
    if missing:
        first = shortened(missing[0].cells["slide"])
        raise RunError(
            f"--patients {missing[0].where}: there is no file of slide {first} (in all, {len(missing):,} of "
            f"{len(rows):,} slides have none); slides are named as their files, without the ending: add the files, or "
            "remove the lines"
        )
    for row in rows:
        patient = row.cells["patient"]
        if patient in (".", "..") or set(patient) & set("/\\"):
            raise RunError(
                f"--patients {row.where}: an embedding's file is named after its patient, and "
                f"{shortened(repr(patient))} cannot be one; use letters, digits, - and _"
            )
        found.setdefault(patient, []).append(slides[row.cells["slide"]])
    named = {row.cells["slide"] for row in rows}
    unnamed = [slide for slide in slides if slide not in named]
    if unnamed:
        raise RunError(
            f"{slides[unnamed[0]]} belongs to no patient: --patients {table} has no line for slide {unnamed[0]} (in "
            f"all, for {len(unnamed):,} of {len(slides):,}); add the lines, or pass the files of the others alone"
        )
    return {patient: tuple(paths) for patient, paths in found.items()}
