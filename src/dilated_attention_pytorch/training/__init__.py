"""Training runs of LongNet language models on text: settings, presets, and runs that can be stopped and taken up."""

from dilated_attention_pytorch.errors import RunError

from .corpus import Corpus, read_corpus
from .presets import PRESETS
from .run import Outcome, resume, train
from .settings import SampleSettings, TrainSettings

__all__ = [
    "PRESETS",
    "Corpus",
    "Outcome",
    "RunError",
    "SampleSettings",
    "TrainSettings",
    "read_corpus",
    "resume",
    "train",
]
