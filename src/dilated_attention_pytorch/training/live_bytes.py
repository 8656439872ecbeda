"""Live tensor bytes after every operation, for real or fake tensors."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dilated_attention_pytorch.ops import operators

Part = Literal["weights", "gradients", "optimizer", "activations", "loss", "temporaries", "cache"]
PARTS: tuple[Part, ...] = get_args(Part)
Phase = tuple[str, int]
"""The current computation, and the index of the model's or the loss's block it is for."""
Counts = tuple[int, ...]
"""Bytes of each category in :data:`PARTS`."""


@dataclass(slots=True)
class Series:
    """Live bytes after every operation of one phase that changed them, and after attention."""

    counts: list[Counts] = field(default_factory=list)
    attention: dict[int, str] = field(default_factory=dict)
    """Names of the attention operations, by index."""
    own: dict[int, int] = field(default_factory=dict)
    """Bytes that attention operations allocate internally, by index, if ``own_bytes`` is given."""


_ATTEND = operators.attend._opoverload
_OF_ATTENTION = ("dilated_attention_pytorch", "dilated_attention_native")


class LiveBytes(TorchDispatchMode):
    """A dispatch mode that counts storages from their creation until they are freed.

    The category of a storage follows from when it was created: in a forward pass (including recomputation) it is an
    activation; in a backward pass it is temporary, unless it becomes a gradient; in the loss it belongs to the loss,
    in both directions.

    Args:
        follows_resizing: check every storage after every operation, since FSDP resizes the storages of gathered
            weights without an operation.
        own_bytes: bytes that an attention operation allocates internally for given operands; None = not recorded.

    Counts are exact for PyTorch tensors. Memory that an operation allocates and frees internally is not seen.
    """

    def __init__(
        self, *, follows_resizing: bool = False, own_bytes: Callable[[Any, tuple[Any, ...]], int] | None = None
    ) -> None:
        super().__init__()
        self._own_bytes = own_bytes
        self._follows_resizing = follows_resizing
        self.series: dict[Phase, Series] = {}
        self.phase: Phase = ("begin", 0)
        self.part: Part | None = None
        """Category of new storages; None derives it from whether gradients are recorded."""
        self.is_recording = False
        self._is_counting = True
        self._now = dict.fromkeys(PARTS, 0)
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], Part, int]] = {}

    @property
    def counts(self) -> Counts:
        """Current live bytes."""
        return tuple(self._now.values())

    def mark(self, tensors: Iterable[Tensor], part: Part) -> None:
        """Assign the storages of ``tensors`` to a category."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._forget(local.untyped_storage()._cdata)
            self._note(local, part)

    @contextmanager
    def made_as(self, part: Part) -> Iterator[None]:
        """Context in which new storages belong to a category."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Context in which new storages are not counted."""
        self._is_counting = False
        try:
            yield
        finally:
            self._is_counting = True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See :class:`TorchDispatchMode`."""
        if any(issubclass(kind, DTensor) for kind in types):
            # Tensor subclasses (DTensor) dispatch again with their local tensors.
            return NotImplemented
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            # The optimizer reads its step count for control flow; the value does not affect memory.
            return 1
        results = func(*args, **(kwargs or {}))
        if not self._is_counting:
            return results
        part = self.part or self._part_of(func)
        for place, leaf in enumerate(tree_leaves(results)):
            if isinstance(leaf, Tensor):
                self._note(leaf, part, _widened(func, args, place, leaf))
        if self.is_recording:
            self._record(func, args)
        return results

    def _record(self, func: Any, args: tuple[Any, ...]) -> None:
        if self._follows_resizing:
            self._resize()
        series, counts = self.series.setdefault(self.phase, Series()), self.counts
        is_attention = func.namespace == "dilated_attention_pytorch"
        if is_attention:
            series.attention[len(series.counts)] = func._opname
        own = 0
        if self._own_bytes is not None and func.namespace in _OF_ATTENTION:
            own = self._own_bytes(func, args)
            if own:
                series.own[len(series.counts)] = own
        # Views allocate nothing, and their number varies between library versions.
        if is_attention or own or not series.counts or counts != series.counts[-1]:
            series.counts.append(counts)

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
        self._storages[key] = (weakref.ref(storage, gone), part, size)
        self._now[part] += size

    def _resize(self) -> None:
        for key, (reference, part, size) in list(self._storages.items()):
            storage = reference()
            # Storages wider than PyTorch reports are not weights.
            if storage is not None and storage.nbytes() in (0, size) and storage.nbytes() != size:
                self._now[part] -= size
                self._storages[key] = (reference, part, 0)
            elif storage is not None and size == 0 and storage.nbytes():
                self._now[part] += storage.nbytes()
                self._storages[key] = (reference, part, storage.nbytes())

    def _forget(self, key: int) -> None:
        found = self._storages.pop(key, None)
        if found is not None:
            self._now[found[1]] -= found[2]


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
