"""Bytes of the tensors that are alive, after every operation: of real tensors, or of fake ones that hold nothing."""

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

from dilated_attention_pytorch.ops import library

Part = Literal["weights", "gradients", "optimizer", "activations", "loss", "temporaries"]
PARTS: tuple[Part, ...] = get_args(Part)
Phase = tuple[str, int]
"""What is computed, and the number of the block of the model or of the loss that it is computed for."""
Counts = tuple[int, ...]
"""Bytes of every one of :data:`PARTS`."""


@dataclass(slots=True)
class Series:
    """What was alive after every operation of one phase that changed it, and after attention."""

    counts: list[Counts] = field(default_factory=list)
    attention: dict[int, str] = field(default_factory=dict)
    """Which of the operations are attention: its name, by place."""


_ATTEND = library.attend._opoverload


class LiveBytes(TorchDispatchMode):
    """While it is on, counts storages that operations make, until they are freed.

    The part of a storage is told by when it was made: in a forward pass (also where a block is computed again) it is of
    the activations; in a backward pass it is temporary, unless it becomes a gradient; for the loss it is of the loss,
    in both directions.

    Args:
        follows_resizing: look at every storage after every operation, as those of weights that FSDP gathers come and go
            without an operation.

    Every number is exact for tensors of PyTorch. What an operation takes and frees by itself is not seen.
    """

    def __init__(self, *, follows_resizing: bool = False) -> None:
        super().__init__()
        self._follows_resizing = follows_resizing
        self.series: dict[Phase, Series] = {}
        self.phase: Phase = ("begin", 0)
        self.part: Part | None = None
        """The part of what is made from now on; None tells it by whether gradients are recorded."""
        self.is_recording = False
        self._now = dict.fromkeys(PARTS, 0)
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], Part, int]] = {}

    @property
    def counts(self) -> Counts:
        """What is alive now."""
        return tuple(self._now.values())

    def mark(self, tensors: Iterable[Tensor], part: Part) -> None:
        """Count the storages of ``tensors`` as a part from now on."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._forget(local.untyped_storage()._cdata)
            self._note(local, part)

    @contextmanager
    def made_as(self, part: Part) -> Iterator[None]:
        """Count what is made within as a part."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See :class:`TorchDispatchMode`."""
        if any(issubclass(kind, DTensor) for kind in types):
            # What is split shows its parts one by one.
            return NotImplemented
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            # What an optimizer asks for is how many steps it took. It draws by that; nothing takes memory by it.
            return 1
        results = func(*args, **(kwargs or {}))
        part = self.part or self._part_of(func)
        for place, leaf in enumerate(tree_leaves(results)):
            if isinstance(leaf, Tensor):
                self._note(leaf, part, _widened(func, args, place, leaf))
        if self.is_recording:
            self._record(func)
        return results

    def _record(self, func: Any) -> None:
        if self._follows_resizing:
            self._resize()
        series, counts = self.series.setdefault(self.phase, Series()), self.counts
        is_attention = func.namespace == "dilated_attention_pytorch"
        if is_attention:
            series.attention[len(series.counts)] = func._opname
        # Views take nothing, and there are as many as it pleases the library.
        if is_attention or not series.counts or counts != series.counts[-1]:
            series.counts.append(counts)

    def _part_of(self, func: Any) -> Part:
        if self.phase[0].startswith("loss"):
            return "loss"
        # A block that is computed again records its operations, but for those of attention, which has a backward pass
        # of its own.
        is_forward = self.phase[0] == "forward" or torch.is_grad_enabled() or func is _ATTEND
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
            # What is wider than PyTorch says is no storage of a weight.
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
    """How many times larger a result is than PyTorch says of a fake one.

    Mean and deviation of a LayerNorm of low precision with float32 weights are float32 on a CPU.
    """
    if func is not torch.ops.aten.native_layer_norm.default or place == 0:
        return 1
    weight = args[2]
    return 1 if weight is None else weight.element_size() // result.element_size()
