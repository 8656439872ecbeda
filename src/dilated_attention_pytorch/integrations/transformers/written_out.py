"""Attention that a module of transformers writes out itself: read from its operations, computed under the pattern.

``softmax(scale q k^T + mask) v`` is a product of two tensors, operations on the scores, a softmax and a second product.
While such a module runs, the first product is not computed: it becomes :class:`_Scores`, which notes what the module
does to it, and the second product calls the attention function. An operation that is none of attention's raises.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

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
        if func in _PRODUCTS and len(args) == 2 and self._may_be_scores(*args):
            return _Scores(self.site, args[0], args[1].transpose(-1, -2))
        if func in _SUMS:
            return self._sum(*args, **kwargs)
        if func in _SOFTMAX and any(isinstance(x, Tensor) and x.dim() > 2 for x in (*args, *kwargs.values())):
            raise self.site.refuse("takes a softmax of something else than queries times keys")
        if func is functional.multi_head_attention_forward:
            raise self.site.refuse("calls multi_head_attention_forward")
        return func(*args, **kwargs)

    def _may_be_scores(self, query: Any, key: Any) -> bool:
        are_tensors = isinstance(query, Tensor) and isinstance(key, Tensor)
        return are_tensors and query.dim() == key.dim() in (3, 4) and query.shape[-1] > 1

    def _sum(self, bias: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> _Scores:
        """``beta bias + alpha batch1 batch2``; a bias with the factor 0 may be any memory."""
        scores = _Scores(self.site, batch1, batch2.transpose(-1, -2)).scaled(alpha)
        is_zero = beta == 0 or (not bias.requires_grad and bias.shape[1:] == scores.shape[1:] and not bool(bias.any()))
        return scores if is_zero else scores.with_bias(bias, beta)


class _Lazy:
    """A tensor ``[..., N, M]`` that is not computed."""

    name = "scores"

    def __init__(self, site: _Site, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.site, self.shape, self.dtype, self.device = site, torch.Size(shape), dtype, device

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        lazy = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, _Lazy))
        return lazy.after(getattr(func, "__name__", str(func)), *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in _UNCHANGED and not hasattr(type(self), f"_on_{name.rstrip('_')}"):
            raise self.site.refuse(f"calls {name} of its {self.name}")
        return functools.partial(self.after, name, self)

    def after(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """What an operation of PyTorch gives, by its name: ``add``, ``__add__``, or in place, ``add_``."""
        name = operation.strip("_")
        if name in _UNCHANGED and args[0] is self:
            return self
        method = getattr(type(self), f"_on_{name}", None)
        is_in_place = operation == f"{name}_"
        if method is None or (is_in_place and args[0] is not self):
            raise self.site.refuse(f"calls {name} with its {self.name}")
        try:
            inspect.signature(method).bind(self, *args, **kwargs)
        except TypeError as error:
            raise self.site.refuse(f"calls {name} with its {self.name} ({error})") from None
        out = method(self, *args, **kwargs)
        if not is_in_place:
            return out
        vars(self).update(vars(out))
        return self

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def changed(self, **changes: Any) -> Any:
        again = copy.copy(self)
        vars(again).update(changes)
        return again

    def _on_view(self, _: Any, *shape: Any) -> Any:
        """The same with batch and heads in one dimension or in two."""
        sizes = list(shape[0] if isinstance(shape[0], (tuple, list)) else shape)
        known = math.prod(size for size in sizes if size != -1)
        sizes = [self.shape.numel() // known if size == -1 else int(size) for size in sizes]
        if sizes[-2:] != list(self.shape[-2:]) or math.prod(sizes) != self.shape.numel():
            raise self.site.refuse(f"reshapes its {self.name} to {sizes}")
        return self.changed(shape=torch.Size(sizes))

    _on_reshape = _on_view


def _operator(name: str) -> Any:
    def operator(self: _Lazy, *others: Any) -> Any:
        return self.after(name, *((others[0], self) if name.startswith("__r") else (self, *others)))

    return operator


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "getitem"):
    setattr(_Lazy, f"__{_name}__", _operator(f"__{_name}__"))


class _Scores(_Lazy):
    """``scale q k^T`` and the masks and slopes that were added to it."""

    def __init__(self, site: _Site, query: Tensor, key: Tensor) -> None:
        super().__init__(site, (*query.shape[:-1], key.shape[-2]), query.dtype, query.device)
        self.query, self.key = _heads(site, query), _heads(site, key)
        self.scale, self.has_slopes = 1.0, False
        self.masks: tuple[Tensor, ...] = ()

    def scaled(self, factor: Any) -> _Scores:
        if isinstance(factor, (Tensor, _Lazy)) and math.prod(factor.shape) > 1:
            raise self.site.refuse("multiplies its scores by a tensor")
        if self.has_slopes:
            raise self.site.refuse("scales its scores after a bias is added")
        scores: _Scores = self.changed(scale=self.scale * float(factor))
        return scores

    def with_mask(self, mask: Tensor) -> _Scores:
        scores: _Scores = self.changed(masks=(*self.masks, mask[None, None] if mask.dim() == 2 else mask))
        return scores

    def with_bias(self, bias: Tensor, factor: float = 1) -> _Scores:
        """The scores with ``bias [H or B * H, 1, M]`` added, ALiBi's of the module."""
        is_alibi = bias.shape[1] == 1 and factor == 1 and type(self.site.module).__name__ in _SLOPES
        if self.has_slopes or not is_alibi:
            raise self.site.refuse("adds a bias of its own to its scores")
        scores: _Scores = self.changed(has_slopes=True)
        return scores

    def _on_add(self, one: Any, other: Any) -> _Scores:
        added = other if one is self else one
        if isinstance(added, (int, float)) and added == 0:
            return self
        if not isinstance(added, Tensor):
            raise self.site.refuse(f"adds {getattr(added, 'name', type(added).__name__)} to its scores")
        return self.with_mask(added) if is_seal(added) or added.dim() != 3 else self.with_bias(added)

    _on_radd = _on_iadd = _on_add

    def _on_mul(self, one: Any, other: Any) -> _Scores:
        return self.scaled(other if one is self else one)

    _on_rmul = _on_imul = _on_mul

    def _on_div(self, scores: Any, factor: Any) -> _Scores:
        if scores is not self:
            raise self.site.refuse("divides by its scores")
        return self.scaled(1.0 / factor)

    _on_truediv = _on_rtruediv = _on_itruediv = _on_div

    def _on_masked_fill(self, _: Any, mask: Tensor, value: Any) -> _Scores:
        """Scores that are hidden where the mask is True; one of ours has its own values."""
        self._check_hides(value)
        return self.with_mask(mask if is_seal(mask) else ~mask)

    def _on_where(self, visible: Any, scores: Any, hidden: Any) -> _Scores:
        if visible is self:  # the order of the method
            visible, scores = scores, visible
        if scores is not self:
            raise self.site.refuse("keeps its scores where a mask is False")
        self._check_hides(hidden)
        return self.with_mask(visible)

    def _on_max(self, _: Any, least: Any) -> _Scores:
        self._check_hides(least)
        return self

    _on_maximum = _on_max

    def _on_expand_as(self, mask: Tensor, _: Any) -> Tensor:
        return mask.expand(self.shape)

    def _on_softmax(self, _: Any, dim: int | None = None, *options: Any, **named: Any) -> _Weights:
        if dim not in (-1, len(self.shape) - 1):
            raise self.site.refuse(f"takes the softmax of its scores over dimension {dim}")
        return _Weights(self)

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
        weights: _Weights = self.changed(dropout=p if training else 0.0)
        return weights

    def _on_matmul(self, weights: Any, value: Tensor) -> Tensor:
        if weights is not self:
            raise self.site.refuse("multiplies something by its weights")
        scores, value = self.scores, _heads(self.site, value)
        out = _attended(
            self.site, scores.query, scores.key, value, scores.masks, scores.scale, self.dropout,
            has_slopes=scores.has_slopes,
        )  # fmt: skip
        return out.view(*self.shape[:-1], value.shape[-1])

    _on_bmm = _on_rmatmul = _on_matmul


def _heads(site: _Site, tensor: Tensor) -> Tensor:
    """``[B, H, N, D]`` of a tensor that may have batch and heads in one dimension."""
    if tensor.dim() == 4:
        return tensor
    heads = next((getattr(site.module, name) for name in _HEADS if hasattr(site.module, name)), None)
    if not isinstance(heads, int):
        raise site.refuse(f"does not say how many heads a tensor of shape {tuple(tensor.shape)} has")
    if tensor.shape[0] % heads:
        raise site.refuse(f"multiplies a tensor of shape {tuple(tensor.shape)} that does not have its {heads} heads")
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
    return _attended(site, query, key, value, masks, scale, dropout_p, is_causal=is_causal)


def _attended(
    site: _Site,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: tuple[Tensor, ...],
    scale: float,
    dropout: float,
    *,
    has_slopes: bool = False,
    is_causal: bool = False,
) -> Tensor:
    """Attention ``[B, H, N, Dv]`` of tensors ``[B, H, N, D]``, ``[B, G, M, D]`` and ``[B, G, M, Dv]``."""
    from .attention import attend_written_out

    kind = type(site.module).__name__
    slopes = _SLOPES[kind](query.shape[1], query.device) if has_slopes else None
    # Some compute their scores in float32, of queries and keys in the dtype of the values.
    query, key = query.to(value.dtype), key.to(value.dtype)
    out = attend_written_out(site.module, query, key, value, masks, slopes, dropout, scale, is_causal=is_causal)
    return out.transpose(1, 2).contiguous()


def _slopes_of_bloom(num_heads: int, device: torch.device) -> Tensor:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    alibi = build_alibi_tensor(torch.ones(1, 2, device=device), num_heads, torch.float32)
    return alibi[:, 0, 1]


def _slopes_of_mpt(num_heads: int, device: torch.device) -> Tensor:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    alibi: Tensor = build_mpt_alibi_tensor(num_heads, 2, device=device)
    return -alibi[:, 0, 0]


_SLOPES = {"BloomAttention": _slopes_of_bloom, "MptAttention": _slopes_of_mpt}
"""The slopes ``[H]`` of modules whose bias by key is ALiBi's: ``slope t``, which in a softmax is ``-slope (p - t)``."""


_PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__)
_SUMS = (torch.baddbmm, Tensor.baddbmm)
_SOFTMAX = (torch.softmax, functional.softmax, Tensor.softmax)
