"""Training runs on text that can be stopped and taken up: LongNet language models, and pretrained models whose context
is extended."""

from dilated_attention_pytorch.errors import RunError

from .extension import ExtensionOutcome, extend, resume_extension
from .extension_settings import ExtensionSettings
from .presets import PRESETS
from .run import Outcome, resume, train
from .settings import TrainSettings

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
