"""Stand-ins for devices that no test has: tensors that name such a device, and hold their numbers on the CPU.

Within a :class:`StandIn`, every operation of PyTorch on these tensors is checked against what the device refuses and
what it computes wrong, then computed on the CPU. Uninitialised memory is NaN.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import torch
import torchgen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from dilated_attention_pytorch import attend_with_lse
from dilated_attention_pytorch.kernels.select import Impl
from dilated_attention_pytorch.ops import operators
from support.drawn import DrawnCall
from support.oracle import dense_attention

_OURS = {
    "attend": operators._attend,
    "attend_backward": operators._attend_backward,
    "weighted_sum": operators._weighted_sum,
}
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
_TYPES = {"cpu": 0, "cuda": 1, "xpu": 12, "mps": 13}
"""Numbers of the types of devices, c10/core/DeviceType.h."""
_COPIES = {"aten::_to_copy", "aten::copy_"}
_PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::baddbmm_", "aten::addmm_"}
_MOST_TERMS = 32_766
"""Terms that a product of Metal sums correctly on every chip."""


@functools.cache
def _guards() -> ctypes.Array[ctypes.c_void_p]:
    """PyTorch's guards by type of device, None for those that it was built without."""
    return (ctypes.c_void_p * (max(_TYPES.values()) + 1)).in_dll(ctypes.CDLL("libc10.so"), _GUARDS)


class OnDevice(Tensor):
    """A tensor of a :class:`StandIn`."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, kind: str) -> OnDevice:
        self = Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=torch.device(kind, 0),
        )
        self.numbers = numbers
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    def tolist(self) -> Any:
        """As a device's tensor has it; PyTorch refuses it for subclasses."""
        return self.numbers.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a stand-in's tensor outside of its context")


class StandIn(TorchDispatchMode):
    """A device of the type ``kind``, "mps", "xpu" or "cuda", which has what these have."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.seen: set[str] = set()
        """Names of the operations that were computed."""
        self.operands: tuple[Any, ...] = ()
        """The arguments of the last call of this package's operator ``attend``."""
        self._replaced: list[int | None] = []

    def __enter__(self) -> Self:
        """Set up what an operation asks for before it is dispatched: a guard of the device that does nothing."""
        guards = _guards()
        self._replaced.append(guards[_TYPES[self.kind]])
        guards[_TYPES[self.kind]] = guards[_TYPES["cpu"]]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _guards()[_TYPES[self.kind]] = self._replaced.pop()

    def holding(self, numbers: Tensor) -> OnDevice:
        """A tensor of this device with a copy of the numbers, in the same strides."""
        copy = torch.empty_strided(numbers.shape, numbers.stride(), dtype=numbers.dtype)
        return OnDevice(copy.copy_(numbers), self.kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if func.namespace == "dilated_attention_pytorch":
            if func._schema.name.endswith("::attend"):
                self.operands = args
            with self:
                return _OURS[func._opname](*args)
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        leaves = list(tree_iter((args, kwargs)))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        own = [x for x in tensors if isinstance(x, OnDevice)]
        asked = [x.type for x in leaves if isinstance(x, torch.device)]
        is_own = asked[0] == self.kind if asked else bool(own)
        if not own and not is_own:
            return func(*args, **kwargs)
        if self.kind == "cuda" and "flash_attention" in name:
            with self:  # the kernel that is registered, by PyTorch or by whoever replaced it
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args, **kwargs)
        others = [x for x in tensors if not isinstance(x, OnDevice) and x.dim()]
        assert not (own and others) or name in _COPIES, f"{func} mixes {self.kind} and the CPU"
        self.seen.add(f"{name[6:]}.{func._overloadname}".removesuffix(".default"))
        if self.kind == "mps":
            _check_on_metal(func, args, kwargs)
        results = func(*tree_map(_numbers, args), **tree_map(_numbers, kwargs))
        if self.kind == "mps" and name == "aten::baddbmm" and kwargs.get("beta", 1) == 0:
            results = results + _numbers(args[0]) * 0
        return tree_map(self._wrapped(func, args, kwargs, is_own=is_own), results)

    def _wrapped(self, func: Any, args: Any, kwargs: Any, *, is_own: bool) -> Callable[[Any], Any]:
        """What turns a result on the CPU into one of the device."""
        written = [
            kwargs[x.name] if x.name in kwargs else args[index]
            for index, x in enumerate(func._schema.arguments)
            if x.alias_info is not None and x.alias_info.is_write
        ]

        def wrap(result: Any) -> Any:
            if not isinstance(result, Tensor) or not is_own:
                return result
            for tensor in written:
                if _numbers(tensor) is result:
                    return tensor
            if "empty" in func._schema.name and result.is_floating_point():
                result.fill_(float("nan"))
            assert self.kind == "cuda" or result.dtype != torch.float64, f"{func}: {self.kind} has no float64"
            assert not result.is_complex()
            return OnDevice(result, self.kind)

        return wrap


def _numbers(x: Any) -> Any:
    if isinstance(x, torch.device):
        return torch.device("cpu")
    return x.numbers if isinstance(x, OnDevice) else x


def _check_on_metal(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse what PyTorch has no kernel for on Metal, and what is known to be computed wrong there."""
    name, overload = func._schema.name[6:], func._overloadname
    assert _has_metal_kernel(name if overload == "default" else f"{name}.{overload}"), f"{func} has no kernel for MPS"
    if name in ("randint", "random_", "random"):
        assert all(x < 2**31 for x in args if isinstance(x, int)), f"{func}: Metal draws 32 bits"
    if func._schema.name in _PRODUCTS:
        left, right = args[-2:]
        assert 0 not in left.stride() + right.stride(), f"{func}: a stride of 0, pytorch issue 180201"
        assert left.shape[-1] <= _MOST_TERMS, f"{func}: {left.shape[-1]} terms, pytorch issue 195163"
        assert not name.endswith("_"), f"{func}: written into a view, pytorch pull request 193385"
        assert "out" not in kwargs, f"{func}: written into a view, pytorch pull request 193385"


def on_cpu(tree: Any) -> Any:
    """The same with tensors on the CPU."""
    return tree_map(lambda x: x.numbers.clone() if isinstance(x, OnDevice) else x, tree)


def placed(device: StandIn, tree: Any) -> Any:
    """The same with tensors on a stand-in."""
    return tree_map(lambda x: device.holding(x) if isinstance(x, Tensor) else x, tree)


def results(device: StandIn, call: DrawnCall, *tensors: Tensor, impl: Impl = "auto") -> list[Tensor]:
    """out, lse with -inf as 0, and the gradients of query, key and value under a positive scale."""
    *inputs, grad_out = placed(device, tensors)
    with device:
        options: Any = {"is_causal": call.is_causal, "scale": call.scale, "impl": impl, **placed(device, call.options)}
        out, lse = attend_with_lse(*inputs, call.pattern, **options)
        grads = torch.ops.dilated_attention_pytorch.attend_backward.default(grad_out, None, out, lse, *device.operands)[
            :3
        ]
    return on_cpu([out, lse.numbers.masked_fill(lse.numbers.isinf(), 0.0), *grads])


def expected(call: DrawnCall, *tensors: Tensor) -> list[Tensor]:
    """What :func:`results` are by the definition."""
    q, k, v, grad_out = (x.double() for x in tensors)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    scale = 1 / math.sqrt(call.head_dim) if call.scale is None else call.scale
    out, lse = dense_attention(*inputs, *call.counts(), scale)
    grads = torch.autograd.grad((out * grad_out).sum(), inputs)
    return [out.detach(), lse.detach().masked_fill(lse.isinf(), 0.0), *grads]


@functools.cache
def _native_functions() -> dict[str, str]:
    """PyTorch's operations by name, each with its entry in ``native_functions.yaml``."""
    file = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    entries = re.split(r"^- func: ", file.read_text(), flags=re.MULTILINE)[1:]
    return {entry.partition("(")[0]: entry for entry in entries}


@functools.cache
def _has_metal_kernel(name: str) -> bool:
    entry = _native_functions().get(name)
    if entry is None:  # generated from another one
        return True
    delegate = re.search(r"structured_delegate: (\S+)", entry)
    if delegate is not None:
        return _has_metal_kernel(delegate[1])
    keys = set(_dispatch_keys(entry))
    return not keys or "MPS" in keys or any(key.startswith("Composite") for key in keys)


def _dispatch_keys(entry: str) -> Iterator[str]:
    for line in re.findall(r"^    ([A-Z][\w, ]*): \w+$", entry, flags=re.MULTILINE):
        yield from line.split(", ")
