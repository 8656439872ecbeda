"""Training runs on text that can be stopped and resumed: LongNet language models, and pretrained models whose context
is extended."""

import importlib
from typing import TYPE_CHECKING, Any

from dilated_attention_pytorch.errors import RunError

from .extension_settings import ExtensionSettings
from .presets import PRESETS
from .settings import TrainSettings

if TYPE_CHECKING:
    from .extension import ExtensionOutcome, extend, resume_extension
    from .run import Outcome, resume, train

__all__ = [
    "PRESETS",
    "ExtensionOutcome",
    "ExtensionSettings",
    "Outcome",
    "RunError",
    "TrainSettings",
    "extend",
    "resume",
    "resume_extension",
    "train",
]

_ON_FIRST_USE = {
    "ExtensionOutcome": "extension",
    "Outcome": "run",
    "extend": "extension",
    "resume": "run",
    "resume_extension": "extension",
    "train": "run",
}
"""Names by module: estimates need the settings of a run, and a run needs estimates."""


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        return getattr(importlib.import_module(f".{_ON_FIRST_USE[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
