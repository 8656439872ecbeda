"""Attention that a module of transformers writes out itself: read from its operations, computed under the pattern.

``softmax(scale q k^T + mask) v`` is a product of two tensors, operations on the scores, a softmax and a second product.
While such a module runs, the first product is not computed: it becomes :class:`_Scores`, which notes what the module
does to it, and the second product calls the attention function. An operation that is none of attention's raises.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .config import NAME
from .documents import is_seal
from .visibility import HIDDEN

_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads")
_UNCHANGED = frozenset({"to", "float", "type", "type_as", "contiguous", "clone", "double", "half", "bfloat16"})
"""Methods that change neither scores nor weights: all is computed in the dtype of the attention function."""

OWN_LAYER = "dilated_layer"
"""Attribute of a layer that computes attention itself: its configuration and index."""


class _Site(NamedTuple):
    """The module that runs."""

    module: Any

    def refuse(self, what: str) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self.module).__name__} computes attention itself and {what}, which attention under a pattern does "
            'not: use "sdpa" or "eager" for this model, without a pattern'
        )


def write_under_pattern(module: nn.Module) -> None:
    """Let a module that computes attention itself attend under the pattern of its layer, in place."""
    module.forward = functools.partial(_forward, module)


@torch.compiler.disable(
    reason="a layer that computes attention itself runs outside of the graph under a pattern: compile without fullgraph"
)
def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    forward = type(module).forward
    config, _ = getattr(module, OWN_LAYER)
    if config._attn_implementation != NAME:
        return forward(module, *args, **kwargs)
    site = _Site(module)
    if kwargs.get("output_attentions"):
        raise site.refuse("returns the N x N weights")
    with _Reading(site):
        return _without_weights(forward(module, *args, **kwargs))


def _without_weights(out: Any) -> Any:
    """What a module returns, None in place of weights."""
    if isinstance(out, (_Scores, _Weights)):
        return None
    if type(out) in (tuple, list):
        return type(out)(_without_weights(part) for part in out)
    return out


class _Reading(TorchFunctionMode):
    """Takes products of two tensors for scores while a module runs."""

    def __init__(self, site: _Site) -> None:
        super().__init__()
        self.site = site

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return _scaled_dot_product(self.site, *args, **kwargs)
        scores = self._scores(func, args, kwargs)
        if scores is not None:
            return scores
        if func in _SOFTMAX and isinstance(args[0], Tensor) and args[0].dim() > 2:
            raise self.site.refuse("takes a softmax of something else than queries times keys")
        if func is functional.multi_head_attention_forward:
            raise self.site.refuse("calls multi_head_attention_forward")
        return func(*args, **kwargs)

    def _scores(self, func: Any, args: Any, kwargs: Any) -> _Scores | None:
        if func in _PRODUCTS and len(args) == 2 and all(isinstance(tensor, Tensor) for tensor in args):
            query, key = args
        elif func in (torch.baddbmm, Tensor.baddbmm):
            operands = list(args) + [kwargs[name] for name in ("batch1", "batch2") if name in kwargs]
            bias, query, key = operands
        else:
            return None
        if query.dim() != key.dim() or query.dim() not in (3, 4) or query.shape[-1] == 1:
            return None
        key = key.transpose(-1, -2)
        scores = _Scores(
            self.site, _heads(self.site, query), _heads(self.site, key), (*query.shape[:-1], key.shape[-2])
        )
        if func in _PRODUCTS:
            return scores
        scores.scale = float(kwargs.get("alpha", 1.0))
        return scores.with_bias(bias * kwargs.get("beta", 1.0))


class _Lazy:
    """A tensor ``[..., N, M]`` that is not computed."""

    name = "scores"

    def __init__(self, site: _Site, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.site, self.shape, self.dtype, self.device = site, torch.Size(shape), dtype, device

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lazy = next(value for value in (*args, *(kwargs or {}).values()) if isinstance(value, _Lazy))
        name = getattr(func, "__name__", str(func)).strip("_")
        method = getattr(type(lazy), f"_on_{name}", None)
        if method is None:
            raise lazy.site.refuse(f"calls {name} with its {lazy.name}")
        return method(lazy, *args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _UNCHANGED:
            return lambda *args, **kwargs: self
        if hasattr(type(self), f"_on_{name}"):
            return functools.partial(getattr(type(self), f"_on_{name}"), self, self)
        raise self.site.refuse(f"calls {name} of its {type(self).name}")

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def view(self, *shape: Any) -> Any:
        """The same with batch and heads in one dimension or in two."""
        sizes = list(shape[0] if isinstance(shape[0], (tuple, list)) else shape)
        known = math.prod(size for size in sizes if size != -1)
        sizes = [self.shape.numel() // known if size == -1 else int(size) for size in sizes]
        if sizes[-2:] != list(self.shape[-2:]) or math.prod(sizes) != self.shape.numel():
            raise self.site.refuse(f"reshapes its {type(self).name} to {sizes}")
        again = self.copy()
        again.shape = torch.Size(sizes)
        return again

    reshape = view

    def copy(self) -> Any:
        return object.__new__(type(self)).become(self)

    def become(self, other: _Lazy) -> Any:
        """Take what an operation in place gives."""
        vars(self).update(vars(other))
        return self


class _Scores(_Lazy):
    """``scale q k^T`` and the masks and bias that were added to it."""

    def __init__(self, site: _Site, query: Tensor, key: Tensor, shape: tuple[int, ...]) -> None:
        super().__init__(site, shape, query.dtype, query.device)
        self.query, self.key = query, key
        self.scale = 1.0
        self.masks: tuple[Tensor, ...] = ()
        self.bias: Tensor | None = None

    def scaled(self, factor: Any) -> _Scores:
        if isinstance(factor, Tensor) and factor.numel() > 1:
            raise self.site.refuse("multiplies its scores by a tensor")
        if self.bias is not None:
            raise self.site.refuse("scales its scores after a bias is added")
        again = self.copy()
        again.scale = self.scale * float(factor)
        return again

    def with_mask(self, mask: Tensor) -> _Scores:
        again = self.copy()
        again.masks = (*self.masks, mask[None, None] if mask.dim() == 2 else mask)
        return again

    def with_bias(self, bias: Tensor) -> _Scores:
        """The scores with ``bias [H or B * H, 1, M]`` added."""
        if bias.dim() == 3 and bias.shape[1:] == self.shape[-2:] and not bool(bias.any()):
            return self
        if self.bias is not None or bias.dim() != 3 or bias.shape[1] != 1:
            raise self.site.refuse("adds a bias of its own to its scores")
        again = self.copy()
        again.bias = bias
        return again

    def plus(self, other: Any) -> _Scores:
        if isinstance(other, (int, float)) and other == 0:
            return self
        if not isinstance(other, Tensor):
            raise self.site.refuse(f"adds {type(other).__name__} to its scores")
        if not is_seal(other) and other.dim() == 3:
            return self.with_bias(other)
        return self.with_mask(other)

    def __mul__(self, factor: Any) -> _Scores:
        return self.scaled(factor)

    def __truediv__(self, factor: Any) -> _Scores:
        return self.scaled(1.0 / float(factor))

    def __add__(self, other: Any) -> _Scores:
        return self.plus(other)

    __rmul__, __imul__, __itruediv__, __radd__, __iadd__ = __mul__, __mul__, __truediv__, __add__, __add__
    mul, div, add = __mul__, __truediv__, __add__

    def mul_(self, factor: Any) -> _Scores:
        return self.become(self * factor)

    def div_(self, factor: Any) -> _Scores:
        return self.become(self / factor)

    def add_(self, other: Any) -> _Scores:
        return self.become(self + other)

    def masked_fill_(self, mask: Tensor, value: Any) -> _Scores:
        return self.become(self.masked_fill(mask, value))

    def masked_fill(self, mask: Tensor, value: Any) -> _Scores:
        """Scores that are hidden where the mask is True; one of ours has its own values."""
        self._check_hides(value)
        return self.with_mask(mask if is_seal(mask) else ~mask)

    def softmax(self, dim: int | None = None, dtype: torch.dtype | None = None, **_: Any) -> _Weights:
        if dim not in (-1, len(self.shape) - 1):
            raise self.site.refuse(f"takes the softmax of its scores over dimension {dim}")
        return _Weights(self)

    def _on_softmax(self, _: Any, dim: int | None = None, *args: Any, **kwargs: Any) -> _Weights:
        return self.softmax(dim)

    def _on_where(self, visible: Any, scores: Any, hidden: Any) -> _Scores:
        if scores is not self:
            raise self.site.refuse("keeps its scores where a mask is False")
        self._check_hides(hidden)
        return self.with_mask(visible)

    def _on_max(self, _: Any, least: Any, **kwargs: Any) -> _Scores:
        self._check_hides(least)
        return self

    _on_maximum = _on_max

    def _on_add(self, one: Any, other: Any) -> _Scores:
        return self.plus(other if one is self else one)

    _on_radd = _on_iadd = _on_add

    def _on_mul(self, one: Any, other: Any) -> _Scores:
        return self.scaled(other if one is self else one)

    _on_rmul = _on_mul

    def _on_div(self, scores: Any, factor: Any, **kwargs: Any) -> _Scores:
        return self / factor

    def _on_expand_as(self, mask: Tensor, scores: Any) -> Tensor:
        return mask.expand(self.shape)

    def _on_masked_fill(self, scores: Any, mask: Tensor, value: Any) -> _Scores:
        return self.masked_fill(mask, value)

    def _check_hides(self, value: Any) -> None:
        if float(value) > HIDDEN:
            raise self.site.refuse(f"replaces scores by {float(value):g}")


class _Weights(_Lazy):
    """The softmax of scores."""

    name = "weights"

    def __init__(self, scores: _Scores) -> None:
        super().__init__(scores.site, scores.shape, scores.dtype, scores.device)
        self.scores, self.dropout = scores, 0.0

    def _on_dropout(self, _: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> _Weights:
        again = self.copy()
        again.dropout = p if training else 0.0
        return again

    def _on_matmul(self, weights: Any, value: Any) -> Tensor:
        if weights is not self:
            raise self.site.refuse("multiplies something by its weights")
        scores = self.scores
        query, key, value = (_heads(self.site, tensor) for tensor in (scores.query, scores.key, value))
        out = _attended(self.site, query, key, value, scores.masks, scores.bias, scores.scale, self.dropout)
        return out.view(*self.shape[:-1], value.shape[-1])

    _on_bmm = _on_matmul

    def __matmul__(self, value: Tensor) -> Tensor:
        return self._on_matmul(self, value)


def _heads(site: _Site, tensor: Tensor) -> Tensor:
    """``[B, H, N, D]`` of a tensor that may have batch and heads in one dimension."""
    if tensor.dim() == 4:
        return tensor
    heads = next((getattr(site.module, name) for name in _HEADS if hasattr(site.module, name)), None)
    if not isinstance(heads, int) or tensor.shape[0] % heads:
        raise site.refuse(f"does not say how many heads a tensor of shape {tuple(tensor.shape)} has")
    return tensor.unflatten(0, (-1, heads))


def _scaled_dot_product(
    site: _Site,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    masks = () if attn_mask is None else (attn_mask,)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, key, value = (_heads(site, tensor) for tensor in (query, key, value))
    return _attended(site, query, key, value, masks, None, scale, dropout_p, is_causal=is_causal)


def _attended(
    site: _Site,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: tuple[Tensor, ...],
    bias: Tensor | None,
    scale: float,
    dropout: float,
    *,
    is_causal: bool = False,
) -> Tensor:
    """Attention ``[B, H, N, Dv]`` of tensors ``[B, H, N, D]``, ``[B, G, M, D]`` and ``[B, G, M, Dv]``."""
    if bias is not None and type(site.module).__name__ not in _SLOPES:
        raise site.refuse("adds a bias of its own to its scores")
    slopes = None if bias is None else _SLOPES[type(site.module).__name__](site.module, query.shape[1], query.device)
    from .attention import attend_written_out

    # Some compute their scores in float32, of queries and keys in the dtype of the values.
    query, key = query.to(value.dtype), key.to(value.dtype)
    out = attend_written_out(site.module, query, key, value, masks, slopes, dropout, scale, is_causal=is_causal)
    return out.transpose(1, 2).contiguous()


def _slopes_of_bloom(module: Any, num_heads: int, device: torch.device) -> Tensor:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    alibi = build_alibi_tensor(torch.ones(1, 2, device=device), num_heads, torch.float32)
    return alibi[:, 0, 1]


def _slopes_of_mpt(module: Any, num_heads: int, device: torch.device) -> Tensor:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    alibi: Tensor = build_mpt_alibi_tensor(num_heads, 2, device=device)
    return -alibi[:, 0, 0]


_SLOPES = {"BloomAttention": _slopes_of_bloom, "MptAttention": _slopes_of_mpt}
"""The slopes ``[H]`` of modules whose bias by key is ALiBi's: ``slope t``, which in a softmax is ``-slope (p - t)``."""


_PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__)
_SOFTMAX = (torch.softmax, functional.softmax, Tensor.softmax)
