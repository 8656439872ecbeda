"""Adoption of torchscale's LongNet layers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.models.displaced_rows import warn_of_displaced_rows
from dilated_attention_pytorch.nn.linear import Linear
from dilated_attention_pytorch.nn.masks import check_causal
from dilated_attention_pytorch.ops import attend
from dilated_attention_pytorch.ops.validation import check_cu_seqlens, documents_of
from dilated_attention_pytorch.patterns import DilatedPattern
from dilated_attention_pytorch.patterns.dilated import Tail

from .torchscale_layers import LayerFacts, find_layers
from .xpos import attend_with_xpos


def adopt(model: nn.Module, *, tail: Tail = "zero_padded", fast_linear: bool = False) -> nn.Module:
    """Replace every dilated attention layer of a torchscale model, in place, by one that needs no flash-attn.

    A layer of torchscale's ``DilatedAttention``, or of a copy of it as in GigaPath, is recognised by its submodules
    ``q_proj``, ``k_proj``, ``v_proj``, ``out_proj`` and by ``args.segment_length`` and ``args.dilated_ratio`` (lists,
    or strings of lists). Its replacement is an :class:`AdoptedDilatedAttention` with the same submodule objects
    under the same names: state dicts are interchangeable and existing optimizers stay valid. Neither torchscale nor
    flash-attn is imported. All layers are checked before the first is replaced.

    Args:
        model: changed in place. It may itself be such a layer: then use the return value.
        tail: ``"zero_padded"`` reproduces checkpoints of the authors' code: classes of a segment are padded with keys
            of score 0 and value 0. ``"ragged"`` omits these, for training from scratch.
        fast_linear: make :class:`.nn.Linear` the class of each ``nn.Linear`` of the model, also outside of attention.

    Returns:
        ``model``, or the new layer if ``model`` is a layer.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: no such layer was found, or a layer's segments and rates are not a valid pattern.
        NotImplementedError: a layer has an unsupported feature: multiway projections, attention to an encoder,
            sequence parallelism, additional parameters or submodules, hooks. The message names the layer.

    Source: microsoft/torchscale, ``torchscale/component/dilated_attention.py``; LongNet, arXiv 2307.02486.

    >>> from types import SimpleNamespace
    >>> from dilated_attention_pytorch.integrations import adopt
    >>> layer = torch.nn.Module()
    >>> layer.args = SimpleNamespace(segment_length="[16, 64]", dilated_ratio="[1, 4]")
    >>> layer.embed_dim, layer.num_heads = 24, 4
    >>> for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
    ...     layer.add_module(name, torch.nn.Linear(24, 24))
    >>> model = adopt(torch.nn.ModuleDict({"self_attn": layer}))
    >>> x = torch.randn(2, 100, 24)
    >>> out, weights = model["self_attn"](x, x, x)
    >>> out.shape, weights
    (torch.Size([2, 100, 24]), None)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    layers = find_layers(model, tail)
    if not layers:
        adopted = sum(isinstance(module, AdoptedDilatedAttention) for module in model.modules())
        raise ValueError(
            "found no layer with the submodules q_proj, k_proj, v_proj and out_proj and with args.segment_length and "
            f"args.dilated_ratio, as torchscale's DilatedAttention has them, in {type(model).__name__}"
            + (f"; {adopted} layers of it are adopted already" if adopted else "; pass the model that holds them")
        )
    new = {id(layer): AdoptedDilatedAttention(layer, facts) for layer, facts in layers}
    for parent in list(model.modules()):
        # A layer shared by several modules, or one with several names, is replaced everywhere.
        for name, child in list(parent._modules.items()):
            if id(child) in new:
                setattr(parent, name, new[id(child)])
    model = new.get(id(model), model)
    for module in model.modules():
        if fast_linear and type(module) is nn.Linear:
            module.__class__ = Linear
    return model


class AdoptedDilatedAttention(nn.Module):
    """The replacement of a torchscale layer by :func:`adopt`: same call, submodules and state dict.

    ``out_proj(inner_attn_ln(attend(xpos(q_proj(query)), xpos(k_proj(key)), v_proj(value))))`` under the layer's pattern
    with block offsets. Intended differences from the authors' code: the merge weights of the groups are differentiated;
    attention dropout is active in training only; rows keep their positions where r does not divide w (with a
    warning where it matters); xPos does not overflow; ``key_padding_mask`` is honoured.
    """

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    out_proj: nn.Module

    def __init__(self, layer: nn.Module, facts: LayerFacts) -> None:
        super().__init__()
        self.embed_dim = facts.embed_dim
        self.num_heads = facts.num_heads
        self.head_dim = facts.embed_dim // facts.num_heads
        self.pattern: DilatedPattern = facts.pattern
        self.dropout = facts.dropout
        self._xpos = facts.xpos
        self._displaced: set[tuple[int, int]] = set()
        for name, child in layer._modules.items():
            self.add_module(name, child)
        self.training = layer.training

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        incremental_state: dict[str, Tensor] | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        rel_pos: Tensor | None = None,
        is_first_step: bool = False,
        is_causal: bool = False,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Attend as the torchscale layer does.

        Args:
            query, key, value: ``[B, N, E]``, of equal shape.
            incremental_state: for decoding with ``is_causal``: keys and values of earlier positions, which this
                call extends, as ``prev_key`` and ``prev_value`` ``[B, H, M, D]`` before xPos. Decoding step by step
                equals one call on the whole sequence.
            key_padding_mask: bool or integer ``[B, N]``, True = ignore. Every sequence gives the result of its other
                rows alone, wherever the ignored rows are; the heads of ignored rows are 0. On a GPU this synchronises.
                With an ``incremental_state`` it may also cover earlier positions, and must ignore none.
            attn_mask: None, or with ``is_causal`` the causal mask that torchscale's decoder passes.
            rel_pos: must be None.
            is_first_step: the ``incremental_state`` is still empty.
            is_causal: a query attends only to keys at or before its own position.
            cu_seqlens: int32 ``[documents + 1]`` boundaries of sequences packed along N.

        Returns:
            ``(out [B, N, E], None)``.

        Raises:
            NotImplementedError: an unsupported argument or combination; the message gives an alternative.
            TypeError, ValueError: wrong dtypes, shapes or values.
        """
        self._check_call(
            query,
            key,
            value,
            incremental_state,
            key_padding_mask,
            attn_mask,
            rel_pos,
            is_first_step,
            is_causal,
            cu_seqlens,
        )
        # [B, N, H, D] each
        q = self.q_proj(query).unflatten(-1, (self.num_heads, -1))
        k = self.k_proj(key).unflatten(-1, (self.num_heads, -1))
        v = self.v_proj(value).unflatten(-1, (self.num_heads, -1))
        if incremental_state is not None:
            heads = self._extended(q, k, v, incremental_state)
        elif key_padding_mask is not None and bool(key_padding_mask.any()):
            heads = self._unpadded(q, k, v, ~key_padding_mask.bool(), is_causal=is_causal)
        else:
            boundaries = documents_of(cu_seqlens, q.shape[1])
            heads = self._attend(q, k, v, is_causal=is_causal, boundaries=boundaries)
        joined = heads.flatten(-2)
        norm = self._modules.get("inner_attn_ln")
        if norm is not None:
            joined = norm(joined)
        return self.out_proj(joined), None

    def extra_repr(self) -> str:
        """The sizes and the pattern, for :class:`torch.nn.Module`'s representation."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, pattern={self.pattern}"

    def _check_call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        incremental_state: dict[str, Tensor] | None,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        rel_pos: Tensor | None,
        is_first_step: bool,
        is_causal: bool,
        cu_seqlens: Tensor | None,
    ) -> None:
        if query.dim() != 3 or query.shape[2] != self.embed_dim:
            raise ValueError(f"query must be [batch, sequence, {self.embed_dim}], got shape {tuple(query.shape)}")
        for name, x in (("key", key), ("value", value)):
            if x.shape != query.shape:
                raise ValueError(
                    f"{name} must have the shape {tuple(query.shape)} of query, as in self-attention, "
                    f"got {tuple(x.shape)}"
                )
        if rel_pos is not None:
            raise NotImplementedError(
                "rel_pos adds a bias to every score, which attention under a pattern never forms, and which "
                "torchscale's dilated attention refuses too; build the model with rel_pos_buckets=0"
            )
        if attn_mask is not None and is_causal:
            check_causal(attn_mask, query.shape[1], key.shape[1])
        elif attn_mask is not None:
            raise NotImplementedError(
                "attn_mask cannot be combined with a dilated pattern, save for the causal mask together with "
                "is_causal=True: pass is_causal=True, key_padding_mask for padding or cu_seqlens for packed sequences; "
                f"got a mask of {tuple(attn_mask.shape)} with is_causal={is_causal}"
            )
        if key_padding_mask is not None:
            # The mask of a decoder covers all positions so far.
            state = {} if incremental_state is None else incremental_state
            cached = state["prev_key"].shape[2] if "prev_key" in state else 0
            shapes = [[query.shape[0], number] for number in (query.shape[1], cached + query.shape[1])]
            if key_padding_mask.is_floating_point() or list(key_padding_mask.shape) not in shapes:
                raise ValueError(
                    f"key_padding_mask must be bool [batch, sequence] = {shapes[-1]} with True = ignore, "
                    f"got {key_padding_mask.dtype} {list(key_padding_mask.shape)}"
                )
            if (cu_seqlens is not None or incremental_state is not None) and bool(key_padding_mask.any()):
                raise NotImplementedError(
                    "key_padding_mask cannot be combined with cu_seqlens or incremental_state: leave the padding out "
                    "of the packed rows, and decode sequences of one length together"
                )
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, query)
        if incremental_state is None:
            if is_first_step:
                raise ValueError("is_first_step=True needs an incremental_state to fill, got None; pass a dict")
            return
        if not is_causal:
            raise NotImplementedError(
                "incremental_state needs is_causal=True: without it the earlier positions would have to see the new "
                "ones too; call with the whole sequence and without incremental_state"
            )
        if cu_seqlens is not None:
            raise NotImplementedError("incremental_state cannot be combined with cu_seqlens; decode without packing")
        if is_first_step and "prev_key" in incremental_state:
            raise ValueError(
                "is_first_step=True starts a new sequence, but incremental_state holds "
                f"{incremental_state['prev_key'].shape[2]} positions; pass an empty dict"
            )

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        is_causal: bool,
        query_offset: int = 0,
        boundaries: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Heads ``[B, N, H, D]`` of queries starting at ``query_offset``, or of packed sequences."""
        ends = (0, k.shape[1]) if boundaries is None else boundaries
        longest = max(stop - start for start, stop in pairwise(ends))
        warn_of_displaced_rows(self.pattern, longest, self._displaced, stacklevel=3)
        module = self._modules.get("dropout_module")
        dropout = module.p if isinstance(module, nn.Dropout) else self.dropout
        dropout_p = dropout if self.training else 0.0
        if self._xpos is not None:
            return attend_with_xpos(
                q,
                k,
                v,
                self.pattern,
                self._xpos,
                is_causal=is_causal,
                query_offset=query_offset,
                boundaries=boundaries,
                dropout_p=dropout_p,
            )
        # A decoding step is a slab. Slabs are always causal, and causal queries never see padding keys.
        pattern = self.pattern if q.shape[1] == k.shape[1] else replace(self.pattern, tail="ragged")
        return attend(
            q,
            k,
            v,
            pattern,
            is_causal=is_causal,
            query_offset=query_offset,
            dropout_p=dropout_p,
            cu_seqlens=None if boundaries is None else torch.tensor(boundaries, dtype=torch.int32),
            heads_first=False,
        )

    def _extended(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Heads of queries that follow the cached positions; appends their keys and values to the state."""
        # Layout and names of torchscale, which reorders the states in beam search.
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if "prev_key" in state:
            k = torch.cat((state["prev_key"], k), dim=2)
            v = torch.cat((state["prev_value"], v), dim=2)
        state["prev_key"], state["prev_value"] = k, v
        return self._attend(
            q, k.transpose(1, 2), v.transpose(1, 2), is_causal=True, query_offset=k.shape[2] - q.shape[1]
        )

    def _unpadded(self, q: Tensor, k: Tensor, v: Tensor, kept: Tensor, *, is_causal: bool) -> Tensor:
        """Heads ``[B, N, H, D]`` with the kept rows of every sequence attending as their own sequence."""
        boundaries = (0, *kept.sum(1).cumsum(0).tolist())
        packed = self._attend(q[kept][None], k[kept][None], v[kept][None], is_causal=is_causal, boundaries=boundaries)
        return packed.new_zeros(q.shape).masked_scatter(kept[..., None, None], packed)
