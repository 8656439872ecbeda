"""Multi-scale dilated attention in PyTorch, exact in forward and gradient."""

from typing import TYPE_CHECKING, Any

from . import legacy
from .models import LongNetCache, LongNetConfig, LongNetLM, generate
from .nn import DilatedAttention, MultiheadDilatedAttention
from .ops import AttentionOutput, attend, attend_with_lse, dilated_attention, merge
from .patterns import DilatedPattern, Pattern, PatternSum

if TYPE_CHECKING:
    from .models import LongNetForCausalLM

__all__ = [
    "AttentionOutput",
    "DilatedAttention",
    "DilatedPattern",
    "LongNetCache",
    "LongNetConfig",
    "LongNetForCausalLM",
    "LongNetLM",
    "MultiheadDilatedAttention",
    "Pattern",
    "PatternSum",
    "attend",
    "attend_with_lse",
    "dilated_attention",
    "generate",
    "merge",
]

legacy.install()


def __getattr__(name: str) -> Any:
    if name == "LongNetForCausalLM":  # needs transformers, so it is loaded on first use
        from .models import LongNetForCausalLM

        return LongNetForCausalLM
    return legacy.look_up("", name)
