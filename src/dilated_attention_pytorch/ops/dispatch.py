"""The choice between PyTorch's dispatcher and a direct call of the function behind an operator.

Compilers, profilers, modes, transforms and tensor subclasses need the dispatcher. Its overhead per call is measured in
docs/kernels.md. Autograd does not need it: a ``torch.autograd.Function`` records the call.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.autograd import forward_ad


def _keys(*names: str) -> DispatchKeySet:
    found = DispatchKeySet(DispatchKey.Undefined)
    for name in names:
        found = found | DispatchKeySet(getattr(DispatchKey, name))
    return found


_OF_PLAIN_TENSORS = [
    _keys(*names, *of_autograd)
    for names, of_autograd in (
        (("CUDA", "AutocastCUDA"), ("ADInplaceOrView", "AutogradCUDA")),
        (("CPU", "AutocastCPU"), ("ADInplaceOrView", "AutogradCPU")),
        (("CUDA", "AutocastCUDA"), ()),
        (("CPU", "AutocastCPU"), ()),
    )
]
"""Dispatch keys of plain strided tensors; without the autograd keys for inference tensors."""
_WHERE_NOTHING_LOOKS_ON = [_keys("BackendSelect", "ADInplaceOrView"), _keys("BackendSelect")]
"""Thread-local dispatch keys when no mode, transform or tracer is active."""


def is_seen(*tensors: Tensor | None) -> bool:
    """Whether anything besides autograd must observe an operator on these tensors, so that it needs the dispatcher."""
    if torch.compiler.is_compiling() or is_dual_level() or torch.overrides.has_torch_function(tensors):
        return True
    if torch._C._autograd._profiler_enabled():  # the profiler records operators by name
        return True
    if torch._C._dispatch_tls_local_include_set() not in _WHERE_NOTHING_LOOKS_ON:
        return True
    for tensor in tensors:  # noqa: SIM110 - a generator costs as much as the test itself
        if tensor is not None and torch._C._dispatch_keys(tensor) not in _OF_PLAIN_TENSORS:
            return True
    return False


def is_recorded(*tensors: Tensor | None) -> bool:
    """Whether autograd records an operator on these tensors."""
    if not torch.is_grad_enabled() or torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD):
        return False
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


_AUTOGRAD = DispatchKey.AutogradFunctionality


def is_dual_level() -> bool:
    """Whether forward-mode AD is active; a cheap test, as every call makes it."""
    return forward_ad._current_level >= 0 and forward_ad._is_fwd_grad_enabled()
