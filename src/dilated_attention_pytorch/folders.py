"""The cache folder of the package."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/dilated-attention-pytorch``, or ``~/.cache/dilated-attention-pytorch``."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # XDG Base Directory specification: ignore a relative path.
    base = named if named.is_absolute() else Path.home() / ".cache"
    return base / "dilated-attention-pytorch"
