"""Whole slides from files of tile features to files of embeddings."""

from .embedding import Embedder, Outcome
from .files import Slide, read_slide
from .settings import EmbedSettings

__all__ = ["EmbedSettings", "Embedder", "Outcome", "Slide", "read_slide"]
