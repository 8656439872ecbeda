"""Training runs on text that can be stopped and taken up: LongNet language models, and pretrained models whose context
is extended."""

from dilated_attention_pytorch.errors import RunError

from .corpus import Corpus, read_corpus
from .extension import ExtensionOutcome, extend, resume_extension
from .extension_settings import ExtensionSettings
from .presets import PRESETS
from .run import Outcome, resume, train
from .settings import SampleSettings, TrainSettings

__all__ = [
    "PRESETS",
    "Corpus",
    "ExtensionOutcome",
    "ExtensionSettings",
    "Outcome",
    "RunError",
    "SampleSettings",
    "TrainSettings",
    "extend",
    "read_corpus",
    "resume",
    "resume_extension",
    "train",
]
