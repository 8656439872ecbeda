"""Tables of slides: CSV or TSV files, one slide a line."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dilated_attention_pytorch.errors import first_line, shortened

_SHOWN_COLUMNS = 20


class TableRow(NamedTuple):
    """One line of the file."""

    path: Path
    line: int
    """The number of the line."""
    cells: Mapping[str, str]

    @property
    def where(self) -> str:
        """The file and line, for messages."""
        return f"{self.path}, line {self.line}"


def read_rows(
    path: Path, needed: Sequence[str], optional: Sequence[str] = (), *, filled: Collection[str], unique: str
) -> list[TableRow]:
    """Read the columns that are used; empty lines are left out.

    Args:
        path: a CSV file (or TSV, by its ending) with a header, in UTF-8, with or without byte order mark.
        needed: names of columns that it must have.
        optional: names of columns that it may have.
        filled: names of columns that must not have an empty cell.
        unique: the column of the slide, which must not stand in two lines.

    Raises:
        ValueError: the file cannot be read, or is not such a table; the message names file and line.
    """
    reader = csv.reader(
        io.StringIO(_read_text(path), newline=""), "excel-tab" if _is_tsv(path) else "excel", strict=True
    )
    rows, first = [], dict[str, str]()
    try:
        header = [name.strip() for name in next((cells for cells in reader if any(cells)), ())]
        for name in needed:
            if name not in header:
                raise ValueError(_no_column(path, name, header))
        used = {name: header.index(name) for name in (*needed, *optional) if name in header}
        for name in used:
            if header.count(name) > 1:
                raise ValueError(f"{path} has {header.count(name)} columns {name!r}; rename all but one")
        for cells in reader:
            where = f"{path}, line {reader.line_num}"
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) != len(header):
                raise ValueError(
                    f"{where} has {len(cells)} cells, the header {len(header)}; put a cell that contains "
                    f"{'a tab' if _is_tsv(path) else 'a comma'} between double quotes"
                )
            found = {name: cells[index].strip() for name, index in used.items()}
            for name, text in found.items():
                if not text.isprintable():
                    raise ValueError(f"{where}: {name} {shortened(text)!r} has an unprintable character; remove it")
            for name in filled:
                if found.get(name) == "":
                    raise ValueError(f"{where} has an empty {name}; fill it in, or remove the line")
            key = found[unique]
            if key in first:
                raise ValueError(f"{where}: slide {key!r} also stands in {first[key]}; remove one of the lines")
            first[key] = where
            rows.append(TableRow(path, reader.line_num, found))
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {reader.line_num} is not a line of a CSV file ({first_line(error)}); a cell with double "
            "quotes in it stands between double quotes, with each of its own doubled"
        ) from error
    if not rows:
        raise ValueError(f"{path} holds a header and no slides; write one slide a line below it")
    return rows


def _is_tsv(path: Path) -> bool:
    return path.suffix.lower() in (".tsv", ".tab")


def _read_text(path: Path) -> str:
    try:
        if not path.is_file():
            what = "is a folder or a device" if path.exists() else "does not exist"
            raise ValueError(f"{path} {what}; pass a CSV or TSV file")
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); pass a CSV or TSV file") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line} is not UTF-8; save the file as CSV in UTF-8 (in Excel: CSV UTF-8)"
        ) from error


def _no_column(path: Path, name: str, header: Sequence[str]) -> str:
    if not header:
        return f"{path} is empty; its first line must name the columns, {name!r} among them"
    shown = ", ".join(repr(shortened(found)) for found in header[:_SHOWN_COLUMNS])
    more = f" and {len(header) - _SHOWN_COLUMNS} more" if len(header) > _SHOWN_COLUMNS else ""
    separator = "tabs" if _is_tsv(path) else "commas"
    return (
        f"{path} has no column {name!r}; its first line, read with {separator} between the names, has {shown}{more}: "
        "name the column that is meant, or rename it in the file"
    )
