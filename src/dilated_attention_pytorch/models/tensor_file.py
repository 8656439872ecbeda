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
    try:
        # Programs derived from MAE save their argparse.Namespace with the weights; it only holds values.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol", category=UserWarning)
            return torch.load(path, map_location="cpu", weights_only=True)
    except _BROKEN as error:
        if isinstance(error, pickle.UnpicklingError):
            named = str(error).partition("GLOBAL ")[2].partition(" ")[0]
            if named or zipfile.is_zipfile(path):
                raise UnsafeFileError(f"an object {named}" if named else first_line(error)) from error
        is_told = isinstance(error, OSError | RuntimeError)
        raise ValueError(first_line(error) if is_told else "it is no file of torch.save, or a damaged one") from error


def first_line(error: Exception) -> str:
    """The first line of an error message, shortened to fit into a sentence."""
    return str(error).strip().partition("\n")[0][:160] or type(error).__name__
