"""The table of patients: which slides belong to whom."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from dilated_attention_pytorch.errors import RunError, first_line, shortened

_COLUMNS, _SHOWN = ("slide", "patient"), 8


def read_patients(table: Path, slides: Mapping[str, Path]) -> dict[str, tuple[Path, ...]]:
    """The files of each patient, in the order of a CSV file with the columns `slide` and `patient`.

    Args:
        table: UTF-8, with or without byte order mark; other columns are not read. A slide is named as in ``slides``.
        slides: the files by slide.

    Raises:
        RunError: the table is not one, or it and the files are not of the same slides.
    """
    found: dict[str, list[Path]] = {}
    lines: dict[str, int] = {}
    missing: list[str] = []
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, strict=True)
            columns = rows.fieldnames or []
            if any(columns.count(name) != 1 for name in _COLUMNS):
                got = ", ".join(shortened(column, 40) for column in columns[:_SHOWN]) or "an empty file"
                raise RunError(
                    f"--patients {table}: expected one column slide and one column patient in the first line, got {got}"
                )
            for row in rows:
                where = f"--patients {table}, line {rows.line_num}"
                slide, patient = ((row[name] or "").strip() for name in _COLUMNS)
                if not slide or not patient:
                    raise RunError(
                        f"{where}: expected a slide and its patient, got none; fill it in, or remove the line"
                    )
                _check_patient(patient, where)
                if slide in lines:
                    raise RunError(f"{where}: slide {slide} stands in line {lines[slide]} too; keep one of them")
                lines[slide] = rows.line_num
                if slide in slides:
                    found.setdefault(patient, []).append(slides[slide])
                else:
                    missing.append(slide)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RunError(f"--patients {table} cannot be read as CSV in UTF-8 ({first_line(error)})") from error
    if missing:
        raise RunError(
            f"--patients {table}, line {lines[missing[0]]}: there is no file of slide {shortened(missing[0])} (in all, "
            f"{len(missing):,} of {len(lines):,} slides have none); slides are named as their files, without the "
            "ending: add the files, or remove the lines"
        )
    unnamed = [name for name in slides if name not in lines]
    if unnamed:
        raise RunError(
            f"{slides[unnamed[0]]} belongs to no patient: --patients {table} has no line for slide {unnamed[0]} (in "
            f"all, for {len(unnamed):,} of {len(slides):,}); add the lines, or pass the files of the others alone"
        )
    return {patient: tuple(paths) for patient, paths in found.items()}


def _check_patient(patient: str, where: str) -> None:
    """Raise :class:`RunError` unless a file can be named after the patient."""
    if patient in (".", "..") or not patient.isprintable() or set(patient) & set("/\\"):
        raise RunError(
            f"{where}: an embedding's file is named after its patient, and {shortened(repr(patient))} cannot be one; "
            "use letters, digits, - and _"
        )
