"""The functional API: validate, plan, run kernels on partials, merge."""

from dilated_attention_pytorch.kernels.select import implementation

from .attend import attend, attend_with_lse, dilated_attention
from .attention_map import attention_calls, attention_map, attention_maps, attention_rollout
from .merge import AttentionOutput, merge
from .scores import Scores
from .selected_blocks import attend_blocks

__all__ = [
    "AttentionOutput",
    "Scores",
    "attend",
    "attend_blocks",
    "attend_with_lse",
    "attention_calls",
    "attention_map",
    "attention_maps",
    "attention_rollout",
    "dilated_attention",
    "implementation",
    "merge",
]
