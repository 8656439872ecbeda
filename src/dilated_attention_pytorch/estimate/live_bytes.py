"""Live tensor bytes after every operation, for real or fake tensors."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dilated_attention_pytorch.ops import operators

Part = Literal["weights", "gradients", "optimizer", "activations", "loss", "temporaries", "cache"]
PARTS: tuple[Part, ...] = get_args(Part)
Phase = tuple[str, int]
"""The current computation, and the index of the model's or the loss's block it is for."""
Counts = tuple[int, ...]
"""Bytes of each category in :data:`PARTS`."""


class Moment(NamedTuple):
    """Live memory after one operation."""

    counts: Counts
    attention: str | None = None
    """Name of the operation if it is attention, whose temporary memory is not in ``counts``."""
    own: int = 0
    """That memory, if it was asked for."""


_ATTEND = operators.attend._opoverload
_OURS, _NATIVE = "dilated_attention_pytorch", "dilated_attention_native"


class LiveBytes(TorchDispatchMode):
    """A dispatch mode that counts storages from their creation until they are freed.

    The category of a storage follows from when it was created: in a forward pass (including recomputation) it is an
    activation; in a backward pass it is temporary, unless it becomes a gradient; in the loss it belongs to the loss,
    in both directions.

    Args:
        own_bytes: bytes that an attention operation with given operands allocates and frees; None = not recorded.

    Counts are exact for PyTorch tensors. Memory that an operation allocates and frees is not seen.
    """

    def __init__(self, own_bytes: Callable[[Any, tuple[Any, ...]], int] | None = None) -> None:
        super().__init__()
        self._own_bytes = own_bytes
        self.series: dict[Phase, list[Moment]] = {}
        """Live bytes after every operation that changed them, and after attention."""
        self.phase: Phase = ("begin", 0)
        self.part: Part | None = None
        """Category of new storages; None derives it from whether gradients are recorded."""
        self.is_recording = False
        self._now = dict.fromkeys(PARTS, 0)
        self._storages: dict[int, tuple[Part, int, weakref.ref[torch.UntypedStorage]]] = {}

    @property
    def moments(self) -> list[Moment]:
        """All that was recorded."""
        return [moment for series in self.series.values() for moment in series]

    def mark(self, tensors: Iterable[Tensor], part: Part) -> None:
        """Assign the storages of ``tensors`` to a category."""
        for tensor in tensors:
            self._forget(tensor.untyped_storage()._cdata)
            self._note(tensor, part)

    @contextmanager
    def made_as(self, part: Part) -> Iterator[None]:
        """Context in which new storages belong to a category."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See :class:`TorchDispatchMode`."""
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            # A model checks values for control flow; they do not affect memory.
            return 1
        results = func(*args, **(kwargs or {}))
        part = self.part or self._part_of(func)
        for place, leaf in enumerate(tree_leaves(results)):
            if isinstance(leaf, Tensor):
                self._note(leaf, part, _widened(func, args, place, leaf))
        if self.is_recording:
            self._record(func, args)
        return results

    def _record(self, func: Any, args: tuple[Any, ...]) -> None:
        series, counts = self.series.setdefault(self.phase, []), tuple(self._now.values())
        attention = func._opname if func.namespace == _OURS else None
        own = 0
        if self._own_bytes is not None and func.namespace in (_OURS, _NATIVE):
            own = self._own_bytes(func, args)
        # Views allocate nothing, and their number varies between library versions.
        if attention or own or not series or counts != series[-1].counts:
            series.append(Moment(counts, attention, own))

    def _part_of(self, func: Any) -> Part:
        if self.phase[0].startswith("loss"):
            return "loss"
        # Recomputation records operations under grad mode, except attention, which has its own
        # backward pass.
        is_forward = self.phase[0] in ("begin", "forward") or torch.is_grad_enabled() or func is _ATTEND
        return "activations" if is_forward else "temporaries"

    def _note(self, tensor: Tensor, part: Part, widened: int = 1) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = storage.nbytes() * widened
        gone = functools.partial(_on_free, weakref.WeakMethod(self._forget), key)
        self._storages[key] = (part, size, weakref.ref(storage, gone))
        self._now[part] += size

    def _forget(self, key: int) -> None:
        entry = self._storages.pop(key, None)
        if entry is not None:
            self._now[entry[0]] -= entry[1]


def _on_free(forget: weakref.WeakMethod[Callable[[int], None]], key: int, _: Hashable) -> None:
    call = forget()
    if call is not None:
        call(key)


def _widened(func: Any, args: tuple[Any, ...], place: int, result: Tensor) -> int:
    """Factor by which a real result is larger than the fake one.

    Mean and standard deviation of a low-precision LayerNorm with float32 weights are float32 on a CPU.
    """
    if func is not torch.ops.aten.native_layer_norm.default or place == 0:
        return 1
    weight = args[2]
    return 1 if weight is None else weight.element_size() // result.element_size()
