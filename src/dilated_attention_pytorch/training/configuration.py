"""Configuration files: TOML settings that override a command's defaults, and the record of a run's settings."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from dilated_attention_pytorch.errors import RunError

from .run_settings import renamed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CONFIGURATION_NAME = "run.toml"
_LONGEST = 1 << 20
"""Size limit in bytes of a configuration file; guards against reading a device without end."""

_Settings = TypeVar("_Settings", bound="DataclassInstance")


def read_configuration(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        RunError: it does not exist, cannot be read, is not TOML, or sets an option of the command line only.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST + 1)
        if len(content) > _LONGEST:
            raise RunError(f"--config {path} is longer than any file of settings; name another one")
        values = tomllib.loads(content.decode())
    except FileNotFoundError as error:
        raise RunError(f"--config {path}: there is no such file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RunError(f"--config {path} is not TOML: {error}") from error
    except OSError as error:
        raise RunError(f"--config {path} cannot be read: {error.strerror}") from error
    for name in ("config", "resume"):
        if name in values:
            raise RunError(f"--config {path}: {name} is for the command line alone; write --{name} there")
    return values


def with_values(settings: _Settings, values: Mapping[str, Any], path: Path, table: str = "") -> _Settings:
    """``settings`` with some fields replaced by ``values`` from a file.

    Lists become tuples, strings become paths in path fields, and tables apply to nested settings.

    Args:
        settings: the defaults.
        values: values by field name.
        path: the file, for error messages.
        table: prefix of ``values`` in the file, with its final dot.

    Raises:
        RunError: an unknown key, a value of the wrong type, or a value out of range.
    """
    from typeguard import CollectionCheckStrategy, TypeCheckError, check_type

    names = [entry.name for entry in dataclasses.fields(settings) if entry.init]
    hints = get_type_hints(type(settings))
    given: dict[str, Any] = {}
    for name, value in renamed(values).items():
        if name not in names:
            nearest = difflib.get_close_matches(name, names, 1)
            remedy = f"did you mean {table}{nearest[0]}?" if nearest else "--help lists the settings that there are"
            raise RunError(f"--config {path}: there is no setting {table}{name}; {remedy}")
        held = getattr(settings, name)
        if dataclasses.is_dataclass(held) and isinstance(value, Mapping):
            given[name] = with_values(held, value, path, f"{table}{name}.")  # type: ignore[type-var]
            continue
        if value == "" and _holds_path(hints[name]):
            raise RunError(f"--config {path}: {table}{name} is an empty path; this folder is .")
        converted = _as_held(value, hints[name])
        try:
            check_type(converted, hints[name], collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS)
        except TypeCheckError as error:
            raise RunError(f"--config {path}: {table}{name} = {value!r}: {error}") from error
        given[name] = converted
    try:
        return dataclasses.replace(settings, **given)
    except (TypeError, ValueError) as error:
        words = str(error)
        raise RunError(f"--config {path}: {'' if words.startswith(table) else table}{words}") from error


def _holds_path(hint: Any) -> bool:
    return hint is Path or Path in get_args(hint)


def _as_held(value: Any, hint: Any) -> Any:
    """A value from a file converted to the type of its field."""
    if isinstance(value, list):
        inner = next(iter(get_args(hint)), None)
        return tuple(_as_held(entry, inner) for entry in value)
    return Path(value) if _holds_path(hint) and isinstance(value, str) else value


def configuration_text(values: Mapping[str, Any], command: str, notes: Iterable[str] = ()) -> str:
    """``values`` (from a settings' :meth:`to_dict`) as a TOML file for ``--config``.

    Args:
        values: values by name; None values are left out.
        command: command that reads the file.
        notes: lines on what the run did otherwise than these settings say.
    """
    import tomli_w

    head = (
        f"# The settings of a run, as given and as chosen for it. To start the same run again:\n"
        f"#   dilated-attention {command} --config {CONFIGURATION_NAME} --output ANOTHER\n"
    )
    head += "".join(f"# Of the run itself: {note}.\n" for note in notes) + "\n"
    return head + tomli_w.dumps(_without_none(values), multiline_strings=False)


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_none(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if value is not None
    }
