"""Multi-scale dilated attention in PyTorch, exact in forward and gradient."""

import sys

from .interrupt import is_command_line, leave_on_interrupt

leave_on_interrupt(sys.orig_argv)  # before all other imports

from .installation import check_files

check_files()
__version__ = "0.1.0"

import importlib
import os
from typing import TYPE_CHECKING, Any

if is_command_line(sys.orig_argv):
    # Help and misspelt names are answered without the seconds that torch takes.
    from .cli.words import answer

    answer(sys.argv[1:])

from .parent import end_command_with_launcher
from .waiting import choose_waiting

# The import of torch takes seconds, in which torchrun may be killed.
end_command_with_launcher(os.environ, sys.orig_argv)
# How threads wait is settled when torch is imported, which everything below does.
choose_waiting(os.environ, sys.orig_argv)

from . import legacy, slides  # noqa: F401 - slides registers its output for torch.export
from .auto_registration import register_with_models
from .models import LongNetCache, LongNetConfig, LongNetLM, generate
from .nn import MultiheadDilatedAttention, MultiheadPatternAttention
from .ops import AttentionOutput, attend, attend_with_lse, dilated_attention, merge
from .patterns import (
    DilatedPattern,
    Pattern,
    from_block_mask,
    global_tokens,
    hierarchical,
    local_window,
    per_head,
    random_blocks,
    strided_blocks,
)

if TYPE_CHECKING:
    from . import core as core
    from .core import create_adaptive_sparse_attention as create_adaptive_sparse_attention
    from .core import create_block_sparse_attention as create_block_sparse_attention
    from .core import create_dilated_attention as create_dilated_attention
    from .core import create_multihead_dilated_attention as create_multihead_dilated_attention
    from .core import create_ring_attention as create_ring_attention
    from .integrations import adopt, extend_context, replace_attention, set_pattern
    from .models import LongNetForCausalLM as LongNetForCausalLM

# `import *` works with torch alone: LongNetForCausalLM, which needs transformers, is asked for by its name.
__all__ = [
    "AttentionOutput",
    "DilatedPattern",
    "LongNetCache",
    "LongNetConfig",
    "LongNetLM",
    "MultiheadDilatedAttention",
    "MultiheadPatternAttention",
    "Pattern",
    "adopt",
    "attend",
    "attend_with_lse",
    "dilated_attention",
    "extend_context",
    "from_block_mask",
    "generate",
    "global_tokens",
    "hierarchical",
    "local_window",
    "merge",
    "per_head",
    "random_blocks",
    "replace_attention",
    "set_pattern",
    "strided_blocks",
]

_ON_FIRST_USE = {
    "LongNetForCausalLM": "models",
    "adopt": "integrations",
    "create_adaptive_sparse_attention": "core",
    "create_block_sparse_attention": "core",
    "create_dilated_attention": "core",
    "create_multihead_dilated_attention": "core",
    "create_ring_attention": "core",
    "extend_context": "integrations",
    "replace_attention": "integrations",
    "set_pattern": "integrations",
}

legacy.install()
register_with_models()


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        return getattr(importlib.import_module(f".{_ON_FIRST_USE[name]}", __name__), name)
    if name == "core":  # a module, imported on first use
        return importlib.import_module(".core", __name__)
    return legacy.look_up("", name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_FIRST_USE, "core"})
