"""The measured profile of this machine in the user's cache folder, written atomically and validated when read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.folders import cache_folder
from dilated_attention_pytorch.machine import package_version
from dilated_attention_pytorch.patterns import Pattern

from .cost import FEATURES, features, weighted
from .hardware import Hardware
from .workload import Workload

FORMAT = "dilated-attention-pytorch profile 1"
_REMEDY = "run `dilated-attention tune` to measure this machine"


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds per unit of every feature in :data:`FEATURES`, for one dtype, with or without gradients."""

    dtype: str
    is_training: bool
    seconds: tuple[float, ...]
    samples: int = 0
    """Measured times that they were fitted to; 0 in a profile of an earlier version."""

    @property
    def mode(self) -> tuple[str, bool]:
        """Dtype, and whether with gradients."""
        return self.dtype, self.is_training


@dataclass(frozen=True, slots=True)
class Profile:
    """Rates measured on one machine with one version of this package and of PyTorch.

    >>> Profile(()).seconds_of  # doctest: +ELLIPSIS
    <bound method Profile.seconds_of of Profile(rates=())>
    """

    rates: tuple[Rates, ...]

    def seconds_of(self, pattern: Pattern, workload: Workload, hardware: Hardware) -> float | None:
        """Predicted seconds of a call; None if its dtype was not measured."""
        for entry in self.rates:
            if entry.mode == (workload.dtype_name, workload.is_training):
                return weighted(entry.seconds, features(pattern, workload, hardware))
        return None


def identity(hardware: Hardware) -> dict[str, str | int]:
    """The validity of a profile: device, threads and versions."""
    return {
        "kind": hardware.kind,
        "name": hardware.name,
        "processors": hardware.processors,
        "torch": torch.__version__,
        "dilated-attention-pytorch": package_version("dilated-attention-pytorch") or "from source",
    }


def profile_path(hardware: Hardware, folder: Path | None = None) -> Path:
    """The profile's file, one per device and number of threads, in ``folder`` (default: the cache folder)."""
    of_machine = f"{hardware.kind} {hardware.name} {hardware.processors}"
    digest = hashlib.blake2b(of_machine.encode(), digest_size=6).hexdigest()
    return (cache_folder() if folder is None else folder) / f"profile-{hardware.kind}-{digest}.json"


def store_profile(profile: Profile, hardware: Hardware, folder: Path | None = None) -> Path:
    """Write a profile atomically.

    Returns:
        the file.

    Raises:
        RunError: the folder cannot be created or written.
    """
    values = {
        "format": FORMAT,
        "machine": identity(hardware),
        "features": list(FEATURES),
        "rates": [
            {
                "dtype": entry.dtype,
                "is_training": entry.is_training,
                "seconds": list(entry.seconds),
                "samples": entry.samples,
            }
            for entry in profile.rates
        ],
    }
    file = profile_path(hardware, folder)
    try:
        write_whole(file, json.dumps(values, indent=1) + "\n")
    except OSError as error:
        raise RunError(
            f"the profile cannot be written to {file} ({error.strerror}); make room or change the permissions, or "
            "name another folder with XDG_CACHE_HOME"
        ) from error
    return file


def write_whole(file: Path, text: str) -> None:
    """Write a file under a temporary name, then rename it. With two concurrent writers, one of the files remains."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(prefix=file.name, suffix=".partial", dir=file.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        raise


def load_profile(hardware: Hardware, folder: Path | None = None) -> Profile | None:
    """This machine's stored profile; None if there is no valid one.

    A damaged file, or one of another machine or version, is ignored with a ``UserWarning`` that says what to do; the
    file is not changed.
    """
    file = profile_path(hardware, folder)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        _ignored(file, f"cannot be read ({error})")
        return None
    try:
        values = json.loads(text)
    except ValueError as error:
        _ignored(file, f"is damaged: it is not JSON ({error})")
        return None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else type(values).__name__
        _ignored(file, f"is of another format: expected {FORMAT!r}, got {found!r}")
        return None
    expected, found = identity(hardware), values.get("machine")
    if not isinstance(found, dict) or found != expected:
        got = found if isinstance(found, dict) else {}
        different = [
            f"{name} {got.get(name)!r} is not {value!r}" for name, value in expected.items() if got.get(name) != value
        ]
        _ignored(file, f"was measured on another machine or version: {', '.join(different) or found}")
        return None
    try:
        return Profile(tuple(_rates(entry) for entry in values["rates"]))
    except (KeyError, TypeError, ValueError) as error:
        _ignored(file, f"is damaged: {type(error).__name__}: {error}")
        return None


def _rates(entry: Any) -> Rates:
    seconds = tuple(float(value) for value in entry["seconds"])
    if len(seconds) != len(FEATURES) or not all(math.isfinite(value) and value >= 0 for value in seconds):
        raise ValueError(f"expected {len(FEATURES)} rates of at least 0, got {list(seconds)}")
    if not isinstance(entry["dtype"], str) or not isinstance(entry["is_training"], bool):
        raise TypeError(f"expected the name of a dtype and a bool, got {entry['dtype']!r}, {entry['is_training']!r}")
    return Rates(entry["dtype"], entry["is_training"], seconds, int(entry.get("samples", 0)))


def _ignored(file: Path, why: str) -> None:
    warnings.warn(
        f"the profile {file} {why}. It is ignored, and nominal rates are used; {_REMEDY}, or delete the file",
        UserWarning,
        stacklevel=4,
    )
