"""Forms that compilers are known to get wrong, searched for in a kernel as compiled."""

from __future__ import annotations

from typing import Any

from .machine_code import disassembled, violations
from .products import forms


def faults(code: Any, target: str) -> list[str]:
    """A sentence for every known fault of compilers in a kernel; for sm_90, in its machine code as well."""
    found = forms(code.asm["ttir"])
    if target == "sm_90":
        found += forms(code.asm["ttgir"])
        found += violations(disassembled(code.asm["cubin"]), code.metadata.num_warps)
    return found
