"""Whole slides: the slide encoder, and embedding of files of tile features."""

import importlib
from typing import TYPE_CHECKING, Any

from dilated_attention_pytorch.legacy import look_up

from .checkpoint import load_slide_encoder
from .contribution import gradient_times_input
from .encoder import SlideEmbeddings, SlideEncoder, SlideEncoderConfig, pack_slides, released_segment_lengths
from .grid import tile_grid
from .titan import TitanConfig, TitanEncoder, load_titan_encoder

if TYPE_CHECKING:
    from .embedding import Embedder, EmbedOutcome
    from .files import Slide, read_slide
    from .settings import EmbedSettings

__all__ = [
    "EmbedOutcome",
    "EmbedSettings",
    "Embedder",
    "Slide",
    "SlideEmbeddings",
    "SlideEncoder",
    "SlideEncoderConfig",
    "TitanConfig",
    "TitanEncoder",
    "gradient_times_input",
    "load_slide_encoder",
    "load_titan_encoder",
    "pack_slides",
    "read_slide",
    "released_segment_lengths",
    "tile_grid",
]

# The import of the package registers the encoder for saved programs; what reads files is imported on first use.
_ON_FIRST_USE = {
    "EmbedSettings": "settings",
    "Embedder": "embedding",
    "EmbedOutcome": "embedding",
    "Slide": "files",
    "read_slide": "files",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        return look_up("slides", name)
    return getattr(importlib.import_module(f".{_ON_FIRST_USE[name]}", __name__), name)
