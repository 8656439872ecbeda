"""LongNet language models, their cache and their generation."""

from typing import TYPE_CHECKING, Any

from .cache import LongNetCache
from .config import LongNetConfig
from .generation import generate, generate_naive
from .longnet import AttentionFunction, LongNetLM
from .share import CacheShare

if TYPE_CHECKING:
    from .causal_lm import LongNetCausalLMConfig as LongNetCausalLMConfig
    from .causal_lm import LongNetForCausalLM as LongNetForCausalLM

# What needs transformers is asked for by its name, so that `import *` needs torch alone.
__all__ = [
    "AttentionFunction",
    "CacheShare",
    "LongNetCache",
    "LongNetConfig",
    "LongNetLM",
    "generate",
    "generate_naive",
]


def __getattr__(name: str) -> Any:
    # transformers is an extra, and importing it takes seconds: only who asks for its model pays.
    if name in ("LongNetCausalLMConfig", "LongNetForCausalLM"):
        from . import causal_lm

        return getattr(causal_lm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
