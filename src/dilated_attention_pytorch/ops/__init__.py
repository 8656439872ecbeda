"""The functional API: validate, plan, run kernels on partials, merge."""

from dilated_attention_pytorch.kernels.select import implementation

from .attend import attend, attend_with_lse, dilated_attention
from .merge import AttentionOutput, merge
from .selected_blocks import attend_blocks

__all__ = [
    "AttentionOutput",
    "attend",
    "attend_blocks",
    "attend_with_lse",
    "dilated_attention",
    "implementation",
    "merge",
]
