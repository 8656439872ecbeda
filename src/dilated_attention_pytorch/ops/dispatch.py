"""Whether a call goes through PyTorch's dispatcher, or straight to the function that it would find there.

The dispatcher is there for those who look on: compilers, profilers, modes, transforms, tensors that are not plain. The
way from Python through it and back takes time (docs/kernels.md). Autograd is none of them: it has a node of its own.
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
"""What the dispatcher finds out about tensors with strides and values; without autograd, made under inference mode."""
_WHERE_NOTHING_LOOKS_ON = [_keys("BackendSelect", "ADInplaceOrView"), _keys("BackendSelect")]
"""What it finds out about the thread where there is neither a mode nor a transform nor a tracer."""


def is_seen(*tensors: Tensor | None) -> bool:
    """Whether anything but autograd is to see an operator of these tensors: then it goes through the dispatcher."""
    if torch.compiler.is_compiling() or is_dual_level() or torch.overrides.has_torch_function(tensors):
        return True
    if torch._C._autograd._profiler_enabled():  # shows operators by their names
        return True
    if torch._C._dispatch_tls_local_include_set() not in _WHERE_NOTHING_LOOKS_ON:
        return True
    for tensor in tensors:  # noqa: SIM110 - a generator takes as long as what it asks
        if tensor is not None and torch._C._dispatch_keys(tensor) not in _OF_PLAIN_TENSORS:
            return True
    return False


def is_recorded(*tensors: Tensor | None) -> bool:
    """Whether autograd records an operator of these tensors."""
    if not torch.is_grad_enabled() or torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD):
        return False
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


_AUTOGRAD = DispatchKey.AutogradFunctionality


def is_dual_level() -> bool:
    """Whether there can be tangents at all: asked often, answered fast."""
    return forward_ad._current_level >= 0 and forward_ad._is_fwd_grad_enabled()
