"""Safe reading of ``torch.save`` files: no code in them is executed."""

from __future__ import annotations

import argparse
import pickle
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.errors import first_line

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of features and weights."""
_BROKEN = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    OverflowError,
    ImportError,
    struct.error,
)
"""Exceptions from unpickling bytes that are not a ``torch.save`` file."""


class UnsafeFileError(ValueError):
    """The file holds objects other than tensors and plain values; loading them would execute code."""


def load_tensors(path: Path) -> Any:
    """The saved tensors, and lists and dicts of them, on the CPU.

    Raises:
        UnsafeFileError: the file holds other objects; the message names the first.
        ValueError: the file cannot be read; the message gives the reason.
        MemoryError: not enough memory.
    """
    _check_records(path)
    try:
        # Programs derived from MAE save their argparse.Namespace with the weights; it only holds values.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except _BROKEN as error:
        if isinstance(error, pickle.UnpicklingError):
            named = str(error).partition("GLOBAL ")[2].partition(" ")[0]
            if named or zipfile.is_zipfile(path):
                raise UnsafeFileError(f"an object {named}" if named else first_line(error)) from error
        has_reason = isinstance(error, OSError | RuntimeError)
        raise ValueError(
            first_line(error) if has_reason else "it is not a file of torch.save, or it is damaged"
        ) from error


def _check_records(path: Path) -> None:
    """Raise ``ValueError`` for compressed records, which ``torch.save`` does not write: a few bytes may claim
    gigabytes."""
    try:
        with zipfile.ZipFile(path) as file:
            if any(record.compress_type != zipfile.ZIP_STORED for record in file.infolist()):
                raise ValueError("its records are compressed, and torch.save compresses none")
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, struct.error):
        pass  # an older format, or a damaged file, of which torch.load tells


def check_dense(name: str, value: Tensor) -> None:
    """Raise ``ValueError`` unless a stored tensor is a dense one on the CPU whose numbers are all in the file."""
    if type(value) not in (Tensor, nn.Parameter) or value.is_nested:
        kind = "nested" if value.is_nested else type(value).__name__
    elif value.layout != torch.strided:
        kind = str(value.layout).removeprefix("torch.")
    elif value.is_quantized:
        kind = f"quantised {value.dtype}"
    elif value.device.type != "cpu":
        kind = f"{value.device.type}, without numbers"
    elif value.numel() * value.element_size() > value.untyped_storage().nbytes():
        kind = f"{list(value.shape)} expanded from {value.untyped_storage().nbytes():,} bytes"
    else:
        return
    raise ValueError(f"{name} must be a dense tensor, got one that is {kind}")
