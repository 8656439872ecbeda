"""The functional API: validate, plan, run kernels on partials, merge."""

from .attend import attend, attend_with_lse, dilated_attention
from .merge import AttentionOutput, merge

__all__ = ["AttentionOutput", "attend", "attend_with_lse", "dilated_attention", "merge"]
