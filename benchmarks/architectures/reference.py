"""What a model must give under a pattern, by dense attention of a dozen lines that shares nothing with the engine.

``attn_implementation="dense counts"`` is one softmax over ``scale q.k + mask + log c``, with the model's cap, bias and
sinks; the counts c come from the definition of a dilated pattern, pair by pair. What the mask forbids stays forbidden,
and a mask with a window of its own takes no counts. A mask of documents counts the positions of each anew. The same is
added to the scores of modules that take a softmax themselves.
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
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from .inputs import ROWS

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
    has_window = sliding_window is not None or _is_chunked(module)
    is_cross = length != columns or _is_told_cross()
    seen = seen.expand(-1, -1, length, -1)
    added = log_counts(seen, num_kv_heads, is_cross=is_cross, has_window=has_window).to(scores.dtype)
    scores = scores + (added.repeat_interleave(groups, dim=1) if added.shape[1] > 1 else added)
    if s_aux is not None:  # a key of value 0 that every query sees
        sinks = s_aux.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores, value = torch.cat([scores, sinks], dim=3), functional.pad(value, (0, 0, 0, 1))
    out = torch._softmax(scores, -1, False) @ value  # no function of _SOFTMAX_FUNCTIONS, which count as well
    return out.transpose(1, 2).contiguous(), None


def _is_told_cross() -> bool:
    """Whether the model's code that computes attention now says that the keys are of another sequence."""
    frame: Any = sys._getframe(2)
    while frame is not None and "/transformers/models/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and bool(frame.f_locals.get("is_cross_attention", False))


def _is_chunked(module: nn.Module) -> bool:
    """Whether a layer has chunks of its own in place of the pattern, as in Llama 4."""
    types, layer = getattr(module.config, "layer_types", None), getattr(module, "layer_idx", None)
    return types is not None and layer is not None and layer < len(types) and "chunked" in types[layer]


def log_counts(seen: Tensor, num_heads: int, *, is_cross: bool, has_window: bool) -> Tensor:
    """What is added to scores of which the mask lets ``seen [B or 1, 1, N, M]`` through, ``[B or 1, H, N, N]`` or 0."""
    length = seen.shape[2]
    starts = [_documents(row) for row in seen[:, 0]]
    # Another length is another sequence, whose keys have no positions in the pattern.
    own = not is_cross and not has_window and (starts[0] is not None or not _has_window(seen[0, 0]))
    STATE.calls.append("self" if own else "cross" if is_cross else "window")
    if not own or not STATE.with_counts:
        return torch.zeros(1, 1, 1, 1)
    if (num_heads, length) not in _COUNTS:
        _COUNTS[num_heads, length] = counts(num_heads, length)
    whole = _COUNTS[num_heads, length]
    if starts[0] is None:
        return whole[None].log()
    positions = [torch.arange(length) - (0 if start is None else start) for start in starts]
    return torch.stack([whole[:, own_positions][:, :, own_positions] for own_positions in positions]).log()


def _documents(seen: Tensor) -> Tensor | None:
    """The first row of every row's document, where the mask is of several that see all or the past of themselves."""
    length = seen.shape[0]
    if seen.shape[0] != seen.shape[1] or length < 2:
        return None
    rows = torch.arange(length)
    begins = torch.cat([torch.ones(1, dtype=torch.bool), ~seen.diagonal(offset=-1)])
    starts = torch.where(begins, rows, 0).cummax(dim=0).values
    same = starts[:, None] == starts
    is_of_documents = bool((seen == same).all()) or bool((seen == same.tril()).all())
    return starts if is_of_documents and 1 < int(begins.sum()) < length else None


def _has_window(seen: Tensor) -> bool:
    """Whether a pair is forbidden that neither the future nor padding forbids: all of a row's past is allowed."""
    if seen.shape[0] != seen.shape[1]:
        return False
    return not bool(seen.tril().eq(torch.ones_like(seen).tril()).all())


class CountsInSoftmax(TorchFunctionMode):
    """Adds the counts where a module that does not come to :func:`dense_attention` takes the softmax of its scores."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._stack: list[nn.Module] = []
        self._kv_heads: dict[tuple[int, ...], int] = {}
        self._configs = dict(_configs(model, None))
        self._handles = [
            handle
            for module in (model.modules() if NAME in self._configs.values() else ())
            for handle in (
                module.register_forward_pre_hook(lambda module, _: self._stack.append(module)),
                module.register_forward_hook(self._end, always_call=True),
            )
        ]

    def _end(self, *_: Any) -> None:
        self._stack.pop()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SOFTMAX_FUNCTIONS and self._is_own(args[0]):
            scores = args[0]
            hidden = scores <= -1e4
            seen = ~hidden.flatten(0, -3)[:1, None]
            heads = scores.shape[1] if scores.dim() == 4 else scores.shape[0] // ROWS
            num_kv_heads = self._kv_heads.get(tuple(scores.shape), heads)
            added = log_counts(seen, num_kv_heads, is_cross=_is_told_cross(), has_window=False).to(scores.dtype)
            if added.shape[1] > 1:
                added = added.repeat_interleave(heads // num_kv_heads, dim=1)
            if scores.dim() == 3:
                added = added[0].repeat(ROWS, 1, 1) if added.shape[1] > 1 else added[0]
            args = (scores + added, *args[1:])
        out = func(*args, **kwargs)
        if func in _PRODUCTS and args[1].dim() == 4:
            self._kv_heads[tuple(out.shape)] = args[1].shape[1]
        return out

    def _is_own(self, scores: Any) -> bool:
        names = [type(module).__name__ for module in self._stack[-3:]]
        if not isinstance(scores, Tensor) or scores.dim() < 3 or scores.shape[-1] != scores.shape[-2]:
            return False
        if scores.shape[-1] < 2 or not any("ttention" in name or "attn" in name.casefold() for name in names):
            return False
        if any("Cross" in name or "Pool" in name for name in names) or not self._stack:
            return False
        return self._configs.get(self._stack[-1]) == NAME


def _configs(module: nn.Module, implementation: str | None) -> Iterator[tuple[nn.Module, str | None]]:
    """Every module with the attention implementation of the nearest configuration."""
    config = vars(module).get("config")
    if config is not None:
        implementation = getattr(config, "_attn_implementation", None)
    yield module, implementation
    for child in module.children():
        yield from _configs(child, implementation)


def enter_tables() -> None:
    """Let models that look their class of attention up by name find that of "eager" under :data:`NAME`."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("transformers.models.") or "modeling_" not in name:
            continue
        for value in vars(module).values():
            if type(value) is dict and isinstance(value.get("eager"), type):
                value.setdefault(NAME, value["eager"])


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
    is_apart: bool
    """Whether it is in cross-attention or in a head that pools."""


_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
_SOFTMAX_FUNCTIONS = (torch.softmax, functional.softmax, Tensor.softmax)
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
                names = [type(parent).__name__ for parent in self._stack]
                is_apart = any("Cross" in name or "Pool" in name for name in names)
                self.sites.append(Site(module, shape, _inside_ours(), self._implementation(), is_apart))
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
