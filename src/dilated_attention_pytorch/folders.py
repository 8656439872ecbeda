"""Where this package keeps what it made on a machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/dilated-attention-pytorch``, or ``~/.cache/dilated-attention-pytorch``."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The rule for these folders: a relative path is not one.
    base = named if named.is_absolute() else Path.home() / ".cache"
    return base / "dilated-attention-pytorch"
