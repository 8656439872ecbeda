"""LongNet language models, encoders and encoder-decoders; caches and generation."""

from typing import TYPE_CHECKING, Any

from dilated_attention_pytorch.legacy import look_up

from .cache import LongNetCache
from .config import LongNetConfig
from .encoder import LongNetEncoder
from .encoder_decoder import LongNetEncoderDecoder
from .generation import generate, generate_naive
from .longnet import LongNetLM

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
    "generate",
    "generate_naive",
]


def __getattr__(name: str) -> Any:
    # transformers is an optional extra that takes seconds to import: it is loaded only if its model is used.
    if name in ("LongNetCausalLMConfig", "LongNetForCausalLM"):
        from . import causal_lm

        return getattr(causal_lm, name)
    return look_up("models", name)
