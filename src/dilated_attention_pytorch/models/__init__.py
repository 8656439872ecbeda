"""LongNet language models, encoders and encoder-decoders; the encoder of whole slides; caches and generation."""

from typing import TYPE_CHECKING, Any

from dilated_attention_pytorch.legacy import look_up

from .cache import LongNetCache
from .config import LongNetConfig
from .encoder import LongNetEncoder
from .encoder_decoder import LongNetEncoderDecoder
from .generation import generate, generate_naive
from .longnet import LongNetLM
from .slide_checkpoint import load_slide_encoder
from .slide_encoder import SlideEmbeddings, SlideEncoder, SlideEncoderConfig, pack_slides, released_segment_lengths
from .slide_grid import tile_grid

if TYPE_CHECKING:
    from .causal_lm import LongNetCausalLMConfig as LongNetCausalLMConfig
    from .causal_lm import LongNetForCausalLM as LongNetForCausalLM

# Names that need transformers are imported on demand, so that `import *` needs only torch.
__all__ = [
    "LongNetCache",
    "LongNetConfig",
    "LongNetEncoder",
    "LongNetEncoderDecoder",
    "LongNetLM",
    "SlideEmbeddings",
    "SlideEncoder",
    "SlideEncoderConfig",
    "generate",
    "generate_naive",
    "load_slide_encoder",
    "pack_slides",
    "released_segment_lengths",
    "tile_grid",
]


def __getattr__(name: str) -> Any:
    # transformers is an optional extra that takes seconds to import: it is loaded only if its model is used.
    if name in ("LongNetCausalLMConfig", "LongNetForCausalLM"):
        from . import causal_lm

        return getattr(causal_lm, name)
    return look_up("models", name)
