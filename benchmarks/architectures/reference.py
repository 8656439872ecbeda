"""What a model must give under a pattern, by dense attention of a dozen lines that shares nothing with the engine.

``attn_implementation="dense counts"`` is one softmax over ``scale q.k + mask + log c``, with the model's cap, bias and
sinks; the counts c come from the
definition of a dilated pattern, pair by pair. What the mask forbids stays forbidden, and a mask with a window of its
own takes no counts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

NAME = "dense counts"
LENGTHS, RATES = (8, 64), (1, 3)
"""Segments and rates of the pattern under which every architecture is judged."""


@dataclass
class _State:
    """Whether counts are added, and what happened since it was reset."""

    with_counts: bool = True
    causal_without_mask: bool = False
    calls: list[str] = field(default_factory=list)


STATE = _State()


def counts(num_heads: int, length: int) -> Tensor:
    """``c[g, p, t]``: in how many groups p and t share a segment and are both selected."""
    p = torch.arange(length)
    total = torch.zeros(num_heads, length, length, dtype=torch.float64)
    for g in range(num_heads):
        for w, r in zip(LENGTHS, RATES, strict=True):
            selected = p % w % r == g % r
            total[g] += (p[:, None] // w == p // w) & selected[:, None] & selected
    return total


_COUNTS: dict[tuple[int, int], Tensor] = {}


def dense_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """As transformers' attention functions: ``[B, H, N, D]`` in, ``[B, N, H, D]`` out."""
    groups, (length, columns) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    num_kv_heads = key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    seen = torch.ones(1, 1, length, columns, dtype=torch.bool)
    if attention_mask is not None:
        mask = attention_mask[..., :columns]
        seen = mask if mask.dtype == torch.bool else mask > torch.finfo(torch.float16).min
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + mask.to(scores.dtype).clamp(min=torch.finfo(scores.dtype).min / 4)
    elif STATE.causal_without_mask and getattr(module, "is_causal", True) and length > 1:
        seen = torch.ones(length, columns, dtype=torch.bool).tril()[None, None]
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    # Another length is another sequence, whose keys have no positions in the pattern.
    own = length == columns and sliding_window is None and not _has_window(seen[0, 0])
    STATE.calls.append("self" if own else "window" if length == columns else "cross")
    if own and STATE.with_counts:
        if (num_kv_heads, length) not in _COUNTS:
            _COUNTS[num_kv_heads, length] = counts(num_kv_heads, length)
        scores = scores + _COUNTS[num_kv_heads, length].log().repeat_interleave(groups, dim=0).to(scores.dtype)
    if s_aux is not None:  # a key of value 0 that every query sees
        sinks = s_aux.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores, value = torch.cat([scores, sinks], dim=3), functional.pad(value, (0, 0, 0, 1))
    out = scores.softmax(dim=-1) @ value
    return out.transpose(1, 2).contiguous(), None


def _has_window(seen: Tensor) -> bool:
    """Whether a pair is forbidden that neither the future nor padding forbids: all of a row's past is allowed."""
    if seen.shape[0] != seen.shape[1]:
        return False
    return not bool(seen.tril().eq(torch.ones_like(seen).tril()).all())


def register_reference() -> None:
    """Make :data:`NAME` an attention implementation, with the masks of eager attention."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, dense_attention)
    AttentionMaskInterface.register(NAME, eager_mask)


@contextmanager
def without_counts() -> Iterator[None]:
    """The same attention, dense: what a model gives that ignores the pattern."""
    STATE.with_counts = False
    try:
        yield
    finally:
        STATE.with_counts = True


@contextmanager
def causal_without_mask() -> Iterator[None]:
    """Where a model makes no mask its attention modules say whether they are causal, as for ``"sdpa"``."""
    STATE.causal_without_mask = True
    try:
        yield
    finally:
        STATE.causal_without_mask = False


@dataclass(frozen=True, slots=True)
class Site:
    """A module that computed attention, and the shape of its weights."""

    module: str
    shape: tuple[int, ...]
    through_interface: bool
    implementation: str | None
    """What the nearest configuration asks for."""


_SOFTMAX = ("_softmax", "_safe_softmax", "_scaled_dot_product")


class Watch(TorchDispatchMode):
    """Notes every softmax over keys, and whether an attention function of ours was computing it."""

    def __init__(self) -> None:
        super().__init__()
        self.sites: list[Site] = []
        self.modules: set[str] = set()
        self.models: set[str] = set()
        self._stack: list[nn.Module] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Watch:
        self._handles = [
            nn.modules.module.register_module_forward_pre_hook(self._begin),
            nn.modules.module.register_module_forward_hook(self._end, always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, arguments: Any) -> None:
        self._stack.append(module)
        if isinstance(module, PreTrainedModel):
            self.models.add(type(module).__name__)
        if "ttention" in type(module).__name__:
            self.modules.add(type(module).__name__)

    def _end(self, module: nn.Module, arguments: Any, result: Any) -> None:
        while self._stack and self._stack.pop() is not module:
            pass

    def _implementation(self) -> str | None:
        for module in reversed(self._stack):
            config = getattr(module, "config", None)
            if config is not None:
                found: str | None = getattr(config, "_attn_implementation", None)
                return found
        return None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2]
        if name.startswith(_SOFTMAX) and "backward" not in name:
            first = args[0]
            shape = (
                tuple(first.shape)
                if name.startswith("_s") and "scaled" not in name
                else (*first.shape[:-1], args[1].shape[-2])
            )
            dim = args[1] if "scaled" not in name else -1
            if isinstance(dim, int) and dim % first.dim() == first.dim() - 1 and len(shape) >= 3:
                module = next((type(m).__name__ for m in reversed(self._stack) if not isinstance(m, nn.Softmax)), "")
                self.sites.append(Site(module, shape, _inside_ours(), self._implementation()))
        return func(*args, **(kwargs or {}))


def _inside_ours() -> bool:
    """Whether the nearest caller that is a model's or an attention function is an attention function of ours."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/transformers/models/" in file:
            return False
        if "/dilated_attention_pytorch/" in file or frame.f_code is dense_attention.__code__:
            return True
        frame = frame.f_back
    return False
