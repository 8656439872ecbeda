"""Record files: JSONL, Parquet, and Arrow folders saved by ``datasets``.

The readers of ``datasets`` name no line of a broken file, fill missing fields with None, and do not check the offsets
of Arrow files, which pyarrow reads beyond the file; they would also add five packages.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.machine import require

if TYPE_CHECKING:
    import pyarrow as pa

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_ROWS_AT_ONCE = 256
_LONGEST_LINE = 1 << 30
_REMEDY = "restore the file, or leave it out"
_COMPRESSIONS = {
    b"\x1f\x8b": ("gzip", "gzip -dk"),
    b"BZh": ("bzip2", "bzip2 -dk"),
    b"\xfd7zXZ\x00": ("xz", "xz -dk"),
    b"\x28\xb5\x2f\xfd": ("Zstandard", "zstd -d"),
    b"PK\x03\x04": ("zip", "unzip"),
}
"""First bytes of compressed files: format, and the command that decompresses one."""


@dataclass(frozen=True, slots=True)
class Record:
    """The text of one record."""

    name: str
    """File name and line or row number, which determine the split."""
    text: bytes
    """UTF-8; may be empty."""


def are_records(path: Path) -> bool:
    """Whether ``path`` is a record file, by its suffix, or a folder written by ``save_to_disk``."""
    if path.is_dir():
        return (path / _STATE).is_file() or (path / _SPLITS).is_file()
    return path.suffix in (".jsonl", ".parquet")


def files_of_records(path: Path) -> list[Path]:
    """The files that :func:`records` reads, in order.

    Raises:
        RunError: a folder with several splits, with selected rows (an indices file), or damaged.
    """
    if not path.is_dir():
        return [path]
    if (path / _SPLITS).is_file():
        splits = sorted(entry.name for entry in path.iterdir() if (entry / _STATE).is_file())
        raise RunError(f"--data: {path} holds several splits ({', '.join(splits)}); name one, as {path / 'train'}")
    try:
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
        files = [path / Path(entry["filename"]).name for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"--data: {path / _STATE} is not what save_to_disk of datasets writes ({error}); save it again"
        ) from error
    if state.get("_indices_data_files"):
        raise RunError(f"--data: {path} holds rows that are only selected; call flatten_indices() and save it again")
    return files


def records(path: Path, field: str) -> Iterator[Record]:
    """The texts of a record file or folder (see :func:`are_records`).

    Args:
        path: file or folder.
        field: field or column that holds the text.

    Raises:
        RunError: pyarrow is missing, or a file cannot be read, is damaged, or has a non-text value; names the file and
            the line or row.
    """
    for file in files_of_records(path):
        check_regular(file)
        with readable(file):
            yield from _of_lines(file, field) if file.suffix == ".jsonl" else _of_table(file, field)


def describe_compression(start: bytes, file: Path) -> str | None:
    """How a file that begins with ``start`` is compressed, and how to decompress it; None if it is not."""
    for magic, (compression, command) in _COMPRESSIONS.items():
        if start.startswith(magic):
            return f"compressed by {compression}; decompress it ({command} {shlex.quote(str(file))})"
    return None


def compression_of(file: Path) -> str | None:
    """:func:`describe_compression` of a file."""
    with file.open("rb") as stream:
        return describe_compression(stream.read(8), file)


def check_regular(file: Path) -> os.stat_result:
    """The status of a file; refuses a missing file, a pipe or a device."""
    try:
        status = file.stat()
    except (OSError, ValueError) as error:
        raise unreadable(file, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise RunError(f"--data: {file} is neither a regular file nor a folder; write its text to a file and name that")
    return status


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Context that turns errors of the operating system into :class:`RunError`."""
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError | ValueError) -> RunError:
    """The error for a path that cannot be read, with its remedy."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return RunError(f"--data: {path} does not exist; check the path (it is read from {Path.cwd()})")
    if isinstance(error, PermissionError):
        return RunError(
            f"--data: {path} may not be read by this user; change its permissions (chmod +r) or leave it out"
        )
    if isinstance(error, ValueError) or error.errno is None:
        return RunError(f"--data: {path} cannot be read ({error}); name another path")
    reason = os.strerror(error.errno)
    return RunError(f"--data: {path} cannot be read ({reason}); check the disk that it is on, or leave it out")


def _of_lines(file: Path, field: str) -> Iterator[Record]:
    with file.open("rb") as lines:
        number = 0
        while line := lines.readline(_LONGEST_LINE):
            number += 1
            where = f"{file}, line {number}"
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                compression = describe_compression(line, file)
                if compression is not None and number == 1:
                    raise RunError(f"--data: {file} is {compression}, and name that") from error
                raise RunError(f"--data: {where} is not valid JSON ({error}); {_REMEDY}") from error
            if not isinstance(values, dict):
                kind = type(values).__name__
                raise RunError(f"--data: {where}: expected one JSON object per line, got {kind}; write {{...}} on it")
            if field not in values:
                raise RunError(f"--data: {where} has no {field!r}; {_other_field(values)}")
            yield Record(f"{file.name}:{number}", _as_text(values[field], field, where))


def _of_table(file: Path, field: str) -> Iterator[Record]:
    require(f"--data {file}", ("pyarrow",), "data")
    import pyarrow as pa

    try:
        number = 0
        for batch in _batches(file, field):
            column = batch.column(field)
            # pyarrow does not check offsets and UTF-8 by itself.
            column.validate(full=True)
            for value in column.to_pylist():
                number += 1
                yield Record(f"{file.name}:{number}", _as_text(value, field, f"{file}, row {number}"))
    except pa.ArrowException as error:
        reason = str(error).partition("\n")[0]
        raise RunError(f"--data: {file} is damaged or not {_kind(file)} ({reason}); {_REMEDY}") from error


def _batches(file: Path, field: str) -> Iterator[pa.RecordBatch]:
    """Batches of a few rows, so that memory does not grow with the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if file.suffix == ".parquet":
        with pq.ParquetFile(file) as table:
            _check_columns(table.schema_arrow, field, file)
            yield from table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[field])
        return
    with pa.memory_map(str(file)) as mapped, pa.ipc.open_stream(mapped) as stream:
        _check_columns(stream.schema, field, file)
        for batch in stream:
            for first in range(0, batch.num_rows, _ROWS_AT_ONCE):
                yield batch.slice(first, _ROWS_AT_ONCE)


def _check_columns(schema: pa.Schema, field: str, file: Path) -> None:
    import pyarrow as pa

    if field not in schema.names:
        raise RunError(f"--data: {file} has no column {field!r}; {_other_field(dict.fromkeys(schema.names))}")
    kind = schema.field(field).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise RunError(f"--data: the column {field!r} of {file} holds {kind}, not text; name another with --text-field")


def _kind(file: Path) -> str:
    return "a Parquet file" if file.suffix == ".parquet" else "an Arrow stream"


def _other_field(values: dict[str, Any]) -> str:
    return f"it has {', '.join(map(repr, values)) or 'nothing'}; name the one that holds the text with --text-field"


def _as_text(value: Any, field: str, where: str) -> bytes:
    if not isinstance(value, str):
        raise RunError(f"--data: {where}: {field!r} is {value!r:.60}, not text; {_REMEDY}")
    try:
        text = value.encode()
    except UnicodeEncodeError as error:
        raise RunError(f"--data: {where}: {field!r} is not valid UTF-8 ({error.reason}); {_REMEDY}") from error
    if b"\0" in text:
        raise RunError(f"--data: {where}: {field!r} holds a zero character; {_REMEDY}")
    return text
