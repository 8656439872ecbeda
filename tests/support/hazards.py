"""Forms that compilers are known to get wrong, searched for in a kernel as compiled."""

from __future__ import annotations

from typing import Any

from .machine_code import disassembled, violations
from .products import forms


def faults(code: Any, target: str) -> list[str]:
    """A sentence for every known fault of compilers in a kernel; for sm_90, in its machine code as well."""
    found = forms(code.asm["ttir"])
    options = [value for value in code.src.constants.values() if isinstance(value, tuple)]
    if any(isinstance(field, tuple) for value in options for field in value):
        found.append("a tuple in the options is not marked as constant: Triton 3.6 does not compile the kernel")
    if target == "sm_90":
        found += forms(code.asm["ttgir"])
        found += violations(disassembled(code.asm["cubin"]), code.metadata.num_warps)
    return found
