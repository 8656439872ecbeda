"""The measured rates of this machine, stored in the user's cache folder and validated when read."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.estimate.workload import Workload
from dilated_attention_pytorch.folders import cache_folder
from dilated_attention_pytorch.installation import NAME
from dilated_attention_pytorch.machine import package_version
from dilated_attention_pytorch.output import write_text

from .cost import FEATURES
from .hardware import Hardware

_FORMAT = "dilated-attention-pytorch profile 2"
_REMEDY = "run `dilated-attention tune` to measure this machine"
_LEAST_CORRELATION = 0.5
"""Rank correlation below which the order of predictions may be chance."""


class Accuracy(NamedTuple):
    """How well seconds are predicted on calls that rates were not fitted to."""

    correlation: float
    """Spearman's rank correlation of predicted and measured times of the patterns of a shape, mean over shapes."""
    error: float
    """Median of ``abs(predicted / measured - 1)``."""


_EXACT, _WITHOUT_ORDER = Accuracy(1.0, 0.0), Accuracy(0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds per unit of every feature of the time model, for one dtype, with or without gradients."""

    dtype: str
    is_training: bool
    seconds: tuple[float, ...]
    samples: int = 0
    """Number of measured times behind them."""
    fitted: Accuracy = _EXACT
    """Accuracy of these rates on held-out calls. Rates without a measurement are taken as better than the formula."""
    formula: Accuracy = _WITHOUT_ORDER
    """Accuracy of the formula on the same calls."""

    @property
    def mode(self) -> tuple[str, bool]:
        """Dtype, and whether with gradients."""
        return self.dtype, self.is_training

    @property
    def is_better(self) -> bool:
        """Whether they order held-out calls at least as well as the formula, not by chance, with no larger error."""
        least = max(self.formula.correlation, _LEAST_CORRELATION)
        return self.fitted.correlation >= least and self.fitted.error <= self.formula.error


@dataclass(frozen=True, slots=True)
class Profile:
    """Rates measured on one machine with one version of this package and of PyTorch; ``Profile(())`` has none."""

    rates: tuple[Rates, ...]

    def rates_of(self, workload: Workload) -> Rates | None:
        """The rates for a workload's dtype and mode, if they predict better than the formula; else None."""
        mode = workload.dtype_name, workload.is_training
        return next((entry for entry in self.rates if entry.mode == mode and entry.is_better), None)


def identity(hardware: Hardware) -> dict[str, str | int]:
    """The validity of a profile: device, threads and versions."""
    return {
        "kind": hardware.kind,
        "name": hardware.name,
        "processors": hardware.processors,
        "torch": torch.__version__,
        "dilated-attention-pytorch": package_version(NAME) or "from source",
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
    file = profile_path(hardware, folder)
    try:
        write_record(file, _FORMAT, hardware, features=FEATURES, rates=[asdict(entry) for entry in profile.rates])
    except OSError as error:
        raise RunError(
            f"the profile cannot be written to {file} ({error.strerror}); make room or change the permissions, or "
            "name another folder with XDG_CACHE_HOME"
        ) from error
    return file


def load_profile(hardware: Hardware, folder: Path | None = None) -> Profile | None:
    """This machine's stored profile; None if there is no valid one.

    A damaged file, or one of another machine or version, is ignored with a ``UserWarning`` that says what to do; the
    file is not changed.
    """
    file = profile_path(hardware, folder)
    try:
        values = read_record(file, _FORMAT, hardware)
        if values is None:
            return None
        try:
            return Profile(tuple(_rates(entry) for entry in values["rates"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"is damaged: {type(error).__name__}: {error}") from error
    except ValueError as error:
        reason = str(error)
    warnings.warn(
        f"the profile {file} {reason}. It is ignored, and nominal rates are used; {_REMEDY}, or delete the file",
        UserWarning,
        stacklevel=3,
    )
    return None


def _rates(entry: Any) -> Rates:
    seconds = tuple(float(value) for value in entry["seconds"])
    if len(seconds) != len(FEATURES) or not all(math.isfinite(value) and value >= 0 for value in seconds):
        raise ValueError(f"expected {len(FEATURES)} rates of at least 0, got {list(seconds)}")
    if not isinstance(entry["dtype"], str) or not isinstance(entry["is_training"], bool):
        raise TypeError(f"expected the name of a dtype and a bool, got {entry['dtype']!r}, {entry['is_training']!r}")
    fitted, formula = (Accuracy(*map(float, entry[name])) for name in ("fitted", "formula"))
    return Rates(entry["dtype"], entry["is_training"], seconds, int(entry["samples"]), fitted, formula)


def write_record(file: Path, form: str, hardware: Hardware, **values: Any) -> None:
    """Write values of this machine and version as JSON, atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps({"format": form, "machine": identity(hardware), **values}, indent=1) + "\n")


def read_record(file: Path, form: str, hardware: Hardware) -> dict[str, Any] | None:
    """The values that :func:`write_record` wrote; None if there is no file.

    Raises:
        ValueError: the file is something else; the message says what it is, to be read after the file's name.
    """
    try:
        if file.exists() and not file.is_file():
            raise ValueError("is not a regular file")
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot be read ({error})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"is damaged: it is not JSON ({error})") from error
    if not isinstance(values, dict) or values.get("format") != form:
        stored_form = values.get("format") if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"is of another format: expected {form!r}, got {stored_form!r}")
    machine = values.get("machine")
    stored = machine if isinstance(machine, dict) else {}
    different = [
        f"{name} {stored.get(name)!r} is not {value!r}"
        for name, value in identity(hardware).items()
        if stored.get(name) != value
    ]
    if different:
        raise ValueError(f"was measured on another machine or version: {', '.join(different)}")
    return values
