"""Fine-tuning of the slide encoder on labels of slides or patients."""

import importlib
from typing import TYPE_CHECKING, Any

from .settings import FinetuneSettings

if TYPE_CHECKING:
    from .run import FinetuneOutcome, Finetuner

__all__ = ["FinetuneOutcome", "FinetuneSettings", "Finetuner"]


def __getattr__(name: str) -> Any:
    if name not in ("FinetuneOutcome", "Finetuner"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # It imports transformers.
    return getattr(importlib.import_module(".run", __name__), name)
